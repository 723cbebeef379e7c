"""What a block sees: every backend against a dense mask in float64, forward and backward."""

from typing import Any, Iterator, Optional

import pytest
import torch
from drafter_cases import DOCUMENTS, SHAPE, pack
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.attention import flex_attention as flex

from deepspec.data.batch import AnchorBlocks
from deepspec.drafters import attention_chunked
from deepspec.drafters.attention import ContextPlan, inject_cached_context, inject_context, plan_context
from deepspec.drafters.attention_flex import TILE, FlexPlan
from deepspec.errors import ConfigError

SLOTS = 4
WINDOWS = (1, 3, 1000, None)
PADDED = (*DOCUMENTS, (5, (0, 0)))  # padding blocks: no context of their own


@pytest.fixture(autouse=True)
def flex_backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eager FlexAttention has a backward on the CPU behind a check that is meant for the compiled kernel."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    yield


def tensors(blocks: int, rows: int, heads: int = 4, key_heads: int = 2, width: int = 8,
            dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, and keys and values of context and slots."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((blocks, SLOTS, heads, width), *2 * ((rows + blocks * SLOTS, key_heads, width),))
    made = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    return [item.to(dtype).requires_grad_() for item in made]


def seen(blocks: AnchorBlocks, rows: int, window: Optional[int]) -> Tensor:
    """The mask [N*S, T + N*S], entry by entry from the words of the specification."""
    mask = torch.zeros(len(blocks) * SLOTS, rows + len(blocks) * SLOTS, dtype=torch.bool)
    for block, (anchor, start) in enumerate(zip(blocks.anchor_rows.tolist(), blocks.context_starts.tolist())):
        for slot in range(SLOTS):
            query = block * SLOTS + slot
            for row in range(start, anchor):
                mask[query, row] = window is None or anchor - row <= window
            for other in range(SLOTS):
                mask[query, rows + block * SLOTS + other] = True
    return mask


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of [Q, T + N*S] under a boolean mask, heads repeated."""
    count, slots, heads, width = query.shape
    keys, values = (part.repeat_interleave(heads // keys.shape[1], dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.flatten(0, 1), keys) * width**-0.5
    probs = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", probs, values).view(count, slots, heads, width)


def plan(blocks: AnchorBlocks, rows: int, window: Optional[int] = None, backend: str = "chunked",
         heads: int = 4) -> ContextPlan:
    return plan_context(blocks.anchor_rows, blocks.context_starts, rows, slots=SLOTS, heads=heads, window=window,
                        backend=backend)


def check(documents: Any, window: Optional[int], backend: str, heads: tuple[int, int, int] = (4, 2, 8)) -> None:
    batch = pack(SHAPE, documents)
    rows = len(batch.input_ids)
    inputs = tensors(len(batch.blocks), rows, *heads)
    found = inject_context(*inputs, plan(batch.blocks, rows, window, backend, heads[0]))
    expected = dense(*inputs, seen(batch.blocks, rows, window))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(found)
    for ours, reference in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True,
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["chunked", "flex"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(3, 3, 5), (4, 2, 8), (8, 2, 6)])  # groups of 1, 2 and 4; odd widths
def test_backends_equal_a_dense_mask(backend: str, window: Optional[int], heads: tuple[int, int, int]) -> None:
    check(PADDED, window, backend, heads)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("score_bytes", [1, 3000])
def test_any_chunk_size(score_bytes: int, window: Optional[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_chunked.SCORE_BYTES, "cpu", score_bytes)
    check(PADDED, window, "chunked")


@pytest.mark.parametrize("backend", ["chunked", "flex"])
@pytest.mark.parametrize("window", [None, 40])
def test_many_tiles(backend: str, window: Optional[int]) -> None:
    """Several tiles of queries and keys, some whole, some partial, across a border of documents."""
    check(((300, tuple(range(0, 300, 7))), (150, tuple(range(1, 149, 5)))), window, backend)


@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_of_the_flex_mask_are_those_of_its_function(window: Optional[int]) -> None:
    batch = pack(SHAPE, ((300, tuple(range(0, 300, 3))), (40, (0, 20))))
    rows, queries = len(batch.input_ids), len(batch.blocks) * SLOTS
    made = plan(batch.blocks, rows, window, "flex")
    assert isinstance(made, FlexPlan)
    mask = made.mask
    expected = flex.create_block_mask(mask.mask_mod, 1, 1, queries, rows + queries, device="cpu", BLOCK_SIZE=TILE)
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for ours, reference in ((mask.kv_num_blocks, expected.kv_num_blocks),
                            (mask.full_kv_num_blocks, expected.full_kv_num_blocks)):
        assert torch.equal(ours, reference)


def test_numeric_gradient() -> None:
    batch = pack(SHAPE, ((5, (0, 2, 4)), (3, (1,))))
    chosen = plan(batch.blocks, 8, 2)
    assert gradcheck(lambda *inputs: inject_context(*inputs, chosen), tensors(4, 8, 2, 1, 3), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["chunked", "flex"])
@pytest.mark.parametrize("documents", [((6, (0,)),), ((6, (0, 3)), (5, (0,)))])
def test_empty_context_is_finite_in_float32(backend: str, documents: Any) -> None:
    batch = pack(SHAPE, documents)
    rows = len(batch.input_ids)
    inputs = tensors(len(batch.blocks), rows, dtype=torch.float32)
    found = inject_context(*inputs, plan(batch.blocks, rows, None, backend))
    grads = torch.autograd.grad(found.square().sum(), inputs)
    assert found.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    expected = dense(*(item.double() for item in inputs), seen(batch.blocks, rows, None))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["chunked", "flex"])
def test_no_blocks(backend: str) -> None:
    batch = pack(SHAPE, ((9, ()),))
    inputs = tensors(0, 9)
    found = inject_context(*inputs, plan(batch.blocks, 9, None, backend))
    assert found.shape == (0, SLOTS, 4, 8)
    assert all((grad == 0).all() for grad in torch.autograd.grad(found.sum(), inputs))


def test_large_scores_of_hidden_rows_stay_finite() -> None:
    """A row that a block does not see may score far above those it sees."""
    batch = pack(SHAPE, ((40, tuple(range(0, 39))),))
    query, keys, values = (item.detach() for item in tensors(39, 40, dtype=torch.float32))
    keys[:40] *= torch.linspace(1.0, 400.0, 40)[:, None, None]
    inputs = [item.requires_grad_() for item in (query, keys, values)]
    found = inject_context(*inputs, plan(batch.blocks, 40))
    grads = torch.autograd.grad(found.sum(), inputs)
    assert found.isfinite().all() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_cover_what_is_seen_and_nothing_else(window: Optional[int]) -> None:
    batch = pack(SHAPE, ((400, tuple(range(0, 400, 3))), (90, (80, 5, 5))))
    rows, starts = batch.blocks.anchor_rows, batch.blocks.context_starts
    made = plan(batch.blocks, 490, window)
    order = torch.arange(len(rows)) if made.order is None else made.order
    members = torch.cat([order[chunk.begin:chunk.end] for chunk in made.chunks])
    assert torch.equal(members.sort().values, (rows > starts).nonzero().flatten())
    covered = torch.zeros(490, dtype=torch.bool)
    for chunk in made.chunks:
        inside = order[chunk.begin:chunk.end]
        firsts = starts[inside] if window is None else torch.maximum(starts[inside], rows[inside] - window)
        assert len(starts[inside].unique()) == 1
        assert (chunk.start, chunk.stop) == (firsts.min(), rows[inside].max())
        assert (chunk.shared_start, chunk.shared_stop) == (firsts.max(), rows[inside].min())
        covered[chunk.start:chunk.stop] = True
        if window is not None:
            assert chunk.stop - chunk.start <= window + max(window, 64)
    assert torch.equal(covered, seen(batch.blocks, 490, window)[:, :490].any(dim=0))


@pytest.mark.parametrize("window", WINDOWS)
def test_padded_cache_equals_the_pack(window: Optional[int]) -> None:
    batch = pack(SHAPE, DOCUMENTS)
    size = len(batch.input_ids)
    query, keys, values = tensors(len(batch.blocks), size, dtype=torch.float32)
    expected = inject_context(query, keys, values, plan(batch.blocks, size, window))
    rows, starts = batch.blocks.anchor_rows, batch.blocks.context_starts
    lengths = rows - starts
    padded = torch.full((2, len(rows), int(lengths.max()) + 3, 2, 8), 1e4)
    for block, (start, row) in enumerate(zip(starts.tolist(), rows.tolist(), strict=True)):
        padded[0, block, :row - start], padded[1, block, :row - start] = keys[start:row], values[start:row]
    own = (part[size:].unflatten(0, (-1, SLOTS)) for part in (keys, values))
    found = inject_cached_context(query, padded[0], padded[1], *own, lengths, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_float32() -> None:
    batch = pack(SHAPE, DOCUMENTS)
    size = len(batch.input_ids)
    inputs = tensors(len(batch.blocks), size, dtype=torch.bfloat16)
    found = inject_context(*inputs, plan(batch.blocks, size))
    assert found.dtype == torch.bfloat16
    expected = dense(*(item.double() for item in inputs), seen(batch.blocks, size, None))
    torch.testing.assert_close(found.double(), expected, rtol=5e-3, atol=5e-3)
    assert all(grad.dtype == torch.bfloat16 for grad in torch.autograd.grad(found.sum(), inputs))


def test_flex_is_refused_for_training_on_the_cpu() -> None:
    from drafter_cases import drafter

    with pytest.raises(ConfigError, match="trainer.attention=flex"):
        drafter(attention="flex")
    with pytest.raises(ConfigError, match="unknown"):
        drafter(attention="sdpa")
