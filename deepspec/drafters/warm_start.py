"""Start a drafter from its target's last layers instead of from noise (``drafter.warm_start=true``)."""

import logging
from typing import Optional, Sequence

import torch
from torch import Tensor, nn

from deepspec.drafters.dspark import DSparkDrafter

logger = logging.getLogger(__name__)


def _copy_layer(layer: nn.Module, source: nn.Module) -> tuple[int, list[str]]:
    """Copy what the two layers share by name and shape; returns how many tensors, and the names that stayed."""
    theirs = dict(source.named_parameters())
    copied, kept = 0, []
    for name, parameter in layer.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
            copied += 1
        else:
            kept.append(name)
    return copied, kept


@torch.no_grad()
def warm_start(drafter: DSparkDrafter, target_layers: Sequence[nn.Module], final_norm: Optional[Tensor] = None) -> int:
    """Copy the target's last layers, make W_c select the last feature layer, and take the target's final norm [D].

    Tensors whose name or shape the target lacks keep their initial value (head norms of a target without them stay 1).
    The context skips the layers' input norms, so ``hidden_norm`` starts as their mean. Call before the engine is made:
    partitioned parameters have nothing to copy into. Returns the number of layer tensors copied.
    """
    count = 0
    sources = list(target_layers)[-len(drafter.layers):]
    for index, (layer, source) in enumerate(zip(list(drafter.layers)[-len(sources):], sources, strict=True)):
        copied, kept = _copy_layer(layer, source)
        count += copied
        if kept:
            logger.info("warm start: layer %d keeps its initial %s", index, ", ".join(kept))
    width = drafter.shape.hidden_size
    if drafter.shape.target_hidden_size == width:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = torch.eye(width, dtype=drafter.fc.weight.dtype, device=drafter.fc.weight.device)
    norms = torch.stack([layer.input_layernorm.weight for layer in drafter.layers])
    drafter.hidden_norm.weight.copy_(norms.float().mean(dim=0))
    if final_norm is not None and final_norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(final_norm)
    return count
