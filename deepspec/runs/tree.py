"""What a tree of run directories holds: stages, results, sizes, and what of it can be made again."""

import fcntl
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from deepspec.config.schema import STAGES
from deepspec.errors import InputRefused
from deepspec.report.columns import columns
from deepspec.report.compare import pooled_length
from deepspec.report.inputs import RunFiles, read_run_files, speeds
from deepspec.training.checkpoint import complete_tags, directory
from deepspec.training.retention import leftovers

HOST = socket.gethostname()
_WITHOUT_STORE = ("online", "disaggregated")
_DEPTH = 4  # runs/sweeps/NAME/JOB, and one level more for those who sort their runs


def in_use(run: Path) -> bool:
    """Whether a job holds the run's lock."""
    path = run / ".lock"
    if not path.is_file():
        return False
    with open(path, "r+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Run:
    """A run directory with its manifest's contents."""

    path: Path
    files: RunFiles

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        """What the manifest records of each stage, in pipeline order."""
        found = self.files.manifest.get("stages")
        found = found if isinstance(found, dict) else {}
        return {name: found[name] for name in STAGES if isinstance(found.get(name), dict)}

    def status(self, stage: str) -> str:
        """What the manifest says of a stage, but ``killed`` where it says running and no process is left to do it.

        Judged by the run's lock, which the system releases with the process, and only on the host that ran it: not
        every file system shares locks between hosts.
        """
        record = self.stages[stage]
        if record.get("status") != "running" or record.get("host", HOST) != HOST:
            return str(record.get("status"))
        return "running" if in_use(self.path) else "killed"

    @property
    def state(self) -> str:
        """``complete``, or the first stage that is not, with its state."""
        for name in self.stages:
            if self.status(name) != "complete":
                return f"{name} {self.status(name)}"
        return "complete" if self.stages else "empty"


def find(root: Path) -> list[Run]:
    """All runs under ``root``, by path; ``root`` may be a run itself. Raises InputRefused where there is none."""
    if not root.is_dir():
        raise InputRefused(f"{root} is not a folder. Runs are made by launch/train_drafter.py, in runs/ unless told "
                           "otherwise.")
    runs = [Run(path, read_run_files(path)) for path in _directories(root, _DEPTH)]
    if not runs:
        raise InputRefused(f"{root} holds no run: no directory in it has the manifest.json of one. Runs are made by "
                           "launch/train_drafter.py, in runs/ unless told otherwise.")
    return runs


def _directories(path: Path, depth: int) -> Iterator[Path]:
    if _is_run(path):
        yield path
    elif depth and path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _directories(child, depth - 1)


def _is_run(path: Path) -> bool:
    manifest = path / "manifest.json"
    try:
        return manifest.is_file() and "stages" in json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def size(path: Path) -> int:
    """Bytes of all files under ``path``; links count as nothing."""
    if path.is_file() and not path.is_symlink():
        return path.stat().st_size
    return sum(found.stat().st_size for found in path.rglob("*") if found.is_file() and not found.is_symlink())


def listing(root: Path) -> str:
    """One line a run: what it is, how far it came, what came out, and what it takes."""
    rows = [["run", "algorithm", "target", "state", "tokens/round", "best tokens/s", "MB", "changed"]]
    for run in find(root):
        found = speeds(run.files.evaluation)
        rates = [value for one in found for value in (one.none, one.fixed, one.scheduled) if value]
        rows.append([
            str(run.path), str(run.files.option("drafter", "algorithm") or "-"),
            str(run.files.option("target", "name") or "-"), run.state, _number(pooled_length(run.files), 3),
            _number(max(rates, default=None), 1), f"{size(run.path) / 1e6:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime((run.path / "manifest.json").stat().st_mtime)),
        ])
    return columns(rows, left=4)


def _number(value: Optional[float], digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def removable(run: Path) -> list[tuple[Path, str]]:
    """Paths in a run directory that nothing needs any more, each with the reason it can go.

    Checkpoints other than the newest and the best, as ``trainer.keep_last=1`` would have left it, and what interrupted
    writes left behind. Results, the export, logs and the newest checkpoint are never among them. A run in use has to be
    refused by the caller.
    """
    tags = complete_tags(run)
    keep = {tags[-1]} if tags else set()
    for name in ("latest", "best"):
        pointer = directory(run) / name
        if pointer.is_file():
            keep.add(pointer.read_text(encoding="utf-8").strip())
    found = [(directory(run) / name, "a newer checkpoint is complete") for name in tags if name not in keep]
    found += [(path, "an interrupted write left it") for path in leftovers(run)]
    return found


def unused_data(data_root: Path, runs: Sequence[Run]) -> list[tuple[Path, str]]:
    """Feature stores under ``data_root`` that no run in ``runs`` was trained from: large, and made again by a command.

    Stores are compared by their folders' names, hashes of what decides them, since runs and data may have moved. Where
    it is not known what a run was trained from, no store of its target is offered. Prompts and responses never are:
    they cost the most to make and take little.
    """
    used, kept_targets = set(), set()
    for run in runs:
        names = _stores(run)
        used |= names
        if "train" in run.stages and not names and run.files.option("features", "mode") not in _WITHOUT_STORE:
            kept_targets.add(str(run.files.option("target", "name")))
    return [(path, "no run listed here was trained from it") for path in sorted(data_root.glob("*/features-*"))
            if path.is_dir() and path.name not in used and path.parent.name not in kept_targets]


def _stores(run: Run) -> set[str]:
    """Names of the feature stores that a run made or was trained from."""
    made = {Path(name).parent.name for record in run.stages.values() for name in record.get("outputs", {})}
    read = {Path(name).name for record in run.stages.values() for name in record.get("reads", ())}
    return {name for name in made | read if name.startswith("features-")}
