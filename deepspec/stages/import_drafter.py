"""The job ``launch/import_drafter.py``: a drafter from elsewhere as a run with one checkpoint, untrained here.

All later scripts then take it like a run of this project's: evaluation, calibration, profile, export, doctor.
"""

import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Sequence

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.config.compose import compose_config, parse_overrides
from deepspec.config.paths import model_cache, run_dir
from deepspec.config.schema import Config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape
from deepspec.errors import InputRefused
from deepspec.targets.load import load_target
from deepspec.training.checkpoint import TrainState, check_tensors, directory
from deepspec.training.identity import run_identity
from deepspec.training.importing import check_shared, own_tensors, read_drafter
from deepspec.training.saving import save
from deepspec.training.session import shared_weights
from deepspec.training.state import MOMENTS

log = logging.getLogger(__name__)
_FROM_ELSEWHERE = "imported"  # stands for the fingerprint of the training data


def overrides_of(shape: DrafterShape) -> list[str]:
    """The options that describe ``shape``, as a command line."""
    values: dict[str, Any] = {
        "drafter.algorithm": shape.algorithm, "drafter.block": shape.block, "drafter.num_layers": shape.num_layers,
        "drafter.block_size": shape.block_size, "drafter.sample_from_anchor": shape.sample_from_anchor,
        "drafter.head": shape.head, "drafter.markov_rank": shape.markov_rank,
        "drafter.confidence_head": shape.confidence_head,
        "drafter.confidence_with_markov": shape.confidence_with_markov,
        "drafter.intermediate_size": shape.intermediate_size, "drafter.sliding_window": shape.sliding_window,
        "drafter.unroll": shape.unroll,
        "drafter.draft_vocab_size": None if shape.draft_ids is None else len(shape.draft_ids),
        "target.feature_layers": list(shape.feature_layers), "target.mask_token_id": shape.mask_token_id,
    }
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "")


def _merged(overrides: Sequence[str], told: Sequence[str]) -> list[str]:
    names = {text.partition("=")[0] for text in told} | {"drafter.init_from", "stages", "run.dir"}
    kept = [text for text in overrides if parse_overrides([text])[0].key_or_group not in names]
    return [*kept, *told]


def run(config: Config, overrides: Sequence[str]) -> int:
    """Write ``checkpoints/step-0`` and the run's overrides. Raises InputRefused naming what does not fit the target."""
    folder = Path(str(config.drafter.init_from)).expanduser()
    if (directory(run_dir(config)) / "latest").is_file():
        raise InputRefused(f"{run_dir(config)} already has checkpoints. Import into a run of its own: run.name=NAME.")
    target = load_target(config.target, device=distributed.device(), cache_dir=model_cache(config))
    found, tensors = read_drafter(folder, target.spec.num_layers)
    shared = shared_weights(target)
    check_shared(tensors, shared, folder, found.draft_ids)
    if found.autoregressive:  # it has no use for a mask token, and other trainers' files name none
        found = replace(found, mask_token_id=config.target.mask_token_id)
    told = _merged(overrides, overrides_of(found))
    composed = compose_config(told)
    wanted = replace(shape_from(target.spec, composed.target, composed.drafter), draft_ids=found.draft_ids)
    different = [f"{field.name}: {getattr(found, field.name)!r} in the drafter, {getattr(wanted, field.name)!r} for "
                 "this target" for field in fields(DrafterShape)
                 if field.name != "rope_parameters" and getattr(found, field.name) != getattr(wanted, field.name)
                 and field.name not in ("target_model_type", "max_position_embeddings")]
    if different:
        raise InputRefused(f"{folder} does not fit the target {config.target.name}: {'; '.join(different[:5])}.")
    own = own_tensors(tensors)
    check_tensors(build_drafter(wanted, shared), own, folder)
    weights = {name: value.float().contiguous() for name, value in own.items()}
    identity = run_identity(composed, wanted, target=target.fingerprint, data=_FROM_ELSEWHERE)
    state = TrainState(0, 0, 0, 0, 0, 0, 1, 0, identity)
    moments: dict[str, Any] = {key: {} for key in MOMENTS}  # nothing was optimised here
    where = save(run_dir(config), {"weights": weights, **moments}, wanted, state, {}, keep_last=1)
    atomic_write_json(run_dir(config) / "overrides.json", [*told, f"run.dir={run_dir(config)}"])
    log.info("%s is now %s. Evaluate it with: python launch/evaluate_drafter.py run.dir=%s", folder, where,
             run_dir(config))
    return 0
