"""A Medusa drafter on the tiny target, and its training."""

from typing import Any

import torch

from deepspec.config.schema import DrafterConfig, TargetConfig
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape, SharedWeights

OPTIONS = {"algorithm": "medusa", "num_layers": 1, "block_size": 4, "head": "none", "confidence_head": False,
           "confidence_with_markov": False}


def medusa_shape_of(target: Any, **changes: Any) -> DrafterShape:
    config = TargetConfig(name="t", feature_layers=[target.spec.num_layers - 1], mask_token_id=2)
    return shape_from(target.spec, config, DrafterConfig(**{**OPTIONS, **changes}))


def medusa_drafter(target: Any, seed: int = 1, **changes: Any) -> Any:
    """Heads that are far from the identity they start as."""
    shared = SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint)
    drafter = build_drafter(medusa_shape_of(target, **changes), shared).eval().requires_grad_(False)
    torch.manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    return drafter
