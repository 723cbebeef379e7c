"""Drafter attention on any device: bounded memory, no mask over N*S x (T + N*S), no work on rows that nobody sees.

T packed context rows, N blocks, S slots, O own keys of a block, Hq query and Hkv key heads, G = Hq / Hkv, hd head
width, L rows of a chunk. O = S in a parallel block; a step of a chain has S = 1 and O = the steps so far.
The slots of neighbouring anchors that share a key head are the rows of one matrix [n*S*G, hd], attended to the union of
the rows they see; key and value heads are never repeated. The halves of a softmax, own slots first and then each
context chunk, are merged by their maxima and sums. The backward pass recomputes the scores chunk by chunk from the
log-sum-exp, so only the inputs, the output and N*S*Hq numbers are kept.
"""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.drafters.bounds import Bounds, visible
from deepspec.drafters.precision import accumulates_natively, exact, exact_bmm

SCORE_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}  # of one chunk: a cache's worth on the CPU, few launches on a GPU
_SPREAD = 64  # rows by which the anchors of a chunk may differ beyond a window's width


@dataclass(frozen=True)
class Chunk:
    """Blocks ``begin .. end - 1`` of the plan's order, all of one document, attended together to rows ``start ..
    stop - 1``. A context too long for the score memory makes several chunks of the same blocks."""

    begin: int
    end: int
    start: int  # first and one past the last packed row of those that any of them sees
    stop: int
    shared_start: int  # rows that all of them see; empty if shared_start >= shared_stop
    shared_stop: int


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of a pack. Blocks without context are in none."""

    order: Optional[Tensor]  # [N] blocks by their anchors; None: they already are
    bounds: Bounds  # in that order
    context_rows: int  # T
    chunks: tuple[Chunk, ...]
    scale: Optional[float] = None  # of the scores; None: 1 / sqrt(hd)


def _cut(firsts: list[int], stops: list[int], starts: list[int], score_rows: int, limit: int) -> list[Chunk]:
    """Greedy cut of ordered blocks: as many as fit the score memory without too many rows that few of them see; rows of
    one block that alone do not fit are cut, too."""
    chunks, begin = [], 0
    while begin < len(stops):
        first, start, stop = firsts[begin], starts[begin], stops[begin]
        if first == stop:
            begin += 1
            continue
        reach, end = stop + max(stop - first, _SPREAD), begin + 1
        while (
            end < len(stops) and starts[end] == start and firsts[end] < stops[end] <= reach
            and firsts[end] <= stops[end - 1]  # no rows between them that neither sees
            and (end + 1 - begin) * score_rows * (stops[end] - first) <= limit
        ):
            end += 1
        columns = max(1, limit // ((end - begin) * score_rows))
        for left in range(first, stops[end - 1], columns):
            right = min(left + columns, stops[end - 1])
            chunks.append(Chunk(begin, end, left, right, max(left, firsts[end - 1]), min(right, stop)))
        begin = end
    return chunks


def plan_chunks(bounds: Bounds, context_starts: Tensor, context_rows: int, score_rows: int,
                scale: Optional[float] = None) -> ChunkPlan:
    """Cut N blocks into chunks of bounded score memory; ``score_rows`` is S * Hq. Made once per pack."""
    stops, starts = bounds.stop.tolist(), context_starts.tolist()
    seen = [stop for stop, start in zip(stops, starts, strict=True) if stop > start]
    order = None
    if any(left > right for left, right in zip(seen, seen[1:])):
        order = bounds.stop.argsort(stable=True)
        bounds = Bounds(bounds.first[order], bounds.stop[order])
        stops, starts = bounds.stop.tolist(), context_starts[order].tolist()
    limit = SCORE_BYTES.get(bounds.stop.device.type, 1 << 28) // 4
    chunks = _cut(bounds.first.tolist(), stops, starts, score_rows, limit)
    return ChunkPlan(order, bounds, context_rows, tuple(chunks), scale)


def _by_key_head(states: Tensor, key_heads: int) -> Tensor:
    """[N, S, Hq, hd] as [Hkv, N, S*G, hd], contiguous."""
    count, slots, heads, width = states.shape
    grouped = states.reshape(count, slots, key_heads, heads // key_heads, width).movedim(2, 0)
    return grouped.reshape(key_heads, count, slots * (heads // key_heads), width)


def _by_block(rows: Tensor, slots: int) -> Tensor:
    """Inverse of ``_by_key_head``."""
    key_heads, count, group, width = rows.shape
    by_slot = rows.view(key_heads, count, slots, group // slots, width).movedim(0, 2)
    return by_slot.reshape(count, slots, key_heads * (group // slots), width)


def _own(states: Tensor, count: int) -> Tensor:
    """Own keys or values of N = ``count`` blocks [N*O, Hkv, hd] as a view [Hkv, N, O, hd]."""
    return states.view(count, len(states) // count if count else 1, *states.shape[1:]).permute(2, 0, 1, 3)


def _hide(scores: Tensor, bounds: Bounds, chunk: Chunk, value: float) -> Tensor:
    """Set scores [Hkv, n*S*G, L] of rows that a block does not see to ``value``; looks only where blocks differ."""
    blocks = slice(chunk.begin, chunk.end)
    edges = [(chunk.start, chunk.shared_start), (chunk.shared_stop, chunk.stop)]
    if chunk.shared_start >= chunk.shared_stop:
        edges = [(chunk.start, chunk.stop)]
    by_block = scores.unflatten(1, (chunk.end - chunk.begin, -1))
    for start, stop in edges:
        if stop > start:
            rows = torch.arange(start, stop, device=scores.device)
            hidden = ~visible(rows, bounds.first[blocks, None], bounds.stop[blocks, None])
            by_block[..., start - chunk.start:stop - chunk.start].masked_fill_(hidden[None, :, None, :], value)
    return scores


def _work(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision stays where the device sums it in float32; elsewhere it is widened once."""
    return tensors if accumulates_natively(tensors[0]) else tuple(exact(tensor) for tensor in tensors)


