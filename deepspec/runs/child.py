"""One job of a sweep: a launcher of its own, so that nothing of one job is left for the next."""

import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Optional, Sequence

from deepspec.distributed import free_port
from deepspec.errors import ConfigError

log = logging.getLogger(__name__)
LOG = "job.log"
ERROR_LINES = 40
_RANK = re.compile(r"^\[rank \d+\] ")
_ERROR = re.compile(r"^\w+(Error|Refused): ")
_SAVING_SECONDS = 600.0
# Where a sweep is itself a task of Slurm or of a launcher, its jobs are not: they get ranks of their own.
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher() -> list[str]:
    """The deepspeed launcher of this very environment, whatever else the path holds. Raises ConfigError without one."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"{sys.executable} has no deepspeed, which starts the ranks. Install it (pip install "
                          "deepspeed), or run single processes: python -m deepspec.cli NAME, and for jobs of a sweep "
                          "sweep.launcher=[none].")
    return [sys.executable, "-m", "deepspeed.launcher.runner"]


def command(overrides: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """What runs one job: ``deepspeed`` with ``arguments`` of its own, or this Python if they are ["none"].

    Raises ConfigError without deepspeed.
    """
    job = ["deepspec.cli", "train_drafter", *overrides]
    if list(arguments) == ["none"]:
        return [sys.executable, "-m", *job]
    port = [] if any(item.startswith("--master_port") for item in arguments) else [f"--master_port={free_port()}"]
    return [*launcher(), *port, *arguments, "--module", *job]


class Child:
    """A running job. SIGTERM and Ctrl-C are handed on to it, which then saves; ``stopped`` remembers that."""

    def __init__(self) -> None:
        self.stopped = False
        self._process: Optional[subprocess.Popen] = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Child":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Optional[FrameType]) -> None:
        if self.stopped and self._process is not None:
            self._process.kill()
            return
        log.warning("asked to stop: the running job saves first (once more ends it at once)")
        self.stopped = True
        if self._process is not None:
            self._process.terminate()

    def run(self, arguments: Sequence[str], log_path: Path) -> int:
        """Run to the end with all output appended to ``log_path``; returns the exit code.

        The job has a process group of its own, so that Ctrl-C in a terminal reaches it once, through here, and goes
        down with this process even if that is killed.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as output:
            self._process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=environment,
                                             start_new_session=True, preexec_fn=_end_with_parent)
            if self.stopped:
                self._process.terminate()
            code = self._process.wait()
        if self.stopped:
            _wait_for_group(self._process.pid)
        return code


def _end_with_parent() -> None:
    """SIGTERM when the parent dies, on Linux; the launcher's ranks notice its death and save."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait_for_group(group: int) -> None:
    """SIGTERM ends the outer launcher at once, its ranks only when they have saved."""
    end = time.monotonic() + _SAVING_SECONDS
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.2)


def last_lines(path: Path, count: int = ERROR_LINES) -> list[str]:
    """The end of a log, progress bars left out, and what another rank has said in the same words."""
    if not path.is_file():
        return []
    kept: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        if not line.strip() or "\r" in line or "it/s]" in line:
            continue
        bare = _RANK.sub("", line)
        # Lines that several ranks write begin with an error's name; others may well be repeated.
        kept.setdefault(bare if _ERROR.match(bare) else f"{number}", line)
    return list(kept.values())[-count:]
