"""Times rounds over a grid of request counts, verified tokens per request and context lengths.

Independent of what is timed: a ``Runner`` runs one round of a cell and says how long its parts took.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol, Sequence

import numpy as np
import torch

from deepspec.config.schema import ProfileConfig
from deepspec.decoding.cost import ProfileCell
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)
_MIN_SAMPLES = 3  # per cell, however short the time


@dataclass(frozen=True)
class Shape:
    """A cell before it is measured."""

    num_reqs: int
    verify_tokens: int  # per request, anchor included
    kv_len: int

    @property
    def batch_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_reqs * self.verify_tokens


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round and of its parts; host time is what they leave."""

    draft: float
    verify: float
    total: float


class Runner(Protocol):
    """Something that can run rounds of any shape. Clocks are read with the device idle."""

    def prepare(self, kv_len: int, shapes: Sequence[Shape]) -> None:
        """Make room for ``shapes``, all with ``kv_len`` tokens of context."""

    def run(self, shape: Shape) -> RoundTime:
        """One round."""


@dataclass(frozen=True)
class Measurement:
    """Cells, and in words why some are missing (None: the grid is complete)."""

    cells: tuple[ProfileCell, ...]
    partial: Optional[str] = None


def grid(config: ProfileConfig, draft_length: int) -> list[Shape]:
    """Shapes of the grid that fit ``max_batch_tokens``. Raises InputRefused if fewer than two do."""
    lengths = sorted({min(length, draft_length) for length in config.verify_lengths})
    shapes = [Shape(requests, 1 + length, depth) for depth in sorted(set(config.kv_lengths))
              for requests in sorted(set(config.num_reqs)) for length in lengths
              if requests * (1 + length) <= config.max_batch_tokens]
    if len(shapes) < 2:
        raise InputRefused(f"profile: {len(shapes)} cells of the grid fit profile.max_batch_tokens="
                           f"{config.max_batch_tokens}; a cost needs two at least. Raise it or give smaller "
                           "profile.num_reqs.")
    return shapes


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate memory" in str(error))


class _Samples:
    """Times per shape; a shape that ran out of memory takes all that are at least as large with it."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.alive = list(shapes)
        self.times: dict[Shape, list[RoundTime]] = {shape: [] for shape in shapes}
        self.partial: Optional[str] = None

    def run(self, runner: Runner, shape: Shape) -> Optional[RoundTime]:
        """One round of ``shape``; None if there is no memory for it."""
        if shape not in self.alive:
            return None
        try:
            return runner.run(shape)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        self.alive = [other for other in self.alive if other.num_reqs < shape.num_reqs
                      or other.batch_tokens < shape.batch_tokens or other.kv_len < shape.kv_len]
        self.partial = (f"memory ran out at {shape.num_reqs} requests x {shape.verify_tokens} tokens with "
                        f"{shape.kv_len} tokens of context; this size and larger ones were left out")
        log.warning("profile: %s", self.partial)
        return None


def cell_of(shape: Shape, times: list[RoundTime]) -> ProfileCell:
    """Medians and percentiles of samples."""
    total = 1e3 * np.array([item.total for item in times])
    draft, verify = 1e3 * np.array([item.draft for item in times]), 1e3 * np.array([item.verify for item in times])
    low, middle, high = np.percentile(total, (10, 50, 90))
    return ProfileCell(
        num_reqs=shape.num_reqs, verify_tokens=shape.verify_tokens, kv_len=shape.kv_len, n=len(times),
        p10_ms=float(low), p50_ms=float(middle), p90_ms=float(high), draft_ms=float(np.median(draft)),
        verify_ms=float(np.median(verify)),
        host_ms=float(np.median(np.maximum(total - draft - verify, 0.0))))


def measure(runner: Runner, shapes: Sequence[Shape], config: ProfileConfig, *, seed: int = 0,
            clock: Callable[[], float] = time.perf_counter,
            progress: Optional[Callable[[], Any]] = None,
            each_pass: Optional[Callable[[], Any]] = None) -> Measurement:
    """Measure every shape ``samples_per_cell`` times, medians and percentiles of whole rounds.

    Each shape warms up on its own, unmeasured: the first rounds of a shape allocate and compile. The samples are then
    taken in passes over all shapes in a seeded random order, so that a clock that throttles shifts no shape against
    another. ``seconds_limit`` ends the passes early, after at least three. When memory runs out the smaller shapes are
    kept. ``progress`` is called after every round, ``each_pass`` after every pass. Raises InputRefused if nothing could
    be measured.
    """
    began = clock()
    order = np.random.default_rng(seed)
    cells: list[ProfileCell] = []
    partial: Optional[str] = None
    depths = sorted({shape.kv_len for shape in shapes})
    for place, depth in enumerate(depths):
        samples = _Samples([shape for shape in shapes if shape.kv_len == depth])
        deadline = began + config.seconds_limit * (place + 1) / len(depths) if config.seconds_limit else float("inf")
        runner.prepare(depth, samples.alive)
        for shape in list(samples.alive):
            for _ in range(max(1, config.warmup)):
                samples.run(runner, shape)
        for count in range(config.samples_per_cell):
            if count >= _MIN_SAMPLES and clock() >= deadline:
                break
            for index in order.permutation(len(samples.times)):
                shape = list(samples.times)[index]
                elapsed = samples.run(runner, shape)
                if elapsed is not None:
                    samples.times[shape].append(elapsed)
                if progress is not None:
                    progress()
            if each_pass is not None:
                each_pass()
        partial = samples.partial or partial
        cells.extend(cell_of(shape, samples.times[shape]) for shape in samples.alive)
    if not cells:
        raise InputRefused("profile: memory ran out at the smallest shape. Use smaller profile.num_reqs or "
                           "profile.kv_lengths.")
    return Measurement(tuple(cells), partial)
