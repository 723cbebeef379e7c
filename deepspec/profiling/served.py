"""Profile of a running server: bursts of equal requests, and what the server says its steps took.

What differs between engines (how load is put on, how steps are read) is in a file of its own for each; what is the same
is here: warm-up, shuffled order, samples per cell, and cells from samples.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol, Sequence

import httpx
import numpy as np

from deepspec.config.schema import ProfileConfig
from deepspec.decoding.cost import ProfileCell
from deepspec.errors import InputRefused
from deepspec.profiling.measure import Measurement, RoundTime, Shape, cell_of

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0  # a reply may hold many thousand records
PATIENCE_SECONDS = 300.0  # for the samples of one burst
RAMP_STEPS = 8  # first steps of a burst are not measured: requests are still being admitted
STEADY_SHARE = 0.5  # of the steps of a burst that must have run at the wanted number of requests


class ServedEngine(Protocol):
    """A server whose steps can be timed from outside."""

    def conditions(self) -> dict[str, Any]:
        """Header fields of the profile: hardware, engine, dtype and what else the server says."""

    def shapes(self, config: ProfileConfig) -> list[Shape]:
        """Cells of the grid that this server can run."""

    def burst(self, shape: Shape, samples: int) -> list[RoundTime]:
        """Times of at least ``samples`` steps of ``shape``, its first steps left out."""


@dataclass
class Http:
    """Requests to one server; every failure is one paragraph."""

    endpoint: str
    client: httpx.Client
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def open(cls, endpoint: str, transport: Optional[httpx.BaseTransport] = None) -> "Http":
        """A client of ``endpoint`` (base URL, without /v1)."""
        return cls(endpoint, httpx.Client(base_url=endpoint.rstrip("/"), transport=transport, timeout=120.0))

    def get(self, path: str) -> httpx.Response:
        """The reply. Raises InputRefused naming address and failure."""
        return self._checked("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The same with a JSON body."""
        return self._checked("POST", path, body)

    def _checked(self, method: str, path: str, body: Optional[dict[str, Any]]) -> httpx.Response:
        try:
            reply = self.client.request(method, path, json=body)
            reply.raise_for_status()
            return reply
        except httpx.HTTPError as error:
            raise InputRefused(f"profile.endpoint={self.endpoint}: {method} {path} failed ({error}). Give the base URL "
                               "of a running server, without /v1.") from None


def prompt_ids(shape: Shape, vocab_size: int, random: np.random.Generator) -> list[list[int]]:
    """Random prompts of ``kv_len`` tokens, one per request; ids in the middle of the vocabulary."""
    low, high = vocab_size // 10, max(vocab_size - vocab_size // 10, vocab_size // 10 + 1)
    return random.integers(low, high, (shape.num_reqs, shape.kv_len)).tolist()


def measure_server(engine: ServedEngine, config: ProfileConfig, *, seed: int = 0,
                   clock: Callable[[], float] = time.monotonic,
                   progress: Optional[Callable[[int], Any]] = None) -> Measurement:
    """Measure every cell the server can run, in seeded random order, ``samples_per_cell`` steps each.

    A burst of the smallest and one of the largest shape go first and are not measured. ``seconds_limit`` leaves out the
    rest of the cells, which the result says. Raises InputRefused if fewer than two cells can be run.
    """
    shapes = engine.shapes(config)
    if len(shapes) < 2:
        raise InputRefused(f"profile: the server can run {len(shapes)} cells of this grid; a cost needs two at least. "
                           "Give more profile.num_reqs within what the server admits.")
    began = clock()
    if config.warmup:
        for shape in (shapes[0], shapes[-1]):
            engine.burst(shape, config.warmup)
    cells: list[ProfileCell] = []
    partial = None
    for index in np.random.default_rng(seed).permutation(len(shapes)):
        if config.seconds_limit and clock() - began > config.seconds_limit and len(cells) > 1:
            partial = (f"profile.seconds_limit={config.seconds_limit:g} ended it after {len(cells)} of {len(shapes)} "
                       "cells")
            log.warning("profile: %s", partial)
            break
        cells.append(cell_of(shapes[index], engine.burst(shapes[index], config.samples_per_cell)))
        if progress is not None:
            progress(config.samples_per_cell)
    cells.sort(key=lambda cell: (cell.kv_len, cell.num_reqs, cell.verify_tokens))
    return Measurement(tuple(cells), partial)


def require_steady(kept: Sequence[Any], seen: int, shape: Shape, samples: int) -> None:
    """Raises InputRefused when a burst gave too few steps, or most ran at another number of requests."""
    if len(kept) < samples:
        raise InputRefused(f"profile: {len(kept)} of {samples} steps of {shape.num_reqs} requests came within "
                           f"{PATIENCE_SECONDS:g} s. Lower profile.samples_per_cell, or look at the server's log: it "
                           "may not admit so many requests.")
    if len(kept) < STEADY_SHARE * seen:
        raise InputRefused(f"profile: only {len(kept)} of {seen} steps ran at {shape.num_reqs} requests: the server "
                           "preempts requests or serves others at the same time. Free it, or lower profile.num_reqs.")
