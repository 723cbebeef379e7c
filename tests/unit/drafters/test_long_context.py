"""Contexts of 32k tokens: memory beyond the context's own keys and values does not grow with it, and the numbers are
those of one piece."""

from typing import Any

import pytest
import torch
from drafter_cases import drafter, loss_and_grads, pack, shape
from live_bytes import LiveBytes

from deepspec.drafters import attention, attention_chunked
from deepspec.drafters.attention import inject_cached_context
from deepspec.drafters.types import DrafterShape

SHORT, LONG = 8192, 32768


def small(**changes: Any) -> DrafterShape:
    return shape(hidden_size=16, target_hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
                 feature_layers=(1,), max_position_embeddings=LONG, **changes)


def peak(of: DrafterShape, context: int, anchors: int) -> int:
    """Most bytes alive in one forward and backward over ``anchors`` blocks at the end of ``context`` tokens."""
    model = drafter(of)
    batch = pack(of, [(context + 8 * anchors + 8, [context + 8 * place for place in range(anchors)])])
    with LiveBytes() as found:
        loss_and_grads(model, batch, batch)
    return found.peak


def test_a_tensor_that_was_freed_no_longer_counts() -> None:
    with LiveBytes() as found:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float32)
        kept = torch.ones(500)
        kept.view(10, 50).mul_(2)
    assert found.peak == 4000


@pytest.mark.parametrize("window", [None, 512])
def test_memory_per_anchor_is_flat_at_32k(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 anchors more cost the same after 8k and after 32k tokens; what the context itself costs is linear in it."""
    monkeypatch.setitem(attention_chunked.SCORE_BYTES, "cpu", 1 << 18)
    of = small(sliding_window=window)
    found = {(context, anchors): peak(of, context, anchors)
             for context in (SHORT, LONG) for anchors in (8, 24)}
    per_anchor = {context: (found[context, 24] - found[context, 8]) / 16 for context in (SHORT, LONG)}
    assert 0 < per_anchor[LONG] <= 1.05 * per_anchor[SHORT]
    assert found[LONG, 24] <= 4.05 * found[SHORT, 24]


def test_pieces_of_a_context_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients with score memory for eight rows of a block at a time equal those with room for everything."""
    of = small()
    model = drafter(of).double()
    batch = pack(of, [(61, (50, 3, 44, 31)), (40, (0, 37))], dtype=torch.float64)
    whole = loss_and_grads(model, batch, batch)
    monkeypatch.setitem(attention_chunked.SCORE_BYTES, "cpu", 4 * 8 * of.block_size * of.num_heads)
    pieces = loss_and_grads(model, batch, batch)
    torch.testing.assert_close(pieces[0], whole[0])
    for one, other in zip(pieces[1], whole[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window,scale", [(None, None), (5, 1.0)])
def test_drafting_in_pieces_is_the_whole(window: int | None, scale: float | None,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, own = torch.randn(3, 4, 6, 8), torch.randn(2, 3, 4, 2, 8)
    keys, values = torch.randn(2, 3, 21, 2, 8)
    given = (queries, keys, values, *own, torch.tensor([21, 0, 9]), window, scale)
    whole = inject_cached_context(*given)
    monkeypatch.setattr(attention, "PIECE", 4)
    torch.testing.assert_close(inject_cached_context(*given), whole)


def test_drafting_at_32k_copies_no_context() -> None:
    """Beyond the cache itself, a round after 32k tokens needs what one after 16k needs."""
    found = []
    for context in (2 * SHORT, LONG):
        keys, values = torch.randn(2, 1, context, 1, 8)
        own = torch.randn(2, 1, 4, 1, 8)
        with LiveBytes() as live:
            inject_cached_context(torch.randn(1, 4, 2, 8), keys, values, *own, torch.tensor([context]))
        found.append(live.peak)
    assert found[1] <= 1.05 * found[0]
