"""Signals as requests that the loop answers at the end of a step; a dead launcher counts as SIGTERM."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional

logger = logging.getLogger(__name__)
# Words of the command lines of DeepSpeed's two processes, from the inner one outwards.
_LAUNCHER = (("deepspeed.launcher.launch",), ("deepspeed", "ds", "deepspeed.launcher.runner"))


class Requests:
    """While entered: SIGTERM and the first Ctrl-C ask to save and stop, SIGUSR1 to save and go on.

    Handlers only set a flag; a second Ctrl-C interrupts at once.
    """

    stopping = False  # a request to stop was answered: this process is on its way out

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Requests":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us there handles signals
                break
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        Requests.stopping = Requests.stopping or self.stop

    def take(self) -> tuple[bool, bool]:
        """(stop, save) so far; the request to save is answered by this."""
        save, self.save = self.save, False
        return self.stop, save

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            logger.warning("interrupted: this step is finished and saved first; once more ends at once")
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stop = True
        else:
            self.save = True


def ignore_save_requests() -> None:
    """Outside training there is nothing to save, and SIGUSR1, left alone, ends a process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def watch_launcher(seconds: float = 1.0) -> None:
    """Send this process SIGTERM when a process of the deepspeed launcher above it dies.

    SIGTERM to ``deepspeed`` ends that process alone: without this its ranks would train on, unseen. Training then
    saves and stops; any other stage ends. Does nothing without the launcher, or where there is no /proc.
    """
    chain = _launcher_above(os.getpid())
    if chain:
        threading.Thread(target=_watch, args=(chain, seconds), name="launcher", daemon=True).start()


def _launcher_above(pid: int) -> dict[int, int]:
    """Parent of this process and of each launcher process above it whose own parent is a launcher process, too."""
    chain: dict[int, int] = {}
    for words in _LAUNCHER:
        parent = _parent(pid)
        if parent is None or not _runs(parent, words):
            break
        chain[pid] = parent
        pid = parent
    return chain


def _runs(pid: int, words: tuple[str, ...]) -> bool:
    """Whether an argument of the process, or the file it names, is one of ``words``."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(argument in words or Path(argument).name in words for argument in arguments)


def _parent(pid: int) -> Optional[int]:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rpartition(")")[2].split()[1])  # the second field, a name in parentheses, may hold anything
    except (OSError, IndexError, ValueError):
        return None


def _watch(chain: dict[int, int], seconds: float) -> None:
    while all(_parent(pid) == parent for pid, parent in chain.items()):
        time.sleep(seconds)
    if Requests.stopping:  # another rank has seen it first
        return
    logger.warning("the deepspeed launcher is gone: this rank stops as if it had got SIGTERM")
    os.kill(os.getpid(), signal.SIGTERM)
