"""Ranks that wait for each other through the file system, with progress in the log.

Answers and features take hours and ranks finish at different times; a collective would run into the process group's
timeout (minutes), and a wait inside one shows nothing.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Callable, Optional

from deepspec import distributed
from deepspec.artifacts import atomic_write_json

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 30.0


class Rendezvous:
    """One meeting of all ranks in ``directory``, which they share."""

    def __init__(self, directory: os.PathLike | str, name: str) -> None:
        self._directory, self._name = Path(directory), name
        self.rank, self.world_size = distributed.rank(), distributed.world_size()

    def start(self, prepare: Optional[Callable[[], Any]] = None) -> None:
        """Remove what this rank left of an earlier run, call ``prepare``, then let all ranks begin together."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self.world_size > 1:
            distributed.init()
        for path in self._directory.glob(f".{self._name}-*.done"):
            if int(path.stem.split("-")[-1]) % self.world_size == self.rank:
                path.unlink(missing_ok=True)
        if prepare is not None:
            prepare()
        distributed.barrier()

    def finish(self, result: dict[str, Any]) -> None:
        """Say that this rank is done."""
        atomic_write_json(self._marker(self.rank), result)

    def collect(self) -> list[dict[str, Any]]:
        """Results of all ranks, by rank; waits for the last of them."""
        wait_for(lambda: all(self._marker(rank).exists() for rank in range(self.world_size)), self._describe)
        return [json.loads(self._marker(rank).read_text(encoding="utf-8")) for rank in range(self.world_size)]

    def end(self) -> None:
        """After every rank has collected: remove the markers."""
        distributed.barrier()
        self._marker(self.rank).unlink(missing_ok=True)

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
