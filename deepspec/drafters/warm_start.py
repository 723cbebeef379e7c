"""Start a drafter from its target's last layers instead of from noise (``drafter.warm_start=true``)."""

import logging
from typing import Optional, Sequence

import torch
from torch import Tensor, nn

from deepspec.drafters.autoregressive import AutoregressiveDrafter
from deepspec.drafters.base import Drafter
from deepspec.drafters.dspark import DSparkDrafter
from deepspec.drafters.types import DrafterShape
from deepspec.drafters.v4.drafter import V4Drafter
from deepspec.drafters.v4.warm_start import warm_start_stages

logger = logging.getLogger(__name__)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # side by side (Phi-3)


def _parts_of(source: nn.Module, heads: DrafterShape) -> dict[str, Tensor]:
    """Tensors of a target's layer by name, the parts of fused projections among them where heads are like ``heads``."""
    found: dict[str, Tensor] = dict(source.named_parameters())
    keys = heads.num_kv_heads * heads.head_dim
    queries = heads.num_heads * heads.head_dim
    for name, tensor in list(found.items()):
        fused = name.split(".")[-2] if "." in name else ""
        rows = [queries, keys, keys] if fused == "qkv_proj" else [len(tensor) // 2] * 2
        if fused in _FUSED and sum(rows) == len(tensor):
            parts = (name.replace(fused, part) for part in _FUSED[fused])
            found |= dict(zip(parts, tensor.split(rows), strict=True))
    return found


def _copy_layer(layer: nn.Module, theirs: dict[str, Tensor]) -> tuple[int, list[str]]:
    """Copy what the two layers share by name and shape; returns how many tensors, and the names that stayed."""
    copied, kept = 0, []
    for name, parameter in layer.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
            copied += 1
        else:
            kept.append(name)
    return copied, kept


@torch.no_grad()
def warm_start(drafter: Drafter, target_layers: Sequence[nn.Module], final_norm: Optional[Tensor] = None,
               stream_head: Optional[nn.Module] = None) -> int:
    """Copy the target's last layers, make the projection of the features select the last of them, and take the target's
    final norm [D].

    Tensors whose name or shape the target lacks keep their initial value (head norms of a target without them stay 1).
    Call before the engine is made: partitioned parameters have nothing to copy into. Returns the number of layer
    tensors copied.
    """
    if isinstance(drafter, AutoregressiveDrafter):
        return _recurrent(drafter, target_layers[-1], final_norm)
    if isinstance(drafter, V4Drafter):
        return warm_start_stages(drafter, target_layers, final_norm, stream_head)
    assert isinstance(drafter, DSparkDrafter)
    return _blocks(drafter, target_layers, final_norm)


def _recurrent(drafter: AutoregressiveDrafter, source: nn.Module, final_norm: Optional[Tensor]) -> int:
    """The one layer from the target's last; where a matrix also reads the embedding, that half keeps its values."""
    own, theirs = dict(drafter.named_parameters()), _parts_of(source, drafter.shape)
    count, kept = _copy_layer(drafter.layer, theirs)
    width = drafter.shape.hidden_size
    if drafter.shape.algorithm == "mtp":
        prefix = "model.mtp_layers.0."
        own[f"{prefix}input_proj.weight"][:, :width] = _identity(own[f"{prefix}input_proj.weight"], width)
        norm = own[f"{prefix}final_layernorm.weight"]
    else:
        for name in ("q", "k", "v"):
            wide, narrow = own[f"layers.0.self_attn.{name}_proj.weight"], theirs.get(f"self_attn.{name}_proj.weight")
            if narrow is not None and narrow.shape == (len(wide), width):
                wide[:, width:] = narrow.to(wide)
                count += 1
        if "input_layernorm.weight" in theirs:
            own["layers.0.hidden_norm.weight"].copy_(theirs["input_layernorm.weight"])
        if drafter.shape.target_hidden_size == width:
            own["fc.weight"].zero_()
            own["fc.weight"][:, -width:] = _identity(own["fc.weight"], width)
        norm = own["norm.weight"]
    if final_norm is not None and final_norm.shape == norm.shape:
        norm.copy_(final_norm)
    if kept:
        logger.info("warm start: the layer keeps its initial %s", ", ".join(kept))
    return count


def _identity(like: Tensor, width: int) -> Tensor:
    return torch.eye(width, dtype=like.dtype, device=like.device)


def _blocks(drafter: DSparkDrafter, target_layers: Sequence[nn.Module], final_norm: Optional[Tensor]) -> int:
    """The context skips the layers' input norms, so ``hidden_norm`` starts as their mean."""
    count = 0
    sources = list(target_layers)[-len(drafter.layers):]
    for index, (layer, source) in enumerate(zip(list(drafter.layers)[-len(sources):], sources, strict=True)):
        copied, kept = _copy_layer(layer, _parts_of(source, drafter.shape))
        count += copied
        if kept:
            logger.info("warm start: layer %d keeps its initial %s", index, ", ".join(kept))
    width = drafter.shape.hidden_size
    if drafter.shape.target_hidden_size == width:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = _identity(drafter.fc.weight, width)
    norms = torch.stack([layer.get_parameter("input_layernorm.weight") for layer in drafter.layers])
    drafter.hidden_norm.weight.copy_(norms.float().mean(dim=0))
    if final_norm is not None and final_norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(final_norm)
    return count
