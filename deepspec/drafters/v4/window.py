"""Attention of blocks to a window of shared keys and values before their anchors, with a sink in the denominator.

T packed context rows, N blocks, S slots, A heads of width hd, W rows of the widest window. There is one key-value row
per position, read by all heads and as key and value alike, so a block is one matrix [S*A, hd] against at most W + S
rows. ``Bounds`` says which rows those are. Blocks are taken in chunks of bounded memory, and the backward pass makes
the scores again from the log-sum-exp: kept are inputs, output and N*S*A numbers.
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.drafters.bounds import Bounds, visible
from deepspec.drafters.precision import accumulates_natively, exact, exact_bmm

CHUNK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}  # of scores and gathered rows of one chunk


@dataclass(frozen=True)
class WindowPlan:
    """What the blocks of a pack see, made once for all stages."""

    rows: Tensor  # [N, W] int64 packed context rows; any row where not seen
    seen: Tensor  # [N, W] bool


def plan_windows(anchor_rows: Tensor, context_starts: Tensor, context_rows: int, window: Optional[int]) -> WindowPlan:
    """Plan of blocks with anchors at ``anchor_rows`` [N] in documents that begin at ``context_starts`` [N]."""
    bounds = Bounds.of(anchor_rows, context_starts, window)
    width = int((bounds.stop - bounds.first).max()) if len(anchor_rows) else 0
    rows = bounds.first[:, None] + torch.arange(width, device=anchor_rows.device)
    return WindowPlan(rows.clamp(max=context_rows - 1), visible(rows, bounds.first[:, None], bounds.stop[:, None]))


def _work(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if accumulates_natively(tensors[0]) else tuple(exact(tensor) for tensor in tensors)


def _scores(query: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
    """[b, m, L] of queries [b, m, hd] and rows [b, L, hd]; ``hidden`` [b, L'] are the first that do not count."""
    scores = exact_bmm(query, rows.transpose(1, 2), query.shape[-1]**-0.5)
    scores[:, :, :hidden.shape[1]].masked_fill_(hidden[:, None], -torch.inf)
    return scores


def _attend(query: Tensor, rows: Tensor, hidden: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output [b, m, hd] and log-sum-exp [b, m, 1], the sink [m, 1] among the terms."""
    scores = _scores(query, rows, hidden)
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    total = scores.sub_(top).exp_().sum(dim=-1, keepdim=True) + (sink - top).exp_()
    return exact_bmm(scores.div_(total).to(rows.dtype), rows), total.log_().add_(top)


def _chunks(plan: WindowPlan, slots: int, heads: int, width: int) -> list[slice]:
    length = plan.rows.shape[1] + slots
    one = 4 * length * (2 * slots * heads + width)
    size = max(1, CHUNK_BYTES.get(plan.rows.device.type, 1 << 28) // one)
    return [slice(start, start + size) for start in range(0, len(plan.rows), size)]


class _WindowAttention(torch.autograd.Function):
    """See ``window_attention``."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, context: Tensor, own: Tensor, sinks: Tensor, plan: WindowPlan) -> Tensor:
        count, slots, heads, width = queries.shape
        query, known, mine = _work(queries.flatten(1, 2), context, own)
        sink = exact(sinks).to(exact(query).dtype).repeat(slots)[:, None]
        output = torch.empty(query.shape, dtype=queries.dtype, device=queries.device)
        lse = torch.empty(count, slots * heads, 1, dtype=sink.dtype, device=queries.device)
        for blocks in _chunks(plan, slots, heads, width):
            rows = torch.cat((known[plan.rows[blocks]], mine[blocks]), dim=1)
            output[blocks], lse[blocks] = _attend(query[blocks], rows, ~plan.seen[blocks], sink)
        ctx.save_for_backward(queries, context, own, sinks, output, lse)
        ctx.plan = plan
        return output.view(queries.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Optional[Tensor], ...]:
        queries, context, own, sinks, output, lse = ctx.saved_tensors
        plan, (_, slots, heads, width) = ctx.plan, queries.shape
        seen = plan.rows.shape[1]
        query, grad, known, mine = _work(queries.flatten(1, 2), grad_output.reshape(output.shape), context, own)
        grad_query = torch.empty(query.shape, dtype=lse.dtype, device=query.device)
        grad_context = torch.zeros(context.shape, dtype=lse.dtype, device=query.device)
        grad_own = torch.empty(own.shape, dtype=lse.dtype, device=query.device)
        # d score = P * (d P - mean), where <d output, output> is the mean of d P under P; a sink's d P is 0.
        mean = (exact(grad) * output).sum(dim=-1, keepdim=True)
        sink = exact(sinks).to(lse.dtype).repeat(slots)[:, None]
        grad_sink = ((sink - lse).exp_() * mean).sum(dim=0).view(slots, heads).sum(dim=0).neg_()
        for blocks in _chunks(plan, slots, heads, width):
            rows = torch.cat((known[plan.rows[blocks]], mine[blocks]), dim=1)
            probs = _scores(query[blocks], rows, ~plan.seen[blocks]).sub_(lse[blocks]).exp_()
            scores = exact_bmm(grad[blocks], rows.transpose(1, 2)).sub_(mean[blocks]).mul_(probs).to(query.dtype)
            grad_query[blocks] = exact_bmm(scores, rows, width**-0.5)
            to_rows = exact_bmm(scores.transpose(1, 2), query[blocks], width**-0.5)
            to_rows += exact_bmm(probs.to(grad.dtype).transpose(1, 2), grad[blocks])
            grad_context.index_add_(0, plan.rows[blocks].flatten(), to_rows[:, :seen].flatten(0, 1))
            grad_own[blocks] = to_rows[:, seen:]
        return (grad_query.view(queries.shape).to(queries.dtype), grad_context.to(context.dtype),
                grad_own.to(own.dtype), grad_sink.to(sinks.dtype), None)


def window_attention(queries: Tensor, context: Tensor, own: Tensor, sinks: Tensor, plan: WindowPlan) -> Tensor:
    """Eq. 3 with keys that are values: queries [N, S, A, hd], rows [T, hd] and own [N, S, hd], RoPE applied.

    Every slot sees the rows of its block's window and all S own rows; ``sinks`` [A] enter the denominator only.
    Returns [N, S, A, hd] in the dtype of the queries, softmax and sums in float32 (float64 for float64 inputs).
    """
    return _WindowAttention.apply(queries, context, own, sinks, plan)


def cached_window_attention(queries: Tensor, context: Tensor, own: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """The same for one block per request with its own rows [R, C, hd], as drafting does: ``seen`` [R, C] bool count.

    The others may hold anything finite.
    """
    query, known, mine = _work(queries.flatten(1, 2), context, own)
    sink = exact(sinks).to(exact(query).dtype).repeat(queries.shape[1])[:, None]
    output, _ = _attend(query, torch.cat((known, mine), dim=1), ~seen, sink)
    return output.view(queries.shape).to(queries.dtype)
