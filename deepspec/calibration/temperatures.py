"""Sequential Temperature Scaling. n blocks, K draft positions (1-based in messages, 0-based in arrays)."""

import logging
from dataclasses import dataclass
from typing import Optional

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.metrics import Floats, ece_noise_quantile, expected_calibration_error, sigmoid

logger = logging.getLogger(__name__)
_TIE = 1e-12  # two ECEs closer than this are rounding of the same sum


@dataclass(frozen=True)
class TemperatureFit:
    """Result of ``fit_temperatures``; positions are 1-based."""

    temperatures: tuple[float, ...]
    samples: tuple[int, ...]  # blocks that reached the position: everything before it was accepted
    positions_without_data: tuple[int, ...]  # fewer than the wanted blocks reached them: T stays 1
    positions_right_already: tuple[int, ...]  # their error at T = 1 was no larger than chance shows: T stays 1
    positions_at_grid_edge: tuple[int, ...]  # the best T is the grid's first or last: the true one may lie outside


def temperature_grid(minimum: float = 0.1, maximum: float = 10.0, points: int = 41) -> Floats:
    """Candidates, evenly spaced in the logarithm, nearest to 1 first; 1 itself is always among them."""
    grid = np.geomspace(minimum, maximum, points)
    grid[np.abs(np.log(grid)) < 1e-9] = 1.0
    grid = np.unique(np.append(grid, 1.0))
    return grid[np.argsort(np.abs(np.log(grid)), kind="stable")]


def fit_temperatures(logits: ArrayLike, accepted: ArrayLike, drafted: Optional[ArrayLike] = None, *,
                     grid: Optional[ArrayLike] = None, num_bins: int = 20, min_samples: int = 1,
                     fallback: Optional[ArrayLike] = None, noise_guard: bool = False, seed: int = 0,
                     warn: bool = True) -> TemperatureFit:
    """Sequential Temperature Scaling (Sec. 3.2.1): ``T_k = argmin ECE(prod_{i<=k} sigma(z_i / T_i))``, left to right.

    For k = 1..K the temperature of position k is searched on the grid with all earlier ones fixed. The outcome at k is
    that the block survived through k, ``accepted >= k``, over all blocks whose draft reached k. T_k = 1 is kept unless
    another value lowers the ECE; ties go to the value nearest 1. A position that fewer than ``min_samples`` blocks
    reached keeps T = 1 (or its ``fallback``) and is named in the result and in a warning.

    Args:
        logits: confidence logits [n, K], made with identity temperatures.
        accepted: accepted draft tokens of each block [n], 0..K.
        drafted: positions of each block whose outcome is known [n]; None means all K.
        grid: candidate temperatures; None means 41 values from 0.1 to 10.
        min_samples: blocks that must have reached a position for a temperature of its own; at least 1.
        fallback: temperatures [K] of positions below ``min_samples``; None means 1.
        noise_guard: keep T_k = 1 also where the ECE at T_k = 1 is below what right predictions would show on as many
            blocks in 95 % of the cases. The search of the paper has no such test, and on a confidence that is right it
            fits the noise of the bins: the smaller the sample, the further from 1. ``seed`` decides its draws.
        warn: log positions without data or at the edge of the grid.
    """
    logits = np.asarray(logits, dtype=np.float64)
    accepted = np.asarray(accepted)
    length = logits.shape[1]
    drafted = np.full(len(logits), length) if drafted is None else np.asarray(drafted)
    candidates = temperature_grid() if grid is None else np.asarray(grid, dtype=np.float64)
    candidates = candidates[np.argsort(np.abs(np.log(candidates)), kind="stable")]
    survival = np.ones(len(logits))
    temperatures, samples, right = [], [], []
    for k in range(length):
        known = drafted > k
        samples.append(int((known & (accepted >= k)).sum()))
        best = 1.0 if fallback is None else float(np.asarray(fallback)[k])
        if samples[-1] >= max(1, min_samples):
            best = 1.0
            before, label, scores = survival[known], accepted[known] > k, logits[known, k]
            lowest = expected_calibration_error(before * sigmoid(scores), label, num_bins)
            if noise_guard and lowest <= ece_noise_quantile(before * sigmoid(scores), num_bins, seed=seed + k):
                right.append(k + 1)
            for candidate in candidates if k + 1 not in right else ():
                error = expected_calibration_error(before * sigmoid(scores / candidate), label, num_bins)
                if error < lowest - _TIE:
                    best, lowest = float(candidate), error
        temperatures.append(best)
        survival = survival * sigmoid(logits[:, k] / best)
    missing = tuple(k + 1 for k in range(length) if samples[k] < max(1, min_samples))
    edges = (candidates.min(), candidates.max())
    edge = tuple(k + 1 for k in range(length) if temperatures[k] != 1.0 and temperatures[k] in edges
                 and k + 1 not in missing)
    if missing and warn:
        logger.warning("temperatures: %s samples at positions %s (too few blocks survived that far, %d are wanted); "
                       "T = 1 kept there", ", ".join(str(samples[k - 1]) for k in missing),
                       ", ".join(map(str, missing)), max(1, min_samples))
    if edge and warn:
        logger.warning("temperatures: positions %s chose the edge of the grid (%g to %g); few samples or a useless "
                       "confidence are the usual reasons", ", ".join(map(str, edge)), *edges)
    return TemperatureFit(tuple(temperatures), tuple(samples), missing, tuple(right), edge)
