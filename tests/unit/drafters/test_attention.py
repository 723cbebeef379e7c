"""What a block sees, against a brute-force reference in float64."""

import pytest
import torch
from drafter_cases import DOCUMENTS, SHAPE, pack
from torch import Tensor
from torch.autograd import gradcheck

from deepspec.data.batch import AnchorBlocks
from deepspec.drafters import attention
from deepspec.drafters.attention import context_attention, inject_cached_context, inject_context, plan_context

SLOTS, HEADS, KEY_HEADS, WIDTH = 4, 4, 2, 8


def tensors(blocks: int, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (
        (blocks, SLOTS, HEADS, WIDTH), (rows, KEY_HEADS, WIDTH), (rows, KEY_HEADS, WIDTH),
        (blocks, SLOTS, KEY_HEADS, WIDTH), (blocks, SLOTS, KEY_HEADS, WIDTH),
    )
    return [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def brute_force(
    blocks: AnchorBlocks, query: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor,
) -> Tensor:
    """Slot by slot, head by head, over exactly the rows a slot may see."""
    result = []
    for block, (row, start) in enumerate(zip(blocks.anchor_rows.tolist(), blocks.context_starts.tolist(), strict=True)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KEY_HEADS)
            seen_k = torch.cat((keys[start:row, group], own_k[block, :, group]))
            seen_v = torch.cat((values[start:row, group], own_v[block, :, group]))
            heads.append(torch.softmax(query[block, :, head] @ seen_k.T * WIDTH**-0.5, dim=-1) @ seen_v)
        result.append(torch.stack(heads, dim=1))
    return torch.stack(result)


@pytest.mark.parametrize("score_bytes", [1, 3000, 1 << 24])
def test_equals_brute_force_forward_and_backward(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.SCORE_BYTES, "cpu", score_bytes)
    batch = pack(SHAPE, DOCUMENTS)
    inputs = tensors(len(batch.blocks), len(batch.input_ids))
    chunks = plan_context(batch.blocks.anchor_rows, batch.blocks.context_starts, SLOTS * HEADS)
    found, expected = inject_context(*inputs, chunks), brute_force(batch.blocks, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(found)
    for ours, reference in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True,
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_numeric_gradient_through_values_and_log_sum_exp() -> None:
    batch = pack(SHAPE, ((5, (0, 2, 4)), (3, (1,))))
    query, keys, values, *_ = tensors(4, 8)
    chunks = plan_context(batch.blocks.anchor_rows, batch.blocks.context_starts, SLOTS * HEADS)

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        attended, lse = context_attention(*inputs, chunks)
        return attended, lse[1:]  # the first block has no context: its log-sum-exp is -inf

    assert gradcheck(both, (query, keys, values), eps=1e-6, atol=1e-6)


def test_empty_context_is_finite_forward_and_backward() -> None:
    """An anchor at position 0, alone and beside others."""
    for documents in (((6, (0,)),), ((6, (0, 3)), (5, (0,)))):
        batch = pack(SHAPE, documents)
        inputs = tensors(len(batch.blocks), len(batch.input_ids), torch.float32)
        chunks = plan_context(batch.blocks.anchor_rows, batch.blocks.context_starts, SLOTS * HEADS)
        found = inject_context(*inputs, chunks)
        grads = torch.autograd.grad(found.square().sum(), inputs)
        assert found.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        torch.testing.assert_close(
            found.double(), brute_force(batch.blocks, *(item.double() for item in inputs)), rtol=1e-5, atol=1e-5,
        )


def test_no_memory_for_other_documents() -> None:
    """Chunks never cover rows of another document, nor rows behind the last anchor."""
    batch = pack(SHAPE, DOCUMENTS)
    chunks = plan_context(batch.blocks.anchor_rows, batch.blocks.context_starts, SLOTS * HEADS)
    seen = sorted(block for chunk in chunks for block in chunk.blocks.tolist())
    with_context = (batch.blocks.anchor_rows > batch.blocks.context_starts).nonzero().flatten()
    assert seen == with_context.tolist()
    for chunk in chunks:
        assert (batch.blocks.context_starts[chunk.blocks] == chunk.start).all()
        assert chunk.stop == batch.blocks.anchor_rows[chunk.blocks].max()


def test_padded_context_equals_the_pack() -> None:
    batch = pack(SHAPE, DOCUMENTS)
    query, keys, values, own_k, own_v = tensors(len(batch.blocks), len(batch.input_ids), torch.float32)
    chunks = plan_context(batch.blocks.anchor_rows, batch.blocks.context_starts, SLOTS * HEADS)
    expected = inject_context(query, keys, values, own_k, own_v, chunks)
    rows, starts = batch.blocks.anchor_rows, batch.blocks.context_starts
    lengths = rows - starts
    padded = torch.full((2, len(rows), int(lengths.max()) + 3, KEY_HEADS, WIDTH), 1e4)
    for block, (start, row) in enumerate(zip(starts.tolist(), rows.tolist(), strict=True)):
        padded[0, block, :row - start], padded[1, block, :row - start] = keys[start:row], values[start:row]
    found = inject_cached_context(query, padded[0], padded[1], own_k, own_v, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
