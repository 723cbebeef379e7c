"""Anchors, blocks, packs and the order of samples."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny_data import sample, with_features

from deepspec.data.anchors import build_blocks, sample_anchors, valid_anchors
from deepspec.data.collate import collate
from deepspec.data.order import epoch_order, micro_steps, windows

TWO_SPANS = [0] * 10 + [1] * 6 + [0] * 2 + [1] * 22  # supervised 10-15 and 18-39


def test_valid_anchors_of_two_spans() -> None:
    item = sample("a", TWO_SPANS)
    assert valid_anchors(item.loss_mask).tolist() == [*range(10, 15), *range(18, 39)]


def test_supervised_slots_are_a_contiguous_prefix() -> None:
    item = sample("a", TWO_SPANS)
    blocks = build_blocks([item], [torch.tensor([10, 13, 15, 20, 38])], 7)
    assert ["".join(map(str, row)) for row in blocks.mask.int().tolist()] == [
        "1111100", "1100000", "0000000", "1111111", "1000000",
    ]
    assert blocks.label_ids[1].tolist() == [114, 115, 0, 0, 0, 0, 0]
    assert blocks.previous_ids[1].tolist() == [113, 114, 115, 0, 0, 0, 0]
    assert blocks.target_rows[1].tolist() == [13, 14, 13, 13, 13, 13, 13]


def test_first_and_last_answer_token_are_labels() -> None:
    # Prompt of 3 tokens, answer of 4: the first answer token comes from the prefill, the other three are drafted.
    item = sample("a", [0, 0, 0, 1, 1, 1, 1])
    blocks = build_blocks([item], [valid_anchors(item.loss_mask)], 2)
    assert blocks.anchor_positions.tolist() == [3, 4, 5]
    assert sorted(set(blocks.label_ids[blocks.mask].tolist())) == [104, 105, 106]


def brute_force(mask: list[int], anchor: int, length: int) -> list[int]:
    row = []
    for slot in range(length):
        label = anchor + 1 + slot
        row.append(int(label < len(mask) and all(mask[anchor + 1:label + 1])))
    return row


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=4), st.integers(1, 9))
def test_blocks_of_a_pack_are_those_of_its_documents(masks: list[list[int]], length: int) -> None:
    documents = [sample(f"s{index}", mask, first=50 * index) for index, mask in enumerate(masks)]
    anchors = [valid_anchors(document.loss_mask) for document in documents]
    packed = build_blocks(documents, anchors, length)
    row = start = 0
    for document, mask, positions in zip(documents, masks, anchors):
        for anchor in positions.tolist():
            assert packed.mask[row].int().tolist() == brute_force(mask, anchor, length)
            assert packed.mask[row, 0]  # a valid anchor always has a label
            assert (packed.context_starts[row], packed.anchor_rows[row]) == (start, start + anchor)
            slots = int(packed.mask[row].sum())
            expected = document.input_ids[anchor + 1:anchor + 1 + slots]
            assert torch.equal(packed.label_ids[row, :slots], expected)
            assert packed.target_rows[row, :slots].tolist() == list(range(start + anchor, start + anchor + slots))
            row += 1
        start += len(mask)
    assert row == len(packed)


def test_no_block_crosses_into_the_next_document() -> None:
    documents = [sample("a", [1] * 20), sample("b", [1] * 20, first=500)]
    blocks = build_blocks(documents, [torch.arange(14, 20), torch.arange(0)], 7)
    assert blocks.mask.sum(1).tolist() == [5, 4, 3, 2, 1, 0]
    assert int(blocks.label_ids.max()) < 500
    assert int(blocks.target_rows.max()) < 20
    with pytest.raises(ValueError, match="outside its document"):
        build_blocks(documents, [torch.tensor([20]), torch.arange(0)], 7)


@pytest.mark.parametrize("supervised,expected", [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_few_valid_positions_are_all_used(supervised: int, expected: int) -> None:
    item = sample("a", [0] * 5 + [1] * supervised)
    assert len(sample_anchors(item.loss_mask, 512, seed=0, epoch=0, sample_id="a")) == expected
    assert len(sample_anchors(item.loss_mask, 1, seed=0, epoch=0, sample_id="a")) == min(1, expected)


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    mask = torch.ones(700, dtype=torch.bool)
    draw = sample_anchors(mask, 50, seed=1, epoch=2, sample_id="x")
    assert torch.equal(draw, sample_anchors(mask, 50, seed=1, epoch=2, sample_id="x"))
    assert draw.tolist() == sorted(set(draw.tolist()))
    for other in ({"seed": 3}, {"epoch": 3}, {"sample_id": "y"}):
        changed = sample_anchors(mask, 50, **({"seed": 1, "epoch": 2, "sample_id": "x"} | other))
        assert not torch.equal(draw, changed)
    # A fixed stream: a resume with another NumPy must draw the same.
    assert sample_anchors(mask, 5, seed=0, epoch=0, sample_id="a").tolist() == [167, 271, 315, 530, 688]


@pytest.mark.parametrize("candidates,budget,draws", [(40, 16, 4000), (700, 512, 10_000)])
def test_every_position_is_drawn_equally_often(candidates: int, budget: int, draws: int) -> None:
    mask = torch.ones(candidates + 1, dtype=torch.bool)
    counts = np.zeros(candidates + 1)
    for epoch in range(draws):
        counts[sample_anchors(mask, budget, seed=0, epoch=epoch, sample_id="a").numpy()] += 1
    assert counts[-1] == 0  # the last token has no label
    share = budget / candidates
    deviation = np.abs(counts[:-1] / draws - share) / np.sqrt(share * (1 - share) / draws)
    assert deviation.max() < 4.5


def test_collate_is_the_same_packed_or_not() -> None:
    items = [with_features(sample("a", TWO_SPANS), seed=1), with_features(sample("b", [0] * 4 + [1] * 9), seed=2)]
    options = {"num_anchors": 6, "draft_length": 4, "seed": 3, "epoch": 1}
    packed = collate(items, **options)
    single = [collate([item], **options) for item in items]
    assert packed.document_starts == (0, 40, 53)
    assert packed.positions.tolist() == [*range(40), *range(13)]
    assert torch.equal(packed.features, torch.cat([batch.features for batch in single]))
    assert torch.equal(packed.blocks.label_ids, torch.cat([batch.blocks.label_ids for batch in single]))
    shifted = torch.cat([single[0].blocks.target_rows, single[1].blocks.target_rows + 40])
    assert torch.equal(packed.blocks.target_rows, shifted)
    assert torch.equal(packed.input_ids[packed.blocks.anchor_rows], packed.blocks.anchor_ids)


@pytest.mark.parametrize("mask,anchors", [([0] * 6, 5), ([0] * 5 + [1], 5), ([1] * 6, 0)])
def test_a_pack_without_blocks_has_empty_tensors(mask: list[int], anchors: int) -> None:
    batch = collate([with_features(sample("a", mask))], num_anchors=anchors, draft_length=3, seed=0, epoch=0)
    assert len(batch.blocks) == 0
    assert batch.blocks.label_ids.shape == batch.blocks.mask.shape == batch.blocks.target_rows.shape == (0, 3)
    assert batch.features[batch.blocks.target_rows].shape == (0, 3, 16)


def test_mixed_pack_keeps_the_documents_without_anchors() -> None:
    masks = ([0] * 6, [0] * 4 + [1, 1], [0] * 3 + [1, 1, 1])
    items = [with_features(sample(str(index), mask)) for index, mask in enumerate(masks)]
    batch = collate(items, num_anchors=9, draft_length=3, seed=0, epoch=0)
    assert batch.blocks.context_starts.tolist() == [6, 12, 12]
    assert batch.sample_ids == ("0", "1", "2")


def test_collate_names_the_sample_with_missing_rows() -> None:
    item = with_features(sample("short", [1] * 6))
    with pytest.raises(ValueError, match="'short' has 6 tokens"):
        collate([type(item)(item.sample, item.features[:-1], item.last_hidden)], num_anchors=1, draft_length=1, seed=0,
                epoch=0)
    with pytest.raises(ValueError, match="at least one sample"):
        collate([], num_anchors=1, draft_length=1, seed=0, epoch=0)


def test_collate_is_fast() -> None:
    item = with_features(sample("a", [1] * 4096), width=4)
    collate([item], num_anchors=512, draft_length=7, seed=0, epoch=0)
    started = time.process_time()
    for epoch in range(20):
        collate([item], num_anchors=512, draft_length=7, seed=0, epoch=epoch)
    assert (time.process_time() - started) / 20 < 0.02


def test_epochs_differ_and_repeat() -> None:
    assert epoch_order(50, 0, 1) == epoch_order(50, 0, 1)
    assert epoch_order(50, 0, 1) != epoch_order(50, 0, 0)
    assert epoch_order(50, 1, 0) != epoch_order(50, 0, 0)
    assert sorted(epoch_order(50, 0, 1)) == list(range(50))


@pytest.mark.parametrize("n,world,micro", [(10, 4, 1), (10, 1, 3), (3, 4, 2), (16, 2, 4), (1, 3, 1)])
def test_ranks_take_equally_many_steps_and_each_sample_once(n: int, world: int, micro: int) -> None:
    epoch = windows(n, 8, seed=0, epoch=0)
    assert [len(window) for window in epoch] == [8] * (n // 8) + ([n % 8] if n % 8 else [])
    seen = []
    for window in epoch:
        shares = [micro_steps(window, rank=rank, world_size=world, micro_batch_size=micro) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        real = [step for share in shares for step in share if not step.weightless]
        assert all(1 <= len(step.indices) <= micro for step in real)
        seen += [index for step in real for index in step.indices]
    assert sorted(seen) == list(range(n))


def test_order_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="global_batch_size=0"):
        windows(4, 0, seed=0, epoch=0)
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        micro_steps([0], rank=0, world_size=1, micro_batch_size=0)
    with pytest.raises(ValueError, match="rank=2"):
        micro_steps([0], rank=2, world_size=2, micro_batch_size=1)
