"""Writing checkpoints: under a temporary name, renamed when whole, named by ``latest`` only after that."""

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Mapping

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepspec.artifacts import atomic_write_bytes, atomic_write_json, begin, complete, fsync_directory, write_readable
from deepspec.drafters.config import shape_to_config
from deepspec.drafters.types import DrafterShape
from deepspec.errors import UserError
from deepspec.training.checkpoint import (
    AVERAGE, BEST, CONFIG, LATEST, MODEL, OPTIMIZER, PRODUCER, STATE, TrainState, directory, read_state,
)
from deepspec.training.retention import discard, leftovers, point_to_best, prune
from deepspec.training.state import AVERAGES, MOMENTS

logger = logging.getLogger(__name__)


def remove_partial(run_dir: Path) -> None:
    """Delete what an interrupted save left behind."""
    for path in list(leftovers(run_dir)):
        if path.is_dir():
            logger.warning("removing the unfinished checkpoint %s", path)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def tidy(run_dir: Path, found: Path, keep_last: int) -> None:
    """Finish what a save that was killed after its checkpoint was complete had still to delete."""
    if found.parent.resolve() != directory(run_dir).resolve():
        return
    remove_partial(run_dir)
    state = read_state(found)
    prune(run_dir, state.step, keep_last, state.best_step)


def save(run_dir: Path, tensors: Mapping[str, Mapping[str, Tensor]], shape: DrafterShape, state: TrainState,
         config: Mapping[str, Any], *, keep_last: int) -> Path:
    """Write ``step-N`` from whole tensors (``state.gather``); one process calls this. One retry, then UserError.

    Once the new one is complete and named by ``latest``, older ones beyond ``keep_last`` are deleted except the best,
    and so are later steps, which belong to a history that was given up.
    """
    final = directory(run_dir) / f"step-{state.step}"

    def write() -> None:
        _write(final, tensors, shape, state, config)
        # Before ``latest``: whoever resumes from this checkpoint finds the best that it knows of.
        point_to_best(run_dir, state.best_step)
        atomic_write_bytes(final.parent / LATEST, (final.name + "\n").encode())

    _with_one_retry(write, final)
    try:
        prune(run_dir, state.step, keep_last, state.best_step)
    except OSError as error:
        logger.warning("an old checkpoint could not be deleted (%s); the new one is complete", error)
    return final


def _with_one_retry(write: Callable[[], None], final: Path) -> None:
    try:
        write()
    except (OSError, SafetensorError) as first:
        logger.warning("saving %s failed (%s), trying once more", final, first)
        try:
            write()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(_temporary(final), ignore_errors=True)
            raise UserError(
                f"Could not save {final}: {error}. The previous checkpoint is intact. Make room (or check the file "
                "system) and run the same command again: it continues from there."
            ) from None


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _write(final: Path, tensors: Mapping[str, Mapping[str, Tensor]], shape: DrafterShape, state: TrainState,
           config: Mapping[str, Any]) -> None:
    work = _temporary(final)
    shutil.rmtree(work, ignore_errors=True)
    for name in ("drafter", "engine"):
        (work / name).mkdir(parents=True)
    target = state.identity.get("target_fingerprint", "")
    manifest = begin(work, PRODUCER, final.name, inputs={"target": target}, config=dict(config),
                     seed=int(state.identity.get("seed", 0)))
    # Without its target a drafter is nothing: the config names it.
    extra = {"target_fingerprint": target}
    anchors = int(state.identity.get("trainer.num_anchors", 0))
    atomic_write_json(work / CONFIG, shape_to_config(shape, num_anchors=anchors, dtype="float32", extra=extra))
    _save_tensors(work / MODEL, dict(tensors["weights"]))
    moments = {f"{key}.{name}": value for key in MOMENTS for name, value in tensors[key].items()}
    _save_tensors(work / OPTIMIZER, moments)
    averages = [AVERAGE] if AVERAGES in tensors else []
    for name in averages:
        _save_tensors(work / name, dict(tensors[AVERAGES]))
    atomic_write_json(work / STATE, asdict(state))
    complete(work, manifest, [CONFIG, MODEL, OPTIMIZER, STATE, *averages])
    if final.exists():
        # From a history that was given up. Pointers go first, so that none names a folder that is not there.
        for pointer in (final.parent / LATEST, final.parent / BEST):
            if pointer.is_file() and pointer.read_text(encoding="utf-8").strip() == final.name:
                pointer.unlink()
        discard(final)
    work.rename(final)
    fsync_directory(final.parent)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.numel() == 0:
            raise RuntimeError(f"{path}: tensor {name} is empty; it was not gathered from its ZeRO partitions")
    write_readable(path, lambda name: save_file(tensors, name, metadata={"format": "pt"}))
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
