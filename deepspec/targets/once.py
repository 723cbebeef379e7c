"""Directories that are made once and then shared: by ranks, runs and later sessions alike."""

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Callable

from deepspec import artifacts
from deepspec.errors import UserError

_log = logging.getLogger(__name__)


def build_once(directory: Path, *, producer: str, fingerprint: str, config: dict[str, Any], seed: int,
               build: Callable[[Path], dict[str, Any]]) -> Path:
    """Return ``directory``, filled by ``build(temporary directory) -> facts`` unless it is already complete.

    Whoever takes the file lock builds and the others wait for it, without a process group: ranks of one node, nodes
    without a common file system and unrelated runs need the same rule, and a killed builder releases the lock. The
    directory gets its name when the last byte is written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if artifacts.is_complete(directory, fingerprint):
            return directory
        with open(directory.with_name(f".{directory.name}.lock"), "ab") as lock:
            _acquire(lock.fileno(), directory)
            if not artifacts.is_complete(directory, fingerprint):
                _build(directory, producer, fingerprint, config, seed, build)
    except OSError as error:
        raise UserError(f"{producer} cannot write {directory} ({error}). Free space there, or set run.data_root to a "
                        "folder that can be written.") from error
    return directory


def _acquire(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("Waiting for another process that is making %s", directory)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _build(directory: Path, producer: str, fingerprint: str, config: dict[str, Any], seed: int,
           build: Callable[[Path], dict[str, Any]]) -> None:
    for stale in directory.parent.glob(f".{directory.name}.*.tmp"):  # of builders that died holding the lock
        shutil.rmtree(stale, ignore_errors=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        manifest = artifacts.begin(temporary, producer, fingerprint, config=config, seed=seed)
        facts = build(temporary)
        files = [str(path.relative_to(temporary)) for path in sorted(temporary.rglob("*"))
                 if path.is_file() and path.name != artifacts.MANIFEST]
        artifacts.complete(temporary, manifest, files, facts)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(temporary, directory)
        artifacts.fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
