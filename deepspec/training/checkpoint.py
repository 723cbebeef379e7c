"""Checkpoints: where they lie, which one a resume means, and how one is read (``saving.py`` writes them).

``checkpoints/step-N/``: ``drafter/`` (config.json, model.safetensors with the trainable tensors in fp32, and
ema.safetensors with their averages where the run has them), ``engine/`` (optimizer moments, fp32), ``state.json``
(where the loop stands and what the run means), ``manifest.json``. The files ``latest`` and ``best`` name one each.
"""

import json
import logging
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Optional

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deepspec.artifacts import read_manifest, sha256_file
from deepspec.drafters.base import Drafter
from deepspec.drafters.config import shape_from_config
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.errors import InputRefused
from deepspec.training.importing import own_tensors, read_drafter
from deepspec.training.state import AVERAGES, MOMENTS

logger = logging.getLogger(__name__)
MODEL = "drafter/model.safetensors"
AVERAGE = "drafter/ema.safetensors"
CONFIG = "drafter/config.json"
OPTIMIZER = "engine/optimizer.safetensors"
STATE = "state.json"
LATEST, BEST = "latest", "best"  # files with the name of a checkpoint
PRODUCER = "train"
TRAINED = "trained"  # of export.weights; the other is ema


@dataclass(frozen=True)
class TrainState:
    """Everything the loop changes. Data order, anchors and learning rate are functions of it and of the seed."""

    step: int  # optimizer steps done, skipped ones included
    total_steps: int  # span of the learning rate schedule
    epoch: int  # of the last step
    samples: int  # seen so far
    skipped_steps: int
    adam_step: int  # updates applied
    world_size: int
    zero_stage: int
    identity: dict[str, Any]  # what the run means; a resume that differs is refused
    tracking_id: Optional[str] = None
    best_step: Optional[int] = None  # of the best validation so far, which may be this one
    best_acceptance: Optional[float] = None
    stale_validations: int = 0  # in a row, up to this step, that were no better than the best (early stopping)


def directory(run_dir: Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(run_dir) / "checkpoints"


def complete_tags(run_dir: Path) -> list[str]:
    """Names of the whole checkpoints of a run, oldest first."""
    found = []
    for path in directory(run_dir).glob("step-*"):
        number = path.name.removeprefix("step-")
        manifest = read_manifest(path) if number.isdigit() and path.is_dir() else None
        if manifest is not None and manifest.status == "complete":
            found.append((int(number), path.name))
    return [name for _, name in sorted(found)]


def find_latest(run_dir: Path) -> Optional[Path]:
    """The checkpoint ``latest`` names, None when the run has none. Raises InputRefused when it names a missing one."""
    if not (directory(run_dir) / LATEST).is_file():
        # The rename came through but the pointer did not: the newest whole checkpoint is the right one.
        tags = complete_tags(run_dir)
        return directory(run_dir) / tags[-1] if tags else None
    return _named_by(LATEST, run_dir)


def _named_by(pointer: str, run_dir: Path) -> Path:
    name = (directory(run_dir) / pointer).read_text(encoding="utf-8").strip()
    if name not in complete_tags(run_dir):
        raise InputRefused(
            f"{directory(run_dir) / pointer} names {name!r}, which is not a complete checkpoint. {_existing(run_dir)} "
            "Write one of these names into that file, or start over with trainer.resume=never."
        )
    return directory(run_dir) / name


def latest(run_dir: Path) -> Path:
    """The last complete checkpoint of a run. Raises InputRefused when there is none."""
    found = find_latest(run_dir)
    if found is None:
        raise InputRefused(
            f"No checkpoint found in {directory(run_dir)}. Train first: deepspeed launch/train_drafter.py")
    return found


def best(run_dir: Path) -> Path:
    """The checkpoint with the best held-out acceptance. Raises InputRefused when no validation has chosen one."""
    if not (directory(run_dir) / BEST).is_file():
        raise InputRefused(
            f"{directory(run_dir)} has no best checkpoint: the run was trained without held-out samples, before a "
            f"validation, or with trainer.keep_best=false. {_existing(run_dir)} Name one of these with "
            "export.checkpoint, use export.checkpoint=latest, or train with trainer.validate_every."
        )
    return _named_by(BEST, run_dir)


def resolve_resume(resume: str, run_dir: Path) -> Optional[Path]:
    """The checkpoint that ``trainer.resume`` means: auto | never | a folder (a checkpoint, or a run's directory).

    None is a fresh start, which ``auto`` announces. A folder that holds no complete checkpoint raises InputRefused.
    """
    if resume == "never":
        return None
    if resume == "auto":
        found = find_latest(run_dir)
        if found is None:
            logger.info("resume=auto: no checkpoint found in %s, starting fresh", directory(run_dir))
        return found
    path = Path(resume)
    owner = path.parent if path.name == "checkpoints" else path
    if directory(owner).is_dir():  # a run's directory has a manifest of another kind
        return _start_or_own(latest(owner), run_dir)
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.producer == PRODUCER and manifest.status == "complete":
        return _start_or_own(path, run_dir)
    where = path.parent.parent if path.parent.name == "checkpoints" else run_dir
    raise InputRefused(f"trainer.resume={resume} is not a complete checkpoint. {_existing(where)}")


def _start_or_own(named: Path, run_dir: Path) -> Path:
    """``named``, unless it is another run's and this one has its own by now: the same command again loses nothing."""
    own = find_latest(run_dir) if named.parent.resolve() != directory(run_dir).resolve() else None
    if own is not None:
        logger.warning("%s is where this run began; it goes on from its own %s. To begin there again, give another "
                       "run.name", named, own)
    return own or named


def _existing(run_dir: Path) -> str:
    tags = complete_tags(run_dir)
    return f"Complete ones in {directory(run_dir)}: {', '.join(tags)}." if tags else f"{directory(run_dir)} has none."


def read_state(checkpoint_dir: Path) -> TrainState:
    """``state.json`` of a checkpoint. Raises InputRefused when it is missing or lacks a field."""
    values = _read_json(Path(checkpoint_dir) / STATE)
    missing = [f.name for f in fields(TrainState) if f.name not in values and f.default is MISSING]
    if missing:
        raise InputRefused(
            f"{Path(checkpoint_dir) / STATE} lacks {', '.join(missing)}. Resume from another checkpoint.")
    return TrainState(**{f.name: values[f.name] for f in fields(TrainState) if f.name in values})


def read_shape(checkpoint_dir: Path) -> DrafterShape:
    """Shape of the drafter in a checkpoint, as its config.json records it."""
    return shape_from_config(_read_json(Path(checkpoint_dir) / CONFIG))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). Resume from another checkpoint.") from None


