"""Hidden states over a gloo group, both ends in one process: order, bounds, numbers, what is said when one is gone."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from deepspec.data.batch import Sample
from deepspec.data.sources import OnlineFeatures
from deepspec.data.stream import Answer, Link, StreamedFeatures, agreement, needed_rows
from deepspec.data.stream_server import FeatureServer
from deepspec.distributed import Split
from deepspec.errors import UserError

WIDTH, LAYERS = 6, 3


class Model:
    """Hidden states that name their token and their place in it."""

    device = torch.device("cpu")

    def encode(self, input_ids, lengths):
        column = torch.arange(LAYERS * WIDTH, dtype=torch.float32) / 100
        return SimpleNamespace(features=input_ids[:, None] + column, last_hidden=-input_ids[:, None] - column[:WIDTH])


def documents(count: int = 9) -> list[Sample]:
    found = []
    for index in range(count):
        length = 5 + 3 * (index % 4)
        ids = torch.arange(length) + 100 * (index + 1)
        found.append(Sample(f"s{index}", "math", ids, torch.arange(length) >= 2 + index % 3))
    return found


class Recorder:
    """In the place of a Link: remembers what is asked for, answers when it is received."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.under_way = self.most = 0

    def ask(self, channel, number, indices, samples, answer):
        self.asked.append((number, tuple(indices)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return SimpleNamespace(indices=tuple(indices), documents=samples, answer=answer)

    def receive(self, asked):
        self.under_way -= 1
        return torch.zeros(asked.answer.tokens, LAYERS * WIDTH), torch.ones(asked.answer.rows, WIDTH)


def source(link, depth: int, channel: str = "train", dtype: torch.dtype = torch.float32) -> StreamedFeatures:
    return StreamedFeatures(link, channel, documents(), layers=LAYERS, hidden_size=WIDTH, dtype=dtype, depth=depth)


def test_an_answer_holds_only_what_is_needed():
    answer = Answer(tokens=7, rows=3, feature_width=LAYERS * WIDTH, hidden_width=WIDTH, dtype=torch.bfloat16)
    assert answer.size == 16 + 2 * (7 * LAYERS * WIDTH + 3 * WIDTH)
    buffer = answer.empty()
    header, features, hidden = answer.parts(buffer)
    assert (header.shape, features.shape, hidden.shape) == ((2,), (7, 18), (3, 6))
    for part, value in ((header, 5), (features, 1.5), (hidden, -2.0)):
        part.fill_(value)
    again = answer.parts(buffer.clone())
    assert torch.equal(again[0], header) and torch.equal(again[1], features) and torch.equal(again[2], hidden)


def test_rows_that_predict_a_supervised_label():
    both = documents(2)
    masks = [item.loss_mask for item in both]
    expected = [row for begin, mask in ((0, masks[0]), (len(masks[0]), masks[1]))
                for row in (begin + p for p in range(len(mask) - 1) if mask[p] and mask[p + 1])]
    assert needed_rows(both).tolist() == expected


@pytest.mark.parametrize("depth", (1, 3))
def test_announced_packs_are_asked_for_in_order_and_never_too_many(depth):
    recorder = Recorder()
    streamed = source(recorder, depth)
    packs = [(0, 1), (2,), (3, 4), (5,), (6, 7), (8,)]
    assert streamed.wanted == depth
    for pack in packs:
        streamed.announce(pack)
    assert len(recorder.asked) == depth and streamed.wanted == 0
    for done, pack in enumerate(packs, start=1):
        streamed.get(pack)
        assert len(recorder.asked) == min(len(packs), depth + done), "one more is on its way while this one is awaited"
    assert [indices for _, indices in recorder.asked] == packs and recorder.most <= depth + 1
    assert [number for number, _ in recorder.asked] == list(range(len(packs)))


def test_packs_nobody_announced_are_asked_for_and_a_wrong_order_is_a_defect():
    streamed = source(Recorder(), 2)
    assert [item.sample.sample_id for item in streamed.get([3, 1])] == ["s3", "s1"]
    streamed.announce((0,))
    with pytest.raises(RuntimeError, match="asked for where"):
        streamed.get((1,))


def group(store, rank: int, size: int):
    return Split(rank, size - 1, 1, store).connect(20.0)


def serve(store, size: int, dtype: torch.dtype, errors: list, stopping: bool = False, packs: int = 10**9) -> None:
    """A target rank with the last rank of ``size``; it dies after ``packs``."""
    try:
        sources = [OnlineFeatures(Model(), documents(), dtype=dtype) for _ in range(2)]
        server = FeatureServer(group(store, size - 1, size), size - 1, sources, feature_width=LAYERS * WIDTH,
                               hidden_width=WIDTH, dtype=dtype, stopping=lambda: stopping, idle_seconds=20.0)
        server.run()
        errors.append(server.packs)
    except Exception as error:
        errors.append(error)


def connected(dtype: torch.dtype = torch.float32, stopping: bool = False):
    store, result = HashStore(), []
    thread = threading.Thread(target=serve, args=(store, 2, dtype, result, stopping))
    thread.start()
    split = Split(0, 1, 1, store)
    return Link(split.connect(20.0), split, 20.0), thread, result


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_numbers_are_those_of_the_online_path(dtype):
    link, thread, result = connected(dtype)
    train, held_out = source(link, 2, dtype=dtype), source(link, 2, "held_out", dtype)
    online = OnlineFeatures(Model(), documents(), dtype=dtype)
    for pack in ((0, 1), (2, 3, 4), (8,)):
        train.announce(pack)
    for streamed, pack in ((held_out, (5, 6)), (train, (0, 1)), (train, (2, 3, 4)), (held_out, (7,)), (train, (8,))):
        for one, two in zip(streamed.get(pack), online.get(pack), strict=True):
            assert one.sample.sample_id == two.sample.sample_id and one.features.dtype == dtype
            assert torch.equal(one.features, two.features)
            rows = needed_rows([one.sample])
            assert torch.equal(one.last_hidden[rows], two.last_hidden[rows])
            others = torch.ones(len(one.last_hidden), dtype=torch.bool).index_fill(0, rows, False)
            assert not one.last_hidden[others].any()
    link.close()
    thread.join(20)
    assert result == [5]


def test_a_stop_of_a_target_rank_reaches_the_trainer_once(monkeypatch):
    sent: deque[tuple[int, int]] = deque()
    monkeypatch.setattr("deepspec.data.stream.os.kill", lambda pid, number: sent.append((pid, number)))
    link, thread, _ = connected(stopping=True)
    streamed = source(link, 1)
    for index in range(2):
        streamed.get((index,))
    link.close()
    thread.join(20)
    assert len(sent) == 1


def test_a_target_rank_that_does_not_answer():
    store = HashStore()
    silent = threading.Thread(target=group, args=(store, 1, 2))
    silent.start()
    split = Split(0, 1, 1, store)
    link = Link(split.connect(20.0), split, 0.3)
    silent.join(20)
    split.tell("failed-1", "OutOfMemoryError: too large")
    with pytest.raises(UserError, match="Target rank 1, .* has failed: OutOfMemoryError: too large"):
        source(link, 1).get((0,))


def test_agreement_of_both_sides():
    store = HashStore()
    split = Split(0, 1, 2, store)
    with pytest.raises(UserError, match="Target rank 1 was not ready after 0 s"):
        agreement(split, "a", 0.3)
    split.tell("ready-1", "a")
    split.tell("failed-2", "InputRefused: no such folder")
    with pytest.raises(UserError, match="Target rank 2 failed: InputRefused: no such folder"):
        agreement(split, "a", 5.0)
    other = Split(0, 1, 1, HashStore())
    other.tell("ready-1", "b")
    with pytest.raises(UserError, match="another target or other responses"):
        agreement(other, "a", 5.0)
