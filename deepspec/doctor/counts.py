"""Counts of speculative rounds, one entry per prompt. K draft tokens per round."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class PromptCounts:
    """Rounds of one prompt. ``accepted[k]``: rounds that accepted at least k + 1 draft tokens; None where only the sum
    is known."""

    rounds: int
    drafted: int
    total: int  # accepted draft tokens
    accepted: Optional[tuple[int, ...]] = None


@dataclass(frozen=True)
class Counts:
    """Rounds of several prompts, in the order of the prompts."""

    prompts: tuple[PromptCounts, ...]

    @property
    def rounds(self) -> int:
        """Rounds of all prompts."""
        return sum(item.rounds for item in self.prompts)

    @property
    def acceptance_length(self) -> Optional[float]:
        """1 + accepted / rounds, pooled; the bonus token counts. None without rounds."""
        return 1 + sum(item.total for item in self.prompts) / self.rounds if self.rounds else None

    @property
    def draft_length(self) -> Optional[int]:
        """Draft tokens per round, rounded; None without rounds."""
        return round(sum(item.drafted for item in self.prompts) / self.rounds) if self.rounds else None

    @property
    def positions(self) -> Optional[list[int]]:
        """Rounds [K] that accepted at least 1, .. K tokens; None where an engine reports only sums."""
        rows = [item.accepted for item in self.prompts]
        if not rows or any(row is None for row in rows):
            return None
        width = max(len(row) for row in rows if row is not None)
        return [sum(row[k] for row in rows if row is not None and k < len(row)) for k in range(width)]

    def to_json(self) -> dict[str, Any]:
        """What doctor.json says about them."""
        return {"rounds": self.rounds, "draft_length": self.draft_length, "acceptance_length": self.acceptance_length,
                "accepted_per_position": self.positions}


def missing_length(expected: Counts, served: Counts, seed: int = 0) -> tuple[float, float, float]:
    """Acceptance length that ``served`` lacks against ``expected`` on the same prompts, and its 95 % interval.

    Both pooled; percentile bootstrap over prompts, the two counts of a prompt drawn together.
    """
    first = np.array([(item.total, item.rounds) for item in expected.prompts], dtype=np.float64)
    second = np.array([(item.total, item.rounds) for item in served.prompts], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(first), size=(_RESAMPLES, len(first)))
    drawn = np.concatenate([np.arange(len(first))[None], drawn])
    sums = [part[drawn].sum(axis=1) for part in (first, second)]
    lengths = [part[:, 0] / np.maximum(part[:, 1], 1.0) for part in sums]
    gaps = lengths[0] - lengths[1]
    low, high = np.quantile(gaps[1:], [0.025, 0.975])
    return float(gaps[0]), float(low), float(high)


def from_histogram(histogram: Sequence[int], drafted: int) -> PromptCounts:
    """Counts from the number of rounds that accepted exactly 0, 1, .. tokens."""
    accepted = tuple(sum(histogram[k:]) for k in range(1, len(histogram)))
    return PromptCounts(sum(histogram), drafted, sum(accepted), accepted)
