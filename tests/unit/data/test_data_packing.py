"""Packs are a partition of the window within their limits, and padding changes nothing but shapes."""

import time

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny_data import sample, with_features

from deepspec.data.collate import collate
from deepspec.data.packing import PackItem, PackLimits, pack_window, worst_pack, worst_size
from deepspec.data.padding import pad
from deepspec.errors import InputRefused

SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=40)
LIMITS = st.builds(PackLimits, st.integers(60, 200), st.one_of(st.none(), st.integers(12, 40)), st.integers(1, 8))


def items_of(sizes: list[tuple[int, int]]) -> list[PackItem]:
    # Indices of a source, not positions of the window.
    return [PackItem(3 * position + 1, f"s{position}", *size) for position, size in enumerate(sizes)]


@settings(max_examples=150, deadline=None)
@given(SIZES, LIMITS, st.integers(1, 5))
def test_every_sample_is_in_one_pack_of_one_rank(sizes: list[tuple[int, int]], limits: PackLimits, world: int) -> None:
    items = items_of(sizes)
    ranks = pack_window(items, limits, world)
    assert ranks == pack_window(items, limits, world)
    assert len(ranks) == world and len({len(steps) for steps in ranks}) == 1
    packs = [step for steps in ranks for step in steps if not step.weightless]
    assert sorted(index for pack in packs for index in pack.indices) == [item.index for item in items]
    by_index = {item.index: item for item in items}
    for pack in packs:
        members = [by_index[index] for index in pack.indices]
        assert list(pack.indices) == sorted(pack.indices)
        assert limits.fits(sum(item.tokens for item in members), sum(item.anchors for item in members))
    # All packs beyond the first rounds are needed: two half-empty ones would have been joined.
    rounds = len(ranks[0])
    total_tokens, total_anchors = (sum(column) for column in zip(*sizes))
    least = max(total_tokens / limits.tokens, total_anchors / (limits.anchors or 10**9))
    assert world * (rounds - 1) < 2 * least + 1 if limits.anchors is None else world * (rounds - 1) < 4 * least + 1


@settings(max_examples=60, deadline=None)
@given(SIZES, LIMITS, st.integers(1, 4))
def test_no_pack_is_worse_than_the_rehearsed_one(sizes: list[tuple[int, int]], limits: PackLimits, world: int) -> None:
    items = items_of(sizes)
    tokens, anchors = worst_size(items, limits)
    by_index = {item.index: item for item in items}
    for steps in pack_window(items, limits, world):
        for step in steps:
            members = [by_index[index] for index in step.indices if not step.weightless]
            assert sum(item.tokens for item in members) <= tokens
            assert sum(item.anchors for item in members) <= anchors
    chosen = [by_index[index] for index in worst_pack(items, limits)]
    found = sum(item.tokens for item in chosen), sum(item.anchors for item in chosen)
    assert chosen and limits.fits(*found) and found[0] <= tokens and found[1] <= anchors


def test_packs_are_even_and_alike_on_all_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(40, 1024, (512,), generator=generator).tolist()
    items = [PackItem(index, str(index), size, min(512, size // 2)) for index, size in enumerate(sizes)]
    limits = PackLimits(4096, 2048, 7)
    ranks = pack_window(items, limits, 8)
    cost = {item.index: limits.cost(item.tokens, item.anchors) for item in items}
    costs = torch.tensor([[sum(cost[index] for index in step.indices) for step in steps] for steps in ranks])
    least = -(-sum(sizes) // 4096)
    assert costs.numel() < 1.1 * least + 8
    assert float(costs.max()) < 1.03 * float(costs.float().mean())
    # What a step waits for: the sum over its rounds of the costliest pack, against a perfect split.
    assert float(costs.amax(dim=0).sum()) < 1.02 * float(costs.sum()) / 8


def test_more_ranks_than_samples() -> None:
    ranks = pack_window(items_of([(10, 2), (20, 3)]), PackLimits(40, None, 4), 4)
    assert [[step.weightless for step in steps] for steps in ranks] == [[False], [False], [True], [True]]
    assert [steps[0].indices for steps in ranks[:2]] == [(4,), (1,)]


def test_blocks_close_a_pack_as_tokens_do() -> None:
    items = items_of([(10, 8)] * 6)
    assert [len(step.indices) for step in pack_window(items, PackLimits(60, None, 4), 1)[0]] == [6]
    assert [len(step.indices) for step in pack_window(items, PackLimits(60, 16, 4), 1)[0]] == [2, 2, 2]
    assert [len(step.indices) for step in pack_window(items, PackLimits(30, 48, 4), 1)[0]] == [3, 3]


@pytest.mark.parametrize("size,message", [
    ((61, 0), "'s1' has 61 tokens, more than trainer.pack_tokens=60"),
    ((60, 9), "'s1' has 9 anchors, more than trainer.pack_anchors=8"),
])
def test_a_sample_that_fits_nowhere_is_named(size: tuple[int, int], message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        pack_window(items_of([(5, 1), size]), PackLimits(60, 8, 4), 1)
    with pytest.raises(ValueError, match="0 samples"):
        pack_window([], PackLimits(60, 8, 4), 1)


def test_packing_a_window_is_fast() -> None:
    items = [PackItem(index, str(index), 100 + 7 * index % 3000, 40 + index % 400) for index in range(512)]
    started = time.process_time()
    for _ in range(5):
        pack_window(items, PackLimits(16384, 8192, 7), 8)
    assert (time.process_time() - started) / 5 < 0.05


def test_padding_is_a_document_of_its_own() -> None:
    parts = [with_features(sample("a", [0] * 3 + [1] * 9), seed=1), with_features(sample("b", [0, 1, 1, 1]), seed=2)]
    batch = collate(parts, num_anchors=4, draft_length=3, seed=0, epoch=0)
    padded = pad(batch, tokens=30, blocks=9)
    assert padded.padding == 14 and padded.document_starts == (0, 12, 16, 30) and padded.sample_ids == ("a", "b")
    assert padded.features.shape == (30, 16) and not padded.features[16:].any() and not padded.last_hidden[16:].any()
    count = len(batch.blocks)
    for name in ("anchor_rows", "context_starts", "anchor_ids", "label_ids", "previous_ids", "target_rows", "mask"):
        value = getattr(padded.blocks, name)
        assert len(value) == 9 and torch.equal(value[:count], getattr(batch.blocks, name))
    assert padded.blocks.anchor_rows[count:].tolist() == padded.blocks.context_starts[count:].tolist() == [16] * 3
    assert not padded.blocks.mask[count:].any()
    again = pad(padded, tokens=30, blocks=9)
    assert again.document_starts == padded.document_starts and again.padding == 14
    full = pad(batch, tokens=16, blocks=8)
    assert full.document_starts == (0, 12, 16) and full.padding == 0 and full.blocks.anchor_rows[-1] == 12
    with pytest.raises(ValueError, match="16 tokens and 6 blocks does not fit into 15 tokens"):
        pad(batch, tokens=15, blocks=9)
