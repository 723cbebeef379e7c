"""Files in which vLLM hands over hidden states: ``<request>.safetensors`` beside ``<request>.safetensors.lock``.

The server creates the lock file before it answers and holds it until the data file is whole. A server without locks
(``use_synchronization_lock: false``) just writes; a file counts as whole when its size is what its header says.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Callable, Optional

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspec.errors import InputRefused
from deepspec.targets.folder import safetensors_keys

_POLL = 0.02  # seconds
KEYS = ("token_ids", "hidden_states")


class FileProblem(Exception):
    """The file did not come, is not whole, or is not what was asked for."""


def take(path: Path, seconds: float, stopped: Callable[[], bool] = lambda: False,
         job: Optional[str] = None) -> dict[str, Tensor]:
    """The tensors of ``path``, waiting at most ``seconds`` for them; file and lock are then deleted.

    The name comes from a server: what is neither named after ``job`` nor has such tensors is not ours to delete. Gives
    up early once ``stopped`` says so. Raises FileProblem.
    """
    ours = job is not None and job in path.name
    try:
        _wait(path, time.monotonic() + seconds, stopped)
        with safe_open(path, framework="pt") as handle:
            missing = [name for name in KEYS if name not in handle.keys()]
            if missing:
                raise FileProblem(f"{path} has no tensor {missing[0]!r}, only {', '.join(handle.keys())}")
            ours = True
            return {name: handle.get_tensor(name) for name in KEYS}
    except (OSError, SafetensorError) as error:
        raise FileProblem(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    finally:
        if ours:
            remove(path)


def _wait(path: Path, deadline: float, stopped: Callable[[], bool]) -> None:
    while not _unlocked(path) or (problem := _unfinished(path)) is not None:
        if stopped() or time.monotonic() > deadline:
            if not path.exists():
                raise FileProblem(f"{path} did not appear: is the server's folder (shared_storage_path) mounted here? "
                                  "If it is elsewhere on this machine, give that folder as features.server.files")
            raise FileProblem(f"{path} is not whole: {problem if _unlocked(path) else 'the server still writes'}")
        time.sleep(_POLL)


def _unlocked(path: Path) -> bool:
    """Whether no server holds the lock file (any more)."""
    try:
        with open(f"{path}.lock", "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


def _unfinished(path: Path) -> Optional[str]:
    try:
        safetensors_keys(path)
        return None
    except (InputRefused, OSError) as error:
        return str(error)


def remove(path: Path) -> None:
    """Data and lock file, where they are."""
    for name in (f"{path}", f"{path}.lock"):
        with contextlib.suppress(OSError):
            os.unlink(name)


def sweep(folder: Path, job: str, before: float) -> int:
    """Delete what was served to this job before the time ``before`` and never read; returns how many files."""
    removed = 0
    for path in folder.glob(f"*{job}*.safetensors*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
                removed += 1
    return removed
