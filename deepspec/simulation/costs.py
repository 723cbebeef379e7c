"""Seconds of a simulated step, from the profile: decoding rows by requests and tokens, prompts by tokens."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from deepspec.decoding.cost import CostTable, ProfileCell, read_cells
from deepspec.errors import InputRefused
from deepspec.profiling.extras import PrefillCell, read_extras
from deepspec.scheduling import Floats, interpolate


@dataclass(frozen=True)
class StepCosts:
    """Prices of steps, all measured with the drafter that will be simulated.

    Between profiled context lengths the price is interpolated, outside them it is that of the nearest one.
    """

    depths: tuple[int, ...]  # context lengths of the tables, increasing
    tables: tuple[CostTable, ...]
    alone_requests: Floats  # [m] request counts of rounds that the target runs without a drafter
    alone_seconds: Floats  # [m]
    prefill: tuple[PrefillCell, ...] = ()
    padded: bool = False  # every row costs what the longest context in the batch does

    @classmethod
    def from_cells(cls, cells: Sequence[ProfileCell], extras: dict[str, Any]) -> "StepCosts":
        """Costs from records and what ``read_extras`` gives.

        Raises InputRefused for cells that tell no price of a draft token.
        """
        depths = sorted({cell.kv_len for cell in cells})
        tables = tuple(CostTable.from_cells([cell for cell in cells if cell.kv_len == depth]).exact()
                       for depth in depths)
        alone = sorted((int(row["num_reqs"]), float(row["p50_ms"]) / 1e3) for row in extras["alone"])
        if not alone:  # a profile of a running engine has no such rounds: the same step without its drafting
            first = tables[0]
            alone = [(int(count), float(first.verify_curve(int(count))(count))) for count in first.requests]
        counts, seconds = zip(*alone)
        return cls(tuple(depths), tables, np.array(counts, dtype=np.float64),
                   np.maximum.accumulate(np.array(seconds)), tuple(extras["prefill"]),
                   bool(extras.get("padded", False)))

    @classmethod
    def load(cls, directory: str | PathLike[str]) -> "StepCosts":
        """Read ``profile/``. Raises InputRefused for a missing or damaged profile."""
        directory = Path(directory)
        return cls.from_cells(read_cells(directory / "records.jsonl"), read_extras(directory / "sps.json"))

    @property
    def largest_requests(self) -> int:
        """Above this many requests prices are extrapolated."""
        return int(max(self.tables[0].requests))

    def _at_depth(self, kv_len: float, price: Any) -> float:
        values = [float(price(table)) for table in self.tables]
        return float(np.interp(kv_len, self.depths, values))

    def verify_seconds(self, requests: int, batch_tokens: int, kv_len: float) -> float:
        """A round without its drafting: ``requests`` rows of ``kv_len`` context, ``batch_tokens`` tokens in all."""
        return self._at_depth(kv_len, lambda table: table.verify_curve(requests)(float(batch_tokens)))

    def draft_seconds(self, requests: int, kv_len: float) -> float:
        """Drafting for ``requests`` rows."""
        return self._at_depth(kv_len, lambda table: table.draft_seconds(requests))

    def context(self, contexts: Sequence[int]) -> float:
        """The context length that prices a step of rows with these, in tokens."""
        return float(max(contexts) if self.padded else np.mean(contexts))

    def alone_round(self, requests: int, kv_len: float) -> float:
        """A round of plain decoding by a target that has no drafter at its side: measured at the shallowest context,
        deeper ones add what they add to the same step beside a drafter."""
        shallow = float(interpolate(self.alone_requests, self.alone_seconds, np.array([float(requests)]))[0])
        deeper = self.verify_seconds(requests, requests, kv_len) - self.verify_seconds(requests, requests, 0.0)
        return shallow + max(deeper, 0.0)

    def prefill_seconds(self, tokens: int, *, drafting: bool) -> tuple[float, float]:
        """(what a step of prompts alone takes, what ``tokens`` of prompt add to a step that decodes).

        Without measured prompts both follow from the dearest measured row: a token of a prompt like a verified one.
        """
        if tokens == 0:
            return 0.0, 0.0
        if not self.prefill:
            curve = self.tables[0].verify_curve(1)
            whole = float(curve(float(tokens)))
            return whole, whole - float(curve(1.0))
        points = np.array([cell.tokens for cell in self.prefill], dtype=np.float64)
        seconds = np.array([cell.drafting_ms if drafting else cell.alone_ms for cell in self.prefill]) / 1e3
        whole = float(interpolate(points, np.maximum.accumulate(seconds), np.array([float(tokens)]))[0])
        slope = float(np.polyfit(points, seconds, 1)[0]) if len(points) > 1 else float(seconds[0] / points[0])
        return whole, max(slope, 0.0) * tokens


def check_same_machine(own: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Raises InputRefused unless both profiles are of one target, hardware and dtype: else their costs do not mix."""
    for key in ("hardware", "target_sha256", "dtype"):
        if own.get(key) != other.get(key):
            raise InputRefused(f"runs: the profile of {name} has {key}={other.get(key)!r}, this run's has "
                               f"{own.get(key)!r}: what they measured cannot be compared. Profile both on the same "
                               "machine with the same target (launch/profile_throughput.py).")
