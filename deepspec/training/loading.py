"""Windows prepared while the step before them runs: masks, denominators and packs come from one thread, in order.

Everything that reads the source happens there, so a source is never read by two threads at once; collectives stay in
the training thread.
"""

import queue
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Optional

import torch

from deepspec.data.batch import TrainingBatch
from deepspec.objective import Denominators
from deepspec.training.clock import StepClock
from deepspec.training.packs import Packer, Window, pinned

_POLL_SECONDS = 0.1  # how often a thread that waits looks whether it is still needed
_FIRST_EPOCH_OVER = object()  # in the place of a window


@dataclass(frozen=True)
class LoadedWindow:
    """A window whose packs are ready or on their way."""

    window: Window
    weights: Denominators  # of this rank's samples; add over ranks for the denominators
    packs: Iterator[TrainingBatch]  # to be used up before the next window is asked for
    clock: StepClock  # runs since the window was asked for
    started: float  # time.perf_counter() of that moment


class Loader:
    """Iterates over ``windows`` with their packs; a context manager that leaves no thread behind.

    ``ahead`` packs wait in a queue while one more is being made; 0 makes them in the training thread when they are
    asked for. What goes wrong in the thread is raised in the training thread, where the pack would have come.

    A source with ``announce`` is told which packs come next, as many as it wants to know. One that is ``filling`` a
    store in the first epoch gets its ``finish`` called after that, in the training thread of every rank.
    """

    def __init__(self, packer: Packer, windows: Iterable[Window], ahead: int) -> None:
        self._packer, self._windows = packer, windows
        self._items = self._produce()
        self._reading = threading.Lock()
        self._finished = threading.Event()
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[Any, Optional[BaseException]]] = queue.Queue(maxsize=max(1, ahead))
        self._thread = threading.Thread(target=self._run, name="packs", daemon=True) if ahead > 0 else None

    def __enter__(self) -> "Loader":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()  # packs are large

    def __iter__(self) -> Iterator[LoadedWindow]:
        while True:
            clock, started = StepClock(), time.perf_counter()
            head = self._next(clock)
            if head is None:
                return
            if head is _FIRST_EPOCH_OVER:
                self._packer.source.finish()  # type: ignore[union-attr]  # it said that it is filling
                self._finished.set()
                continue
            window, weights = head
            yield LoadedWindow(window, weights, self._packs(len(window.steps), clock), clock, started)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing reads the source or runs its target meanwhile; packs that are ready stay so."""
        with self._reading:
            yield

    def _packs(self, count: int, clock: StepClock) -> Iterator[TrainingBatch]:
        for _ in range(count):
            yield self._next(clock)

    def _produce(self) -> Iterator[Any]:
        """Head and packs of each window in turn."""
        windows, known = iter(self._windows), deque[Window]()
        while True:
            self._look_ahead(windows, known, 1)
            if not known:
                return
            window = known.popleft()
            if window.epoch > 0 and getattr(self._packer.source, "filling", False):
                yield _FIRST_EPOCH_OVER
            yield window, self._packer.weights(window)
            for step in window.steps:
                self._look_ahead(windows, known, 0)
                yield self._packer.pack(step, window.epoch)

    def _look_ahead(self, windows: Iterator[Window], known: deque[Window], least: int) -> None:
        """Have at least so many windows ``known``, and more while the source wants to know what comes next."""
        while len(known) < least or getattr(self._packer.source, "wanted", 0) > 0:
            window = next(windows, None)
            if window is None:
                return
            known.append(window)
            self._packer.announce(window.steps)

    def _next(self, clock: StepClock) -> Any:
        clock.mark("other")
        if self._thread is None:
            item, error = next(self._items, None), None
        else:
            item, error = self._queue.get()
        clock.mark("wait")
        if error is not None:
            raise error
        return item

    def _run(self) -> None:
        item: Any = True
        error: Optional[BaseException] = None
        while item is not None and error is None and not self._stop.is_set():
            try:
                with self._reading:
                    item = next(self._items, None)
                if isinstance(item, TrainingBatch) and torch.cuda.is_available():
                    item = pinned(item)
            except BaseException as caught:  # noqa: B036 - raised again in the training thread
                item, error = None, caught
            self._put((item, error))
            while item is _FIRST_EPOCH_OVER and not self._stop.is_set() and not self._finished.wait(_POLL_SECONDS):
                pass

    def _put(self, entry: tuple[Any, Optional[BaseException]]) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
