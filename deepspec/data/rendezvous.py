"""Ranks that wait for each other through the file system, with progress in the log.

Answers and features take hours and ranks finish at different times; a collective would run into the process group's
timeout (minutes), and a wait inside one shows nothing.
"""

import fcntl
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Optional

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.errors import InputRefused, UserError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 30.0
_BEAT_SECONDS = 5.0
_LOST_SECONDS = 120.0  # without a sign of life; a launcher without ssh does not tell one host that another has died


class Rendezvous:
    """One meeting of all ranks in ``directory``, which they share and no other job may use meanwhile."""

    def __init__(self, directory: os.PathLike | str, name: str) -> None:
        self._directory, self._name = Path(directory), name
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self._done = threading.Event()
        self._lock: Optional[IO[str]] = None  # held by rank 0; the end of the process ends it, too

    def start(self, prepare: Optional[Callable[[], Any]] = None) -> None:
        """Remove what this rank left of an earlier run, call ``prepare``, then let all ranks begin together.

        Raises InputRefused when another job has a meeting of this name there.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self._claim()
        if self.world_size > 1:
            distributed.init()
        for path in self._directory.glob(f".{self._name}-*.done"):
            if int(path.stem.split("-")[-1]) % self.world_size == self.rank:
                path.unlink(missing_ok=True)
        if prepare is not None:
            prepare()
        self._alive(self.rank).touch()
        if self.world_size > 1:
            threading.Thread(target=self._beat, name="alive", daemon=True).start()
        distributed.barrier()

    def finish(self, result: dict[str, Any]) -> None:
        """Say that this rank is done."""
        atomic_write_json(self._marker(self.rank), result)

    def collect(self) -> list[dict[str, Any]]:
        """Results of all ranks, by rank; waits for the last of them. Raises UserError when one of them has died."""
        wait_for(self._complete, self._describe)
        return [json.loads(self._marker(rank).read_text(encoding="utf-8")) for rank in range(self.world_size)]

    def end(self) -> None:
        """After every rank has collected: remove the markers."""
        distributed.barrier()
        self._done.set()
        left = self._directory.glob(f".{self._name}-*.alive") if self.rank == 0 else ()  # a larger job was killed here
        for path in (self._marker(self.rank), self._alive(self.rank), *left):
            path.unlink(missing_ok=True)
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()

    def _claim(self) -> None:
        self._lock = open(self._directory / f".{self._name}.lock", "w", encoding="utf-8")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process, whatever else it opens
        except (BlockingIOError, PermissionError):
            self._lock.close()
            raise InputRefused(f"{self._name}: another job is writing to {self._directory}. Wait until it has ended; "
                               "what it has finished by then is not made again.") from None
        except OSError as error:  # a file system without locks
            log.debug("%s cannot be locked (%s)", self._directory, error)

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            try:
                os.utime(self._alive(self.rank))
            except OSError:  # the next beat may come through
                log.debug("no sign of life could be written to %s", self._directory)

    def _complete(self) -> bool:
        missing = [rank for rank in range(self.world_size) if not self._marker(rank).exists()]
        now = self._last_beat(self.rank)  # by the file system's clock, like theirs
        lost = [rank for rank in missing if now - self._last_beat(rank) > _LOST_SECONDS]
        if lost:
            raise UserError(
                f"{self._name}: no sign of life from rank {lost[0]} for {_LOST_SECONDS:.0f} s, so its host or process "
                f"is gone. What the ranks have finished is kept in {self._directory}; start the same command again."
            )
        return not missing

    def _last_beat(self, rank: int) -> float:
        try:
            return self._alive(rank).stat().st_mtime
        except OSError:  # not visible yet on a shared file system
            return float("inf")

    def _alive(self, rank: int) -> Path:
        return self._directory / f".{self._name}-{rank:05d}.alive"

    def _marker(self, rank: int) -> Path:
        return self._directory / f".{self._name}-{rank:05d}.done"

    def _describe(self) -> str:
        missing = [rank for rank in range(self.world_size) if not self._marker(rank).exists()]
        return f"{self._name}: waiting for {len(missing)} of {self.world_size} ranks (rank {missing[0]} first)"


def wait_for(ready: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Poll until ``ready()``; say what is being waited for every half minute."""
    reported = time.monotonic()
    while not ready():
        if time.monotonic() - reported > _REPORT_SECONDS:
            log.info("%s", describe())
            reported = time.monotonic()
        time.sleep(_POLL_SECONDS)
