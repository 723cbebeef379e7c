"""Attention of the parallel backbone: a block sees the context before its anchor and its own slots, nothing else.

T packed context rows, N blocks, S slots of a block, Hq query and Hkv key heads, G = Hq / Hkv, hd head width,
L context rows of a chunk. Context and block are attended separately and merged by their log-sum-exp, so no mask over
N*S x (T + N*S) exists; blocks of one document are one query matrix against that document's keys.
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspec.drafters.precision import exact, exact_bmm, exact_dtype

SCORE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # of one chunk: a cache's worth on the CPU, few launches on a GPU


@dataclass(frozen=True)
class ContextChunk:
    """Blocks of one document, in the order of their anchors, that are attended together."""

    blocks: Tensor  # [n] int64, indices of the blocks
    limits: Tensor  # [n] int64, context rows each block sees, counted from ``start``
    start: int  # packed row of the document's first token
    stop: int  # one past the last row any block of the chunk sees
    common: int  # the first ``common`` rows are seen by all blocks of the chunk


def plan_context(anchor_rows: Tensor, context_starts: Tensor, score_rows: int) -> tuple[ContextChunk, ...]:
    """Cut the blocks of a pack into chunks of bounded score memory; made once per batch, used by every layer.

    ``score_rows`` is S * Hq. Blocks without context are in no chunk.
    """
    device = anchor_rows.device
    limit = SCORE_BYTES.get(device.type, 1 << 28) // 4
    rows, starts = anchor_rows.tolist(), context_starts.tolist()
    order = sorted((block for block in range(len(rows)) if rows[block] > starts[block]), key=rows.__getitem__)
    chunks: list[ContextChunk] = []
    first = 0
    while first < len(order):
        start = starts[order[first]]
        last = first + 1
        while (
            last < len(order) and starts[order[last]] == start
            and (last + 1 - first) * score_rows * (rows[order[last]] - start) <= limit
        ):
            last += 1
        members = order[first:last]
        chunks.append(ContextChunk(
            blocks=torch.tensor(members, device=device),
            limits=torch.tensor([rows[block] - start for block in members], device=device),
            start=start, stop=rows[members[-1]], common=rows[members[0]] - start,
        ))
        first = last
    return tuple(chunks)


def _by_key_head(states: Tensor, key_heads: int) -> Tensor:
    """[n, S, Hq, hd] as [Hkv, n*S*G, hd]: the queries that share a key head are rows of one matrix."""
    count, slots, heads, width = states.shape
    grouped = states.reshape(count * slots, key_heads, heads // key_heads, width)
    return grouped.transpose(0, 1).reshape(key_heads, -1, width)


def _by_block(rows: Tensor, count: int, slots: int) -> Tensor:
    """Inverse of ``_by_key_head``: [Hkv, n*S*G, *] as [n, S, Hq, *]."""
    key_heads, tail = rows.shape[0], rows.shape[2:]
    grouped = rows.reshape(key_heads, count * slots, -1, *tail).transpose(0, 1)
    return grouped.reshape(count, slots, -1, *tail)


def _scores(queries: Tensor, keys: Tensor, chunk: ContextChunk, scale: float) -> Tensor:
    """Masked scaled scores [Hkv, n*S*G, L] in float32 at least; keys [L, Hkv, hd]."""
    scores = exact_bmm(queries, keys.permute(1, 2, 0)).mul_(scale)
    hidden = torch.arange(chunk.common, chunk.stop - chunk.start, device=keys.device) >= chunk.limits[:, None]
    view = scores.view(scores.shape[0], len(chunk.blocks), -1, scores.shape[2])[..., chunk.common:]
    view.masked_fill_(hidden[None, :, None, :], -torch.inf)
    return scores


class _ContextAttention(torch.autograd.Function):
    """Context half of the attention with bounded memory: the backward pass recomputes the scores chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, chunks: tuple[ContextChunk, ...], scale: float,
    ) -> tuple[Tensor, Tensor]:
        count, slots, heads, _ = queries.shape
        output = torch.zeros_like(queries)
        lse = torch.full((count, slots, heads), -torch.inf, dtype=exact_dtype(queries), device=queries.device)
        for chunk in chunks:
            rows = slice(chunk.start, chunk.stop)
            scores = _scores(_by_key_head(queries[chunk.blocks], keys.shape[1]), keys[rows], chunk, scale)
            top = scores.amax(dim=-1, keepdim=True)
            scores.sub_(top).exp_()
            total = scores.sum(dim=-1, keepdim=True)
            attended = torch.bmm(scores.to(values.dtype), values[rows].transpose(0, 1)).div_(total)
            output[chunk.blocks] = _by_block(attended, len(chunk.blocks), slots)
            lse[chunk.blocks] = _by_block((total.log_() + top).squeeze(-1), len(chunk.blocks), slots)
        ctx.save_for_backward(queries, keys, values, output, lse)
        ctx.chunks, ctx.scale = chunks, scale
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Optional[Tensor], ...]:
        queries, keys, values, output, lse = ctx.saved_tensors
        count, slots, heads, _ = queries.shape
        key_heads = keys.shape[1]
        grad_queries = torch.zeros_like(queries)
        grad_keys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        grad_values = torch.zeros_like(grad_keys)
        # d score = P * (d P + offset): the softmax's own mean and what flows in through the log-sum-exp.
        offset = grad_lse - (grad_output * output).sum(dim=-1, dtype=lse.dtype)
        for chunk in ctx.chunks:
            rows, members = slice(chunk.start, chunk.stop), chunk.blocks
            query = _by_key_head(queries[members], key_heads)
            grad = _by_key_head(grad_output[members], key_heads)
            scores = _scores(query, keys[rows], chunk, ctx.scale)
            probs = scores.sub_(_by_key_head(lse[members][..., None], key_heads)).exp_()
            grad_values[rows] += torch.bmm(probs.to(grad.dtype).transpose(1, 2), grad).transpose(0, 1)
            grad_probs = exact_bmm(grad, values[rows].permute(1, 2, 0))
            grad_scores = grad_probs.add_(_by_key_head(offset[members][..., None], key_heads)).mul_(probs)
            grad_scores = grad_scores.mul_(ctx.scale).to(query.dtype)
            grad_keys[rows] += torch.bmm(grad_scores.transpose(1, 2), query).transpose(0, 1)
            grad_query = torch.bmm(grad_scores, keys[rows].transpose(0, 1))
            grad_queries[members] = _by_block(grad_query, len(members), slots)
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None, None


