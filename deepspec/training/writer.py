"""Checkpoints off the hot path: training stops for one copy to CPU memory, a thread of rank 0 does the rest."""

import logging
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Optional

from deepspec import distributed
from deepspec.config.schema import Config
from deepspec.drafters.types import DrafterShape
from deepspec.errors import UserError
from deepspec.training import saving, state
from deepspec.training.checkpoint import TrainState
from deepspec.training.ema import WeightAverage

logger = logging.getLogger(__name__)


class Background:
    """Runs one job at a time, in a thread or on the spot, and keeps what went wrong until somebody asks."""

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self.error: Optional[Exception] = None
        self._thread: Optional[threading.Thread] = None

    def start(self, job: Callable[[], Any]) -> None:
        """Run ``job`` once the one before it has ended."""
        self.wait()
        if not self.threaded:
            self._run(job)
            return
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when no job runs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:  # shown by whoever asks next: a thread has nobody to raise it to
            self.error = error


class CheckpointWriter:
    """Saves a run's checkpoints, at most one in flight. ``save`` and ``settle`` are collective."""

    def __init__(self, run_dir: Path, shape: DrafterShape, config: Config) -> None:
        self._run_dir, self._shape, self._config = run_dir, shape, config
        self._background = Background(config.trainer.async_save)

    @property
    def failed(self) -> bool:
        """Whether a write of this rank has gone wrong, as far as is known by now."""
        return self._background.error is not None

    def save(self, engine: Any, average: Optional[WeightAverage], train_state: TrainState) -> None:
        """Copy weights and moments, and have them written. With ``trainer.async_save`` this returns after the copy.

        Raises UserError on every rank when this write (without async_save) or the one before it failed.
        """
        self.settle()  # before the copy: two of them might not fit
        tensors = state.gather(engine, average)
        if tensors is not None:
            keep_last, values = self._config.trainer.keep_last, asdict(self._config)
            self._background.start(lambda: saving.save(
                self._run_dir, tensors, self._shape, train_state, values, keep_last=keep_last))
        if not self._config.trainer.async_save:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is being written. Raises the same UserError on every rank when a write failed."""
        self._background.wait()
        error, self._background.error = self._background.error, None
        problem = distributed.broadcast_object(None if error is None else str(error) or repr(error))
        if error is not None and not isinstance(error, UserError):
            raise error
        if problem is not None:
            raise UserError(str(problem))

    def close(self) -> None:
        """Let a write in flight end, whatever happened meanwhile. Not collective; never raises."""
        self._background.wait()
        if self._background.error is not None:
            logger.error("%s", self._background.error)