def _scale(plan: ChunkPlan, queries: Tensor) -> float:
    return queries.shape[-1]**-0.5 if plan.scale is None else plan.scale


def _gradients(
    queries: Sequence[Tensor], key: Tensor, value: Tensor, plan: ChunkPlan, chunk: Optional[Chunk] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values [b, L, hd].

    ``queries`` are those [b, m, hd], the output's gradient [b, m, hd], the log-sum-exp and the mean of d P [b, m, 1].
    """
    query, grad, lse, mean = queries
    scale = _scale(plan, query)
    probs = exact_bmm(query, key.transpose(1, 2), scale).sub_(lse).exp_()
    if chunk is not None:
        _hide(probs, plan.bounds, chunk, 0.0)  # after exp: a hidden score may overflow
    scores = exact_bmm(grad, value.transpose(1, 2)).sub_(mean).mul_(probs).to(query.dtype)
    to_values = exact_bmm(probs.to(grad.dtype).transpose(1, 2), grad)
    return exact_bmm(scores, key, scale), exact_bmm(scores.transpose(1, 2), query, scale), to_values


class _ChunkedAttention(torch.autograd.Function):
    """Blocks in the order of their anchors; see ``chunked_attention``."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, plan: ChunkPlan) -> Tensor:
        slots, key_heads, scale, rows = queries.shape[1], keys.shape[1], _scale(plan, queries), plan.context_rows
        query, key, value = _work(_by_key_head(queries, key_heads), keys, values)
        own_keys, own_values = (_own(part[rows:], len(queries)).flatten(0, 1) for part in (key, value))
        probs = exact_bmm(query.flatten(0, 1), own_keys.transpose(1, 2), scale)
        top = probs.amax(dim=-1, keepdim=True)
        total = probs.sub_(top).exp_().sum(dim=-1, keepdim=True)
        output = exact_bmm(probs.to(value.dtype), own_values)
        top, total, output = (part.view(*query.shape[:3], part.shape[-1]) for part in (top, total, output))
        for chunk in plan.chunks:
            blocks, span = slice(chunk.begin, chunk.end), slice(chunk.start, chunk.stop)
            scores = exact_bmm(query[:, blocks].flatten(1, 2), key[span].permute(1, 2, 0), scale)
            _hide(scores, plan.bounds, chunk, -torch.inf)
            shape = top[:, blocks].shape
            new = torch.maximum(scores.amax(dim=-1).view(shape), top[:, blocks])
            probs = scores.sub_(new.flatten(1, 2)).exp_()
            fade = top[:, blocks].sub_(new).exp_()
            total[:, blocks].mul_(fade).add_(probs.sum(dim=-1).view(shape))
            mixed = exact_bmm(probs.to(value.dtype), value[span].transpose(0, 1))
            output[:, blocks].mul_(fade).add_(mixed.view(output[:, blocks].shape))
            top[:, blocks] = new
        result = _by_block(output.div_(total), slots).to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, result, total.log_().add_(top))
        ctx.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Optional[Tensor], ...]:
        queries, keys, values, result, lse = ctx.saved_tensors
        plan, rows, slots, key_heads = ctx.plan, ctx.plan.context_rows, queries.shape[1], keys.shape[1]
        # d score = P * (d P - mean), where <d result, result> is the mean of d P under P.
        mean = _by_key_head((exact(grad_result) * result).sum(dim=-1, keepdim=True), key_heads)
        query, grad, key, value = _work(
            _by_key_head(queries, key_heads), _by_key_head(grad_result, key_heads), keys, values)
        grad_query = torch.empty(query.shape, dtype=lse.dtype, device=keys.device)
        grad_keys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        grad_values = torch.zeros_like(grad_keys)
        whole = [part.flatten(0, 1) for part in (query, grad, lse, mean)]
        own = [_own(part[rows:], len(queries)) for part in (key, value, grad_keys, grad_values)]
        found = _gradients(whole, own[0].flatten(0, 1), own[1].flatten(0, 1), plan)
        for place, part in zip((grad_query, *own[2:]), found, strict=True):
            place.copy_(part.view(place.shape))
        for chunk in plan.chunks:
            blocks, span = slice(chunk.begin, chunk.end), slice(chunk.start, chunk.stop)
            parts = [part[:, blocks].flatten(1, 2) for part in (query, grad, lse, mean)]
            seen, its_values = key[span].transpose(0, 1), value[span].transpose(0, 1)
            to_query, to_keys, to_values = _gradients(parts, seen, its_values, plan, chunk)
            grad_query[:, blocks] += to_query.view(grad_query[:, blocks].shape)
            grad_keys[span] += to_keys.transpose(0, 1)
            grad_values[span] += to_values.transpose(0, 1)
        return (_by_block(grad_query, slots).to(queries.dtype), grad_keys.to(keys.dtype),
                grad_values.to(values.dtype), None)


@torch.compiler.disable
def chunked_attention(queries: Tensor, keys: Tensor, values: Tensor, plan: ChunkPlan) -> Tensor:
    """Attention of block queries [N, S, Hq, hd] to context and own keys, keys and values [T + N*O, Hkv, hd].

    Returns [N, S, Hq, hd] in the dtype of the queries; softmax and sums are float32 (float64 for float64 inputs).
    """
    if plan.order is None:
        return _ChunkedAttention.apply(queries, keys, values, plan)
    count, rows = len(queries), plan.context_rows
    places = torch.arange(len(keys) - rows, device=queries.device).view(count, -1)[plan.order].flatten()
    keys, values = (torch.cat((part[:rows], part[rows:][places])) for part in (keys, values))
    result = _ChunkedAttention.apply(queries[plan.order], keys, values, plan)
    return result[plan.order.argsort()]