def context_attention(
    queries: Tensor, keys: Tensor, values: Tensor, chunks: tuple[ContextChunk, ...],
) -> tuple[Tensor, Tensor]:
    """Attention of block queries [N, S, Hq, hd] to context keys and values [T, Hkv, hd].

    Returns the attended values [N, S, Hq, hd] and the log-sum-exp of the scores [N, S, Hq] (float32; float64 for
    float64 inputs): 0 and -inf where a block has no context, with zero gradients.
    """
    return _ContextAttention.apply(queries, keys, values, chunks, queries.shape[-1] ** -0.5)


def block_attention(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Bidirectional attention inside each block: queries [N, S, Hq, hd], keys and values [N, S, Hkv, hd].

    Returns as ``context_attention``.
    """
    count, slots, heads, width = queries.shape
    key_heads = keys.shape[2]
    grouped = queries.view(count, slots, key_heads, heads // key_heads, width)
    scores = torch.einsum("nskgd,ntkd->nkgst", exact(grouped), exact(keys)) * width**-0.5
    lse = scores.logsumexp(dim=-1)
    probs = (scores - lse[..., None]).exp().to(values.dtype)
    attended = torch.einsum("nkgst,ntkd->nskgd", probs, values)
    return attended.reshape(queries.shape), lse.permute(0, 3, 1, 2).reshape(count, slots, heads)


def inject_context(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, block_keys: Tensor, block_values: Tensor,
    chunks: tuple[ContextChunk, ...],
) -> Tensor:
    """Attend ``K = [W_K H_ctx ; W_K H_d]``, ``V = [W_V H_ctx ; W_V H_d]`` in all blocks of a pack (Eq. 3).

    queries [N, S, Hq, hd]; context keys and values [T, Hkv, hd]; block keys and values [N, S, Hkv, hd]; RoPE applied.
    Returns [N, S, Hq, hd].
    """
    seen, lse_seen = context_attention(queries, context_keys, context_values, chunks)
    own, lse_own = block_attention(queries, block_keys, block_values)
    share = torch.sigmoid(lse_seen - lse_own)[..., None]  # exp(lse_seen) / (exp(lse_seen) + exp(lse_own))
    return (own + share * (seen - own)).to(queries.dtype)


def inject_cached_context(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, block_keys: Tensor, block_values: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Eq. 3 for one block per request with its own padded context [R, C, Hkv, hd], as drafting does; see above.

    Padding may hold anything finite.
    """
    count, slots, heads, width = queries.shape
    key_heads, capacity = context_keys.shape[2], context_keys.shape[1]
    grouped = queries.view(count, slots, key_heads, heads // key_heads, width)
    grouped = grouped.permute(0, 2, 3, 1, 4).reshape(count, key_heads, -1, width)
    keys = torch.cat((context_keys.transpose(1, 2), block_keys.transpose(1, 2)), dim=2)
    values = torch.cat((context_values.transpose(1, 2), block_values.transpose(1, 2)), dim=2)
    visible = torch.arange(capacity + slots, device=queries.device)
    visible = (visible >= capacity) | (visible < context_lengths[:, None])
    mask = visible[:, None, None, :].expand(count, 1, grouped.shape[2], -1)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    attended = attended.view(count, key_heads, heads // key_heads, slots, width)
    return attended.permute(0, 3, 1, 2, 4).reshape(queries.shape)
