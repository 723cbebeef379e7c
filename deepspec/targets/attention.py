"""Attention over tokens without padding, for every Hugging Face decoder through ``AttentionInterface``.

Shapes: T tokens of a flat batch, H query heads, Hkv key/value heads, G = H / Hkv, d head width, C cached positions.
Values may be of another width than keys (multi-head latent attention). Hugging Face calls ``packed_attention`` with
post-RoPE queries [1, H, T, d] and keys/values [1, Hkv, T, d]; the layout of the documents comes along as the keyword
``packed``, which the model passes through untouched.
"""

from dataclasses import dataclass
from typing import Any, Optional, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PACKED_ATTENTION = "deepspec_packed"
_QUERY_CHUNK = 512  # bounds the mask of windowed or continued prefill to [chunk, keys]


@dataclass(frozen=True)
class AttentionOptions:
    """Arithmetic of one layer: score scale, sliding window in tokens (self included), score soft cap.

    ``sinks`` [H, 1] or [H, Tq] are learned scores that take probability and give no value.
    """

    scale: float
    window: Optional[int] = None
    softcap: Optional[float] = None
    sinks: Optional[Tensor] = None

    @property
    def explicit(self) -> bool:
        """Whether the scores must be at hand, so that torch's fused attention cannot be used."""
        return self.softcap is not None or self.sinks is not None


class PackedLayout(Protocol):
    """Who attends to whom."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """[1, H, T, d] queries, [1, Hkv, T, d] keys and values of the new tokens -> [1, T, H, d of the values]."""
        ...


def sink_softmax(scores: Tensor, sinks: Tensor) -> Tensor:
    """``exp(s_j) / (exp(sink) + sum_j exp(s_j))`` in float32: scores [B, H, Tq, Tk], sinks [H, 1] or [H, Tq]."""
    scores, sinks = scores.float(), sinks.float()[None, :, :, None]
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - top).exp_()
    return weights / (weights.sum(dim=-1, keepdim=True) + (sinks - top).exp())


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, mask: Optional[Tensor] = None,
           causal: bool = False) -> Tensor:
    """Scaled dot-product attention [B, H, Tq, d] with an additive ``mask`` (broadcastable to [B, H, Tq, Tk])."""
    grouped = query.shape[1] != key.shape[1]
    if not options.explicit:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=grouped,
        )
    if grouped:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if causal:
        mask = causal_mask(torch.arange(query.shape[2], device=query.device), key.shape[2], None, query.dtype)
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value
    return sink_softmax(scores, options.sinks).to(query.dtype) @ value


def causal_mask(positions: Tensor, keys: int, window: Optional[int], dtype: torch.dtype, first_key: int = 0) -> Tensor:
    """Additive mask [..., keys]: 0 where key ``first_key + c`` is visible from ``positions`` [...], -inf elsewhere."""
    columns = torch.arange(first_key, first_key + keys, device=positions.device)
    hidden = columns > positions[..., None]
    if window is not None:
        hidden |= columns <= positions[..., None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of one document whose last Tq tokens are the queries: [1, H, Tq, d] over [1, Hkv, Tk, d]."""
    queries, keys = query.shape[2], key.shape[2]
    window = options.window if options.window is not None and keys > options.window else None
    if queries == keys and window is None and not options.explicit:
        return attend(query, key, value, options, causal=queries > 1)
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    for begin in range(0, queries, _QUERY_CHUNK):
        end = min(queries, begin + _QUERY_CHUNK)
        last = keys - queries + end
        first = 0 if window is None else max(0, keys - queries + begin - window + 1)
        positions = torch.arange(keys - queries + begin, last, device=query.device)
        mask = causal_mask(positions, last - first, window, query.dtype, first)
        output[:, :, begin:end] = attend(
            query[:, :, begin:end], key[:, :, first:last], value[:, :, first:last], options, mask=mask)
    return output


@dataclass(frozen=True)
class DocumentLayout:
    """Documents of ``lengths`` tokens laid end to end; each attends causally to itself alone."""

    lengths: tuple[int, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Causal attention per document, see ``PackedLayout.attend``."""
        del layer  # nothing is cached
        if len(self.lengths) == 1:
            return causal_attention(query, key, value, options).transpose(1, 2)
        _, heads, tokens, _ = query.shape
        output = query.new_empty(1, tokens, heads, value.shape[-1])
        begin = 0
        for length in self.lengths:
            part = slice(begin, begin + length)
            attended = causal_attention(query[:, :, part], key[:, :, part], value[:, :, part], options)
            output[:, part] = attended.transpose(1, 2)
            begin += length
        return output


def packed_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                     *, packed: PackedLayout, scaling: Optional[float] = None, sliding_window: Optional[int] = None,
                     softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                     **other: Any) -> tuple[Tensor, None]:
    """The function registered with transformers. ``attention_mask`` is a dummy: ``packed`` decides what is visible.

    ``s_aux`` [H] are attention sinks. What else a model passes does not change numbers in evaluation mode, which
    ``FrozenTarget.self_check`` proves for every target that is loaded.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    sinks = None if s_aux is None else s_aux.reshape(-1, 1)
    options = AttentionOptions(scale=scale, window=sliding_window, softcap=softcap, sinks=sinks)
    return packed.attend(int(module.layer_idx), query, key, value, options), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
