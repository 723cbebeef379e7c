"""Drafter attention through FlexAttention, for CUDA: one kernel, tiles that nobody sees are skipped.

T packed context rows, N blocks, S slots, Q = N*S queries, K = T + N*S keys, Hq query and Hkv key heads, hd head width.
The mask is a function of token-level indices; its sparsity is worked out on tiles of 128 x 128, so that what is kept
is Q*K / 16384 numbers. Packs of one shape (``trainer.pad_packs``) are compiled once. Eager FlexAttention runs on the
CPU too, forward only: for checks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils._triton import has_triton

from deepspec.drafters.bounds import Bounds, visible

TILE = 128
_LEAST_WIDTH = 16  # of a head, in the kernel


@dataclass(frozen=True)
class FlexPlan:
    """The mask of a pack, for every layer."""

    mask: flex.BlockMask
    scale: Optional[float] = None  # of the scores; None: 1 / sqrt(hd)


def flex_works(states: Tensor, head_dim: int) -> bool:
    """Whether the fused kernel takes tensors like ``states``."""
    return states.is_cuda and states.dtype != torch.float64 and head_dim >= _LEAST_WIDTH and has_triton()


def _by_tile(seen: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """[Q, key tiles] bool to [query tiles, key tiles]: seen by any, and by all queries of a tile that has 128."""
    missing = tiles * TILE - len(seen)
    grouped = torch.nn.functional.pad(seen, (0, 0, 0, missing)).view(tiles, TILE, -1)
    return grouped.any(dim=1), grouped.all(dim=1)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Number of true entries of each row, and their places first: the layout BlockMask reads."""
    places = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32)[None, None], places.int()[None, None]


def _meets(first: Tensor, stop: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (first[:, None] < high) & (stop[:, None] > low)


def plan_flex(bounds: Bounds, context_rows: int, slots: int, own: Optional[int] = None,
              scale: Optional[float] = None) -> FlexPlan:
    """Mask over queries [N*S] and keys [T + N*O] of the blocks that ``bounds`` describes; ``own`` is O, None for S."""
    own = slots if own is None else own
    queries = len(bounds.first) * slots
    keys, device = context_rows + len(bounds.first) * own, bounds.first.device
    owner = torch.arange(queries, device=device) // slots
    first, stop = bounds.first[owner].int(), bounds.stop[owner].int()
    own_first = (context_rows + owner * own).int()
    own_stop = own_first + own

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(key, first[query], stop[query]) | visible(key, own_first[query], own_stop[query])

    low = torch.arange(0, keys, TILE, device=device)
    high = low + TILE
    touched = (first < stop)[:, None] & _meets(first, stop, low, high) | _meets(own_first, own_stop, low, high)
    covered = (first[:, None] <= low) & (stop[:, None] >= high)
    tiles = -(-queries // TILE)
    partial, full = _by_tile(touched, tiles)[0], _by_tile(covered, tiles)[1]
    mask = flex.BlockMask.from_kv_blocks(
        *_listed(partial & ~full), *_listed(full), BLOCK_SIZE=(TILE, TILE), mask_mod=sees, seq_lengths=(queries, keys),
    )
    return FlexPlan(mask, scale)


@cache
def _fused() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention)


@torch.compiler.disable  # of the layer around it: the kernel has a graph of its own
def flex_attention(queries: Tensor, keys: Tensor, values: Tensor, plan: FlexPlan) -> Tensor:
    """As ``chunked_attention``: queries [N, S, Hq, hd], keys and values [T + N*O, Hkv, hd] to [N, S, Hq, hd]."""
    attend: Any = _fused() if queries.is_cuda else flex.flex_attention
    query, key, value = (part.transpose(0, 1)[None] for part in (queries.flatten(0, 1), keys, values))
    attended = attend(query, key, value, block_mask=plan.mask, scale=plan.scale,
                      enable_gqa=queries.shape[2] != keys.shape[1])
    return attended[0].transpose(0, 1).reshape(queries.shape)