def load_tensors(checkpoint_dir: Path) -> dict[str, dict[str, Tensor]]:
    """Weights, moments and averages by parameter name, fp32 on the CPU, as ``state.gather`` returned them."""
    moments = _load(Path(checkpoint_dir) / OPTIMIZER)
    state = {key: {name.removeprefix(f"{key}."): value for name, value in moments.items() if name.startswith(f"{key}.")}
             for key in MOMENTS}
    if (Path(checkpoint_dir) / AVERAGE).is_file():
        state[AVERAGES] = _load(Path(checkpoint_dir) / AVERAGE)
    return {"weights": _load(Path(checkpoint_dir) / MODEL), **state}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). Use another checkpoint.") from None


def require_unchanged(checkpoint_dir: Path) -> None:
    """Raise InputRefused naming a file of tensors that is no longer what was written, by its hash in the manifest."""
    manifest = read_manifest(checkpoint_dir)
    for name, written in ({} if manifest is None else manifest.files).items():
        if name in (MODEL, AVERAGE, OPTIMIZER) and sha256_file(Path(checkpoint_dir) / name) != written:
            run = Path(checkpoint_dir).parent.parent
            others = [str(directory(run) / tag) for tag in complete_tags(run) if tag != Path(checkpoint_dir).name]
            raise InputRefused(f"{Path(checkpoint_dir) / name} is damaged: its SHA-256 is not that in manifest.json. "
                               f"Name another checkpoint with trainer.resume: {', '.join(others) or 'there is none'}.")


def check_tensors(drafter: Drafter, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuse any missing, unknown, empty or misshapen tensor; nothing is ever left at its initial value silently."""
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.tensors().items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}" for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise InputRefused(f"{where} does not fit its drafter: {'; '.join(problems[:5])}. Use another checkpoint.")


def load_weights(drafter: Drafter, checkpoint_dir: Path) -> None:
    """Copy a checkpoint's weights into a drafter that no engine has wrapped yet, after ``check_tensors``."""
    path = Path(checkpoint_dir) / MODEL
    _copy(drafter, _load(path), path)


def load_exported(drafter: Drafter, folder: Path) -> None:
    """Copy the weights of a drafter in any of the four layouts; its embedding and LM head, if stored, are the target's.

    Raises InputRefused when it is absent, of another shape, or made for other feature layers, mask token or slots.
    """
    ours = drafter.shape
    theirs, tensors = read_drafter(Path(folder), ours.num_target_layers)
    names = ("algorithm",) if ours.autoregressive or theirs.autoregressive else ("mask_token_id", "sample_from_anchor")
    if (ours.v4 is None) != (theirs.v4 is None):
        names = ("algorithm",)
    for name in (*names, "feature_layers", "head"):
        if getattr(theirs, name) != getattr(ours, name):
            raise InputRefused(
                f"drafter.init_from={folder} was made with {name}={getattr(theirs, name)!r}, this run has "
                f"{getattr(ours, name)!r}. Use the same value, or start from something else."
            )
    _copy(drafter, own_tensors(tensors), Path(folder))


def _copy(drafter: Drafter, tensors: Mapping[str, Tensor], where: Path) -> None:
    check_tensors(drafter, tensors, where)
    for name, tensor in drafter.tensors().items():
        tensor.data.copy_(tensors[name])


def weights_file(checkpoint_dir: Path, weights: str = TRAINED) -> Path:
    """The file with the ``trained`` or the averaged (``ema``) weights. Raises InputRefused when there is no average."""
    path = Path(checkpoint_dir) / (MODEL if weights == TRAINED else AVERAGE)
    if weights != TRAINED and not path.is_file():
        raise InputRefused(f"export.weights={weights}, but {checkpoint_dir} has no averaged weights (there is no "
                           f"{AVERAGE}). Use export.weights=trained, or train with trainer.ema_decay (0.999, say).")
    return path


def load_drafter(checkpoint_dir: Path, shared: SharedWeights, weights: str = TRAINED) -> Drafter:
    """The trained (or averaged) drafter in eval mode, fp32, on the device of the target's weights."""
    drafter = build_drafter(read_shape(checkpoint_dir), shared)
    path = weights_file(checkpoint_dir, weights)
    _copy(drafter, _load(path), path)
    return drafter.to(shared.embed.device).eval()


def drafter_sha256(checkpoint_dir: Path, weights: str = TRAINED) -> str:
    """SHA-256 of the weights' file: what calibration and profiles say they belong to."""
    return sha256_file(weights_file(checkpoint_dir, weights))
