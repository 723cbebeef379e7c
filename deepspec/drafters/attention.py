"""Attention of the drafters: a block sees the context before its anchor and its own slots, nothing else.

T packed context rows, N blocks, S slots of a block, Hq query and Hkv key heads, hd head width, R requests, C padded
context length, K draft tokens. A chain of one-token steps is a block whose step j has one query and j + 1 own keys.
``Bounds`` is the one definition of the mask; every backend below takes it from there:

* chunked (attention_chunked.py): any device; context and block apart, merged by their log-sum-exp;
* flex (attention_flex.py): FlexAttention with a block-sparse mask; training needs CUDA;
* cached: one block per request over a padded cache, as drafting does.

No backend keeps anything of N*S x (T + N*S) elements.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional

from deepspec.drafters.attention_chunked import ChunkPlan, chunked_attention, plan_chunks
from deepspec.drafters.attention_flex import FlexPlan, flex_attention, flex_works, plan_flex
from deepspec.drafters.bounds import Bounds, visible
from deepspec.drafters.precision import exact
from deepspec.errors import ConfigError

BACKENDS = ("auto", "chunked", "flex")
PIECE = 8192  # context rows that drafting attends to at a time, where there are more


ContextPlan = ChunkPlan | FlexPlan  # what a pack's blocks see, prepared once per pack for every layer


def check_backend(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot train on ``device``."""
    if name not in BACKENDS:
        raise ConfigError(f"trainer.attention={name!r} is unknown: use one of {', '.join(BACKENDS)}.")
    if name == "flex" and device.type == "cpu":
        raise ConfigError("trainer.attention=flex cannot train on the CPU: FlexAttention has no backward there. Use "
                          "trainer.attention=auto, which takes chunked on the CPU and flex on CUDA.")


def plan_context(
    anchor_rows: Tensor, context_starts: Tensor, context_rows: int, *, slots: int, heads: int,
    window: Optional[int] = None, backend: str = "chunked", scale: Optional[float] = None,
) -> ContextPlan:
    """Plan of a pack whose N blocks have their anchors at packed rows ``anchor_rows`` [N].

    ``context_starts`` [N] are the first rows of their documents, ``window`` how many context rows a block sees at most,
    ``scale`` multiplies the scores (None: 1 / sqrt(hd)).
    """
    bounds = Bounds.of(anchor_rows, context_starts, window)
    if backend == "flex" and len(anchor_rows):
        return plan_flex(bounds, context_rows, slots, scale=scale)
    return plan_chunks(bounds, context_starts, context_rows, slots * heads, scale)


def plan_chain(
    stop_rows: Tensor, context_starts: Tensor, context_rows: int, *, steps: int, heads: int, backend: str = "chunked",
) -> list[ContextPlan]:
    """Plans of steps 0 .. K-1 of a pack's chains: each sees the rows before ``stop_rows`` [N] and its own steps so far.
    """
    bounds = Bounds.of(stop_rows, context_starts, None)
    if backend == "flex" and len(stop_rows):
        return [plan_flex(bounds, context_rows, 1, own=step + 1) for step in range(steps)]
    return [plan_chunks(bounds, context_starts, context_rows, heads)] * steps


def choose_backend(name: str, states: Tensor, head_dim: int) -> str:
    """The backend that ``trainer.attention=name`` means for ``states``."""
    if name != "auto":
        return name
    return "flex" if flex_works(states, head_dim) else "chunked"


def inject_context(queries: Tensor, keys: Tensor, values: Tensor, plan: ContextPlan) -> Tensor:
    """Attend ``K = [W_K H_ctx ; W_K H_d]``, ``V = [W_V H_ctx ; W_V H_d]`` in all blocks of a pack (Eq. 3).

    queries [N, S, Hq, hd]; keys and values [T + N*S, Hkv, hd], the context's rows first, then those of the slots (of a
    chain [T + N*(j+1), Hkv, hd] with S = 1); RoPE applied. Returns [N, S, Hq, hd] in the dtype of the queries.
    """
    if isinstance(plan, FlexPlan):
        return flex_attention(queries, keys, values, plan)
    return chunked_attention(queries, keys, values, plan)


