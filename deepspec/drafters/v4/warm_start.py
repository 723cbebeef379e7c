"""Stages from the target's last layers: all that fits by name and shape, but never the router.

A router that has learnt to send tokens of the target's own depth to experts collapses on the drafter's states, so it
starts fresh. Compressors and indexers of the target's layers have no place in a stage.
"""

import logging
from typing import Optional, Sequence

import torch
from torch import Tensor, nn

from deepspec.drafters.v4.drafter import V4Drafter

logger = logging.getLogger(__name__)
# Stage's name: names of the same tensor in Hugging Face's V4 layer, and in a dense layer.
_SOURCES = {
    "attn.wq_a.weight": ("self_attn.q_a_proj.weight",), "attn.wq_b.weight": ("self_attn.q_b_proj.weight",),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight",), "attn.kv_norm.weight": ("self_attn.kv_norm.weight",),
    "attn.wkv.weight": ("self_attn.kv_proj.weight",), "attn.wo_a.weight": ("self_attn.o_a_proj.weight",),
    "attn.wo_b.weight": ("self_attn.o_b_proj.weight",), "attn.attn_sink": ("self_attn.sinks",),
    "attn_norm.weight": ("input_layernorm.weight",), "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.experts.w2": ("mlp.experts.down_proj",),
    "ffn.shared_experts.w1.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.gate_proj.weight"),
    "ffn.shared_experts.w2.weight": ("mlp.shared_experts.down_proj.weight", "mlp.down_proj.weight"),
    "ffn.shared_experts.w3.weight": ("mlp.shared_experts.up_proj.weight", "mlp.up_proj.weight"),
    **{f"hc_{site}_{part}": (f"{site}_hc.{part}",) for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
}
_GATE_UP = "mlp.experts.gate_up_proj"  # [E, 2*I, D], gates first


def _theirs(source: nn.Module) -> dict[str, Tensor]:
    """Tensors of a target layer, its experts' joint matrix in two."""
    found: dict[str, Tensor] = {name: value.detach() for name, value in source.named_parameters()}
    if _GATE_UP in found:
        found["ffn.experts.w1"], found["ffn.experts.w3"] = found[_GATE_UP].chunk(2, dim=1)
    return found


def _copy_stage(stage: nn.Module, source: nn.Module) -> tuple[int, list[str]]:
    theirs = _theirs(source)
    copied, kept = 0, []
    for name, parameter in stage.named_parameters():
        candidates = [theirs[other] for other in (*_SOURCES.get(name, ()), name)
                      if other in theirs and theirs[other].shape == parameter.shape]
        if candidates:
            parameter.copy_(candidates[0])
            copied += 1
        else:
            kept.append(name)
    return copied, kept


@torch.no_grad()
def warm_start_stages(drafter: V4Drafter, target_layers: Sequence[nn.Module], final_norm: Optional[Tensor],
                      stream_head: Optional[nn.Module] = None) -> int:
    """Copy the target's last layers into the stages; ``main_proj`` selects the last feature; returns tensors copied.

    ``final_norm`` [D] and ``stream_head`` (a V4 target's collapse of its streams) become the drafter's last ones.
    """
    sources = list(target_layers)[-len(drafter.layers):]
    count = 0
    for index, (stage, source) in enumerate(zip(list(drafter.layers)[-len(sources):], sources, strict=True)):
        copied, kept = _copy_stage(stage, source)
        count += copied
        logger.info("warm start: stage %d keeps its initial %s", index, ", ".join(kept))
    width = drafter.shape.hidden_size
    if drafter.shape.target_hidden_size == width:
        weight = drafter.main_proj.weight
        weight.zero_()
        weight[:, -width:] = torch.eye(width, dtype=weight.dtype, device=weight.device)
    if final_norm is not None and final_norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(final_norm)
    if stream_head is not None:
        theirs = dict(stream_head.named_parameters())
        for part in ("fn", "base", "scale"):
            own, other = getattr(drafter.hc_head, part), theirs.get(f"hc_{part}")
            if other is not None and other.shape == own.shape:
                own.copy_(other)
                count += 1
    return count
