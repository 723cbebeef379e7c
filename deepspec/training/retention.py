"""Which checkpoints stay: the last few, and the best by held-out acceptance, which the file ``best`` names."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Optional

from deepspec.artifacts import atomic_write_bytes
from deepspec.config.schema import TrainerConfig
from deepspec.training.checkpoint import BEST, TrainState, complete_tags, directory


@dataclass(frozen=True)
class Best:
    """The best validation so far; its checkpoint exists."""

    step: int
    acceptance: float  # pooled acceptance length on the held-out samples


def better(best: Optional[Best], acceptance: Optional[float]) -> bool:
    """Whether ``acceptance`` is a new best. Of two equal ones the earlier stays."""
    if acceptance is None or not math.isfinite(acceptance):
        return False
    return best is None or acceptance > best.acceptance


def stale_after(stale: int, best: Optional[Best], acceptance: float, threshold: float) -> int:
    """Validations in a row without progress, after one more that measured ``acceptance`` when ``best`` was the best.

    Progress is to exceed the best so far by more than ``threshold`` tokens per round.
    """
    floor = Best(best.step, best.acceptance + threshold) if best is not None else None
    return 0 if better(floor, acceptance) else stale + 1


def exhausted(stale: int, trainer: TrainerConfig, *, first_epoch_over: bool, fills_store: bool) -> bool:
    """Whether training is to end before its last step. A first epoch that fills a feature store is never cut short."""
    patience = trainer.early_stopping_patience
    return patience is not None and stale >= patience and (first_epoch_over or not fills_store)


def restored(run_dir: Path, found: Optional[Path], saved: Optional[TrainState]) -> Optional[Best]:
    """The best of the history that the checkpoint ``found`` ends: later ones belong to a future that was given up.

    It must still be there: a checkpoint that was pruned since, or that lies in another run's folder, is no candidate.
    """
    if found is None or found.parent.resolve() != directory(run_dir).resolve():
        return None
    if saved is None or saved.best_step is None or saved.best_acceptance is None:
        return None
    if f"step-{saved.best_step}" not in complete_tags(run_dir):
        return None
    return Best(saved.best_step, saved.best_acceptance)


def point_to_best(run_dir: Path, step: Optional[int]) -> None:
    """Let ``best`` name the checkpoint of ``step``; None takes the file away."""
    pointer = directory(run_dir) / BEST
    if step is None:
        pointer.unlink(missing_ok=True)
    elif not pointer.is_file() or pointer.read_text(encoding="utf-8") != f"step-{step}\n":
        atomic_write_bytes(pointer, f"step-{step}\n".encode())


def prune(run_dir: Path, current: int, keep_last: int, best: Optional[int]) -> None:
    """Delete all but the ``keep_last`` newest up to step ``current`` and the best; later steps were given up."""
    tags = complete_tags(run_dir)
    position = tags.index(f"step-{current}") + 1
    stay = {*tags[max(0, position - max(1, keep_last)):position], f"step-{best}"}
    for name in tags:
        if name not in stay:
            discard(directory(run_dir) / name)


def discard(path: Path) -> None:
    """Delete a checkpoint: first its name, at once, then its files. Nobody ever finds one with half of its files."""
    doomed = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def leftovers(run_dir: Path) -> Iterable[Path]:
    """What interrupted saves, deletions and file updates of training left behind."""
    yield from directory(run_dir).glob(".step-*")
    yield from directory(run_dir).glob(".*.tmp")
    for name in ("metrics", "validation"):
        yield from Path(run_dir).glob(f".{name}.jsonl.*.tmp")
