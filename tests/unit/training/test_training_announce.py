"""What the loader tells its source: which packs come next, and that the first epoch is over."""

import threading

import pytest
from tiny_training import SHAPE, TinySource, tiny_config

from deepspec.data.order import windows
from deepspec.training.loading import Loader
from deepspec.training.packs import Packer


class Asking(TinySource):
    """Wants to know ``depth`` packs ahead."""

    def __init__(self, depth: int) -> None:
        super().__init__(count=10)
        self.depth, self.announced, self.seen = depth, [], 0
        self.behind: list[int] = []

    @property
    def wanted(self) -> int:
        return max(0, self.depth - (len(self.announced) - self.seen))

    def announce(self, indices):
        self.announced.append(tuple(indices))

    def get(self, indices):
        assert self.announced[self.seen] == tuple(indices)
        self.seen += 1
        self.behind.append(len(self.announced) - self.seen)
        return super().get(indices)


class Filling(TinySource):
    """Says what happens to it, in order."""

    def __init__(self) -> None:
        super().__init__(count=10)
        self.filling, self.events = True, []

    def get(self, indices):
        self.events.append("filled" if self.filling else "read")
        return super().get(indices)

    def finish(self):
        assert threading.current_thread() is threading.main_thread()
        self.filling = False
        self.events.append("finish")


def loaded(source, tmp_path, ahead: int, epochs: int = 2):
    config = tiny_config(tmp_path, micro_batch_size=2, global_batch_size=4)
    packer = Packer(source, SHAPE, config.trainer, config.objective, seed=1, documents=[r.sample for r in source.rows])
    order = (packer.window(indices, epoch) for epoch in range(epochs)
             for indices in windows(len(source), 4, seed=1, epoch=epoch))
    with Loader(packer, order, ahead) as loader:
        return [[pack.sample_ids for pack in item.packs] for item in loader]


@pytest.mark.parametrize("ahead", (0, 3))
@pytest.mark.parametrize("depth", (1, 4))
def test_packs_are_announced_as_far_as_the_source_wants(tmp_path, ahead, depth):
    source = Asking(depth)
    packs = [pack for item in loaded(source, tmp_path, ahead) for pack in item]
    assert [tuple(f"sample-{i}" for i in indices) for indices in source.announced] == packs
    assert len(packs) == source.seen == 10
    # Also at the end of a window, or a target rank would have nothing to do while the last packs are trained on.
    assert all(count >= min(depth - 1, 10 - done) for done, count in enumerate(source.behind, start=1))


@pytest.mark.parametrize("ahead", (0, 3))
def test_the_end_of_the_first_epoch_is_told_once_before_the_second_begins(tmp_path, ahead):
    source = Filling()
    loaded(source, tmp_path, ahead, epochs=3)
    assert source.events == ["filled"] * 5 + ["finish"] + ["read"] * 10


def test_one_epoch_needs_no_end(tmp_path):
    source = Filling()
    loaded(source, tmp_path, 2, epochs=1)
    assert source.events == ["filled"] * 5
