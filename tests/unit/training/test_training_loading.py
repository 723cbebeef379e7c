"""Packs made ahead are the same packs in the same order, errors arrive with their message, no thread stays behind."""

import threading
import time

import pytest
import torch
from tiny_training import SHAPE, TinySource, tiny_config

from deepspec.errors import InputRefused
from deepspec.training.loading import Loader
from deepspec.training.packs import Packer

ORDER = ([3, 1, 2, 0], [7, 6, 5, 4], [1, 4])


class SlowSource(TinySource):
    """Takes its time, refuses one sample and counts how many threads read at once."""

    def __init__(self, broken: int = -1, delay: float = 0.0) -> None:
        super().__init__(8)
        self.broken, self.delay = broken, delay
        self.readers = self.most_readers = 0

    def get(self, indices):
        self.readers += 1
        self.most_readers = max(self.readers, self.most_readers)
        time.sleep(self.delay)
        self.readers -= 1
        if self.broken in indices:
            raise InputRefused(f"sample-{self.broken} is damaged")
        return super().get(indices)


def loader_of(source, tmp_path, ahead):
    """The masks are at hand, so each read of the source is a pack."""
    config = tiny_config(tmp_path, global_batch_size=4, micro_batch_size=2)
    documents = [row.sample for row in source.rows]
    packer = Packer(source, SHAPE, config.trainer, config.objective, seed=5, documents=documents)
    return packer, Loader(packer, (packer.window(indices, 2) for indices in ORDER), ahead)


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "packs"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_same_windows_and_packs_in_the_same_order(tmp_path, ahead):
    packer, loader = loader_of(TinySource(8), tmp_path, ahead)
    seen = []
    with loader:
        for loaded in loader:
            assert loaded.weights == packer.weights(loaded.window)
            for one, other in zip(loaded.packs, packer.packs(loaded.window), strict=True):
                assert one.sample_ids == other.sample_ids
                assert torch.equal(one.blocks.anchor_rows, other.blocks.anchor_rows)
                assert torch.equal(one.features, other.features)
            seen.append(list(loaded.window.indices))
    assert seen == [list(indices) for indices in ORDER] and not alive()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_is_raised_where_its_pack_would_have_come(tmp_path, ahead):
    _, loader = loader_of(SlowSource(broken=6), tmp_path, ahead)
    seen = []
    with pytest.raises(InputRefused, match="sample-6 is damaged"):
        with loader:
            for loaded in loader:
                for batch in loaded.packs:
                    seen += batch.sample_ids
    assert seen == [f"sample-{index}" for index in ORDER[0]] and not alive()


def test_leaving_early_ends_the_thread(tmp_path):
    source = SlowSource(delay=0.002)
    _, loader = loader_of(source, tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        with loader:
            for _ in loader:
                assert alive()
                raise KeyboardInterrupt
    assert not alive() and loader._queue.empty()
    assert source.most_readers == 1


def test_the_next_window_is_ready_when_the_step_ends(tmp_path):
    _, loader = loader_of(SlowSource(delay=0.01), tmp_path, 2)
    with loader:
        for number, loaded in enumerate(loader, start=1):
            list(loaded.packs)
            deadline = time.monotonic() + 5.0
            while loader._queue.qsize() < 2 and number < len(ORDER):
                assert time.monotonic() < deadline  # the head of the next window and its first pack
                time.sleep(0.001)
    assert number == len(ORDER)


def test_without_a_thread_the_wait_is_the_reading(tmp_path):
    _, loader = loader_of(SlowSource(delay=0.02), tmp_path, 0)
    with loader:
        for loaded in loader:
            assert not alive()
            list(loaded.packs)
            assert loaded.clock.seconds()["wait"] >= 0.02 * len(loaded.window.steps)


def test_the_queue_is_bounded(tmp_path):
    source = TinySource(8)
    _, loader = loader_of(source, tmp_path, 1)
    with loader:
        next(iter(loader))
        time.sleep(0.1)
        assert len(source.read) <= 4  # one pack waits, one is in the thread's hand


def test_nothing_is_read_while_quiet(tmp_path):
    source = SlowSource(delay=0.002)
    _, loader = loader_of(source, tmp_path, 3)
    with loader:
        first = next(iter(loader))
        with loader.quiet():
            before = len(source.read)
            time.sleep(0.05)
            assert len(source.read) == before
        assert [len(batch.sample_ids) for batch in first.packs] == [2, 2]