def _in_pieces(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bounds: Bounds, scale: Optional[float],
) -> Tensor:
    """Attention of queries [R, Hkv, m, hd] to their own keys and values [R, S, Hkv, hd] and, piece by piece, to those
    of the context [R, C, Hkv, hd]: no copy of the context, scores of one piece at a time. Softmax in float32 at least.
    """
    factor = queries.shape[-1]**-0.5 if scale is None else scale
    wide = exact(queries)

    def scores(keys: Tensor) -> Tensor:
        return wide @ exact(keys.permute(0, 2, 3, 1)) * factor

    weights = scores(own[0])
    top = weights.amax(dim=-1, keepdim=True)
    weights = (weights - top).exp_()
    total, mixed = weights.sum(dim=-1, keepdim=True), weights @ exact(own[1].transpose(1, 2))
    for start in range(0, context[0].shape[1], PIECE):
        keys, values = (part[:, start:start + PIECE] for part in context)
        rows = torch.arange(start, start + keys.shape[1], device=queries.device)
        hidden = ~visible(rows, bounds.first[:, None], bounds.stop[:, None])
        weights = scores(keys).masked_fill_(hidden[:, None, None], -torch.inf)
        higher = torch.maximum(top, weights.amax(dim=-1, keepdim=True))
        weights, fade = (weights - higher).exp_(), (top - higher).exp_()
        total = total * fade + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * fade + weights @ exact(values.transpose(1, 2))
        top = higher
    return (mixed / total).to(queries.dtype)


def inject_cached_context(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, block_keys: Tensor, block_values: Tensor,
    context_lengths: Tensor, window: Optional[int] = None, scale: Optional[float] = None,
) -> Tensor:
    """Eq. 3 for one block per request with its own padded context [R, C, Hkv, hd], as drafting does; see above.

    ``context_lengths`` [R] says how many rows are real; the last ``window`` of them are seen. Padding may hold anything
    finite.
    """
    count, slots, heads, width = queries.shape
    key_heads, capacity = context_keys.shape[2], context_keys.shape[1]
    grouped = queries.view(count, slots, key_heads, heads // key_heads, width)
    grouped = grouped.permute(0, 2, 3, 1, 4).reshape(count, key_heads, -1, width)
    bounds = Bounds.of(context_lengths, torch.zeros_like(context_lengths), window)
    if capacity > PIECE:
        attended = _in_pieces(grouped, (context_keys, context_values), (block_keys, block_values), bounds, scale)
        attended = attended.view(count, key_heads, heads // key_heads, slots, width)
        return attended.permute(0, 3, 1, 2, 4).reshape(queries.shape)
    keys = torch.cat((context_keys.transpose(1, 2), block_keys.transpose(1, 2)), dim=2)
    values = torch.cat((context_values.transpose(1, 2), block_values.transpose(1, 2)), dim=2)
    places = torch.arange(capacity + slots, device=queries.device)
    mask = (places >= capacity) | visible(places, bounds.first[:, None], bounds.stop[:, None])
    mask = mask[:, None, None, :].expand(count, 1, grouped.shape[2], -1)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    attended = attended.view(count, key_heads, heads // key_heads, slots, width)
    return attended.permute(0, 3, 1, 2, 4).reshape(queries.shape)


def attend_chain(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """One step of R chains while drafting: queries [R, Hq, hd] over keys and values [R, C + K, Hkv, hd].

    ``seen`` [R, C + K] bool says which rows count; the others may hold anything finite. Returns [R, Hq, hd].
    """
    count, heads, width = queries.shape
    grouped = queries.view(count, keys.shape[2], -1, width)
    mask = seen[:, None, None, :].expand(count, 1, grouped.shape[2], -1)
    attended = functional.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    return attended.reshape(count, heads, width)
