"""The one place where later stages get the target and the trained drafter, after checking that they belong together."""

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Optional

import torch

from deepspec import distributed
from deepspec.config.paths import model_cache, run_dir
from deepspec.config.schema import Config
from deepspec.drafters.base import Drafter
from deepspec.drafters.registry import shape_from
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.errors import InputRefused
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.head import TargetHead
from deepspec.targets.load import load_target
from deepspec.training import checkpoint
from deepspec.training.checkpoint import TRAINED
from deepspec.training.identity import shown

logger = logging.getLogger(__name__)
# Inherited from the target, so the target's fingerprint already decides them.
_NOT_COMPARED = {"rope_parameters"}


@dataclass(frozen=True)
class RunSession:
    """Target and drafter of one run, both frozen and in eval mode on the same device."""

    target: FrozenTarget
    drafter: Drafter
    checkpoint: Path
    shared: SharedWeights
    drafter_sha256: str
    step: int
    weights: str = TRAINED  # or ema: which of the checkpoint's weights these are


def shared_weights(target: FrozenTarget | TargetHead) -> SharedWeights:
    """The target's embedding and LM head as the drafter uses them."""
    return SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint, target.tokenizer_size)


def load_run(config: Config, *, checkpoint_dir: Optional[Path] = None) -> RunSession:
    """Load the target and the drafter of ``checkpoint_dir`` (None: the latest one of the run).

    Raises InputRefused naming what differs when the checkpoint was trained for another target, mask token, feature
    layers or block size than the configuration now says.
    """
    found = checkpoint_dir or chosen_checkpoint(config)
    saved = checkpoint.read_state(found)
    shape = checkpoint.read_shape(found)
    target = load_target(config.target, device=distributed.device(), cache_dir=model_cache(config))
    wanted = shape_from(target.spec, config.target, config.drafter)
    if shape.draft_ids is not None and len(shape.draft_ids) == config.drafter.draft_vocab_size:
        wanted = replace(wanted, draft_ids=shape.draft_ids)  # chosen by the training data, kept in the checkpoint
    _check(found, shape, wanted, str(saved.identity.get("target_fingerprint")), target.fingerprint)
    shared = shared_weights(target)
    weights = config.export.weights
    drafter = checkpoint.load_drafter(found, shared, weights)
    if target.dtype == torch.bfloat16:
        drafter = drafter.cast(torch.bfloat16)
    drafter.requires_grad_(False)
    sha256 = checkpoint.drafter_sha256(found, weights)
    return RunSession(target, drafter, found, shared, sha256, saved.step, weights)


def chosen_checkpoint(config: Config) -> Path:
    """The checkpoint ``export.checkpoint`` names: latest, best, or step-N of this run."""
    name = config.export.checkpoint
    if name in (checkpoint.LATEST, checkpoint.BEST):
        return (checkpoint.latest if name == checkpoint.LATEST else checkpoint.best)(run_dir(config))
    tags = checkpoint.complete_tags(run_dir(config))
    if name not in tags:
        raise InputRefused(
            f"export.checkpoint={name} is not a complete checkpoint of {run_dir(config)}. There are: "
            f"{', '.join(tags) or 'none'}."
        )
    return checkpoint.directory(run_dir(config)) / name


def _check(where: Path, saved: DrafterShape, wanted: DrafterShape, saved_target: str, target: str) -> None:
    names = [f.name for f in fields(DrafterShape) if f.name not in _NOT_COMPARED]
    different = [
        f"{name}: {shown(getattr(saved, name))} in the checkpoint, {shown(getattr(wanted, name))} in the configuration"
        for name in names if getattr(saved, name) != getattr(wanted, name)
    ]
    if saved_target != target:
        different.append(f"target: {saved_target[:16]} in the checkpoint, {target[:16]} is loaded")
    if different:
        raise InputRefused(
            f"{where} does not fit this configuration: {'; '.join(different)}. Set these options back to what the "
            "drafter was trained with, or train again."
        )
