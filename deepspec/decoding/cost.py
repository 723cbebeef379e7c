"""What a round costs, from measured cells: by requests and verified tokens for the target, by requests for the drafter.

R requests, B tokens of one verification step. Numpy only.
"""

import json
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Callable, Iterable, Protocol

import numpy as np
from numpy.typing import ArrayLike

from deepspec.errors import InputRefused
from deepspec.scheduling import Floats, SpsTable, interpolate, lower_convex, refuse_flat


@dataclass(frozen=True)
class ProfileCell:
    """One measured cell. A step of it verifies ``num_reqs * verify_tokens`` tokens; times in milliseconds.

    The percentiles are of the whole round: draft + verify + host. ``draft_ms``, ``verify_ms`` and ``host_ms`` are
    medians of its parts; a round without drafting costs ``verify_ms + host_ms``.
    """

    num_reqs: int
    verify_tokens: int  # per request, anchor included: 1 + l
    kv_len: int
    n: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float

    @property
    def batch_tokens(self) -> int:
        """Tokens of the step, B."""
        return self.num_reqs * self.verify_tokens


def read_cells(path: str | PathLike[str]) -> list[ProfileCell]:
    """Cells of ``profile/records.jsonl``. Raises InputRefused for a missing or damaged file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [ProfileCell(**json.loads(line)) for line in lines if line.strip()]
    except FileNotFoundError:
        raise InputRefused(f"profile cells not found: {path}. Make them with: launch/profile_throughput.py") from None
    except (ValueError, TypeError) as error:
        raise InputRefused(f"{path} does not hold profile cells ({error}). Delete the folder and measure again "
                           "with launch/profile_throughput.py.") from None


class RoundCost(Protocol):
    """Prices the two choices of a round (s)."""

    def verify_curve(self, requests: int) -> Callable[[ArrayLike], Floats]:
        """Seconds of a round without drafting, as a function of B, for ``requests`` requests."""

    def draft_seconds(self, requests: int) -> float:
        """Seconds of drafting for ``requests`` requests."""


@dataclass(frozen=True)
class CostTable:
    """Measured grid. Between its request counts costs are interpolated at equal tokens per request; beyond the largest
    they grow with the last slope. Between lengths: the lower convex envelope of the measured, monotone costs, or the
    costs themselves (``convex=False``)."""

    requests: Floats  # [n] increasing
    tokens: tuple[Floats, ...]  # per request count: tokens per request measured, increasing
    seconds: tuple[Floats, ...]  # same shape: a round without drafting
    draft: Floats  # [n] s
    convex: bool = True

    @classmethod
    def from_cells(cls, cells: Iterable[ProfileCell]) -> "CostTable":
        """Table of the cells at their smallest ``kv_len``.

        Raises:
            InputRefused: fewer than two lengths at every request count, or costs that differ by less than 5 %.
        """
        cells = list(cells)
        shallow = min((cell.kv_len for cell in cells), default=0)
        grid: dict[int, dict[int, ProfileCell]] = {}
        for cell in cells:
            if cell.kv_len == shallow:
                grid.setdefault(cell.num_reqs, {})[cell.verify_tokens] = cell
        grid = {requests: row for requests, row in grid.items() if len(row) > 1}
        if not grid:
            raise InputRefused("throughput profile: no request count was measured at two verification lengths, so the "
                               "price of a draft token is unknown. Measure again with two or more "
                               "profile.verify_lengths.")
        tokens, seconds, draft = [], [], []
        for requests in sorted(grid):
            row = [grid[requests][length] for length in sorted(grid[requests])]
            tokens.append(np.array([cell.verify_tokens for cell in row], dtype=np.float64))
            seconds.append(np.maximum.accumulate([(cell.verify_ms + cell.host_ms) / 1e3 for cell in row]))
            draft.append(float(np.median([cell.draft_ms for cell in row])) / 1e3)
        refuse_flat(np.concatenate(seconds), "throughput profile")
        return cls(np.array(sorted(grid), dtype=np.float64), tuple(tokens), tuple(seconds), np.array(draft))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "CostTable":
        """Read ``profile/records.jsonl``. Raises InputRefused for a missing or damaged file."""
        return cls.from_cells(read_cells(path))

    def exact(self) -> "CostTable":
        """The same table without the convex envelope."""
        return replace(self, convex=False)

    def _row_seconds(self, row: int, per_request: Floats) -> Floats:
        points, values = self.tokens[row], self.seconds[row]
        if self.convex:
            points, values = lower_convex(points, values)
        return interpolate(points, values, per_request)

    def verify_curve(self, requests: int) -> Callable[[ArrayLike], Floats]:
        """Seconds of a round without drafting as a function of B, for ``requests`` requests."""
        grid = self.requests
        high = int(np.clip(np.searchsorted(grid, requests), 1, max(1, len(grid) - 1)))
        low = max(0, high - 1)
        high = min(high, len(grid) - 1)
        span = grid[high] - grid[low]
        share = (requests - grid[low]) / span if span else 0.0
        share = max(share, 0.0)  # fewer than measured: the smallest measured count

        def curve(batch_tokens: ArrayLike) -> Floats:
            per_request = np.asarray(batch_tokens, dtype=np.float64) / requests
            below, above = self._row_seconds(low, per_request), self._row_seconds(high, per_request)
            return below + share * np.maximum(above - below, 0.0)

        return curve

    def draft_seconds(self, requests: int) -> float:
        """Seconds of drafting for ``requests`` requests."""
        return float(interpolate(self.requests, self.draft, np.array([float(requests)]))[0])


@dataclass(frozen=True)
class SpsCost:
    """Costs from a 1-D table alone: drafting is inside its steps, so skipping it saves nothing that is known."""

    table: SpsTable
    convex: bool = True

    def verify_curve(self, requests: int) -> Callable[[ArrayLike], Floats]:
        """Seconds of a step as a function of B."""
        points, values = self.table.batch_tokens.astype(np.float64), self.table.seconds
        if self.convex:
            points, values = lower_convex(points, values)

        def curve(batch_tokens: ArrayLike) -> Floats:
            wanted: Any = np.asarray(batch_tokens, dtype=np.float64)
            return np.where(wanted > self.table.max_batch_tokens, np.inf, interpolate(points, values, wanted))

        return curve

    def draft_seconds(self, requests: int) -> float:
        """0: not told apart by the table."""
        return 0.0
