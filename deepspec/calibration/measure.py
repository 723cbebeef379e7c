"""What one way of calibrating leaves on records it never saw. n blocks, K draft positions, G bins, D bootstrap draws.

Everything is of the cumulative product ``a_k = prod_{i<=k} c_i`` against "the block survived through k", over the
blocks whose outcome at k is known. Undefined values are None.
"""

import math
from typing import Any, Optional

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.metrics import (
    Floats, auc, bootstrap_ece, brier, cell_gaps, ece_noise_floor, expected_calibration_error, survival_probability,
)
from deepspec.calibration.records import ConfidenceRecords

Values = tuple[Optional[float], ...]  # one per position; None where undefined
ENOUGH_BLOCKS = 10_000  # below, an interval of an ECE is itself too uncertain to say that nothing is wrong
NEGLIGIBLE = 0.01  # cumulative ECE: what temperature scaling gets a confidence down to (Sec. 3.2.1)
Intervals = tuple[Optional[tuple[float, float]], ...]


def known_or_none(value: float) -> Optional[float]:
    """A finite number, else None."""
    return float(value) if math.isfinite(value) else None


def mean(values: Values) -> float:
    """Mean over the positions that have a value; NaN without any."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else float("nan")


def measure(records: ConfidenceRecords, confidence: ArrayLike, *, num_bins: int, draws: int,
            seed: int) -> dict[str, Any]:
    """Per position: ``ece``, ``ece_ci95`` (conversations drawn with replacement), ``noise_floor``, ``brier``, ``auc``.

    ``auc[k]`` is that of ``confidence`` [n, K] at k alone, among the blocks that survived to k.
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    survival = survival_probability(confidence)
    columns: dict[str, list[Any]] = {name: [] for name in ("ece", "ece_ci95", "noise_floor", "brier", "auc")}
    for k in range(records.origin.block_length):
        known, reached = records.known[:, k], records.reached[:, k]
        predicted, label = survival[known, k], records.survived[known, k]
        columns["ece"].append(known_or_none(expected_calibration_error(predicted, label, num_bins)))
        low, high = bootstrap_ece(predicted, label, records.conversation[known], num_bins, draws=draws, seed=seed + k)
        columns["ece_ci95"].append((low, high) if math.isfinite(low) else None)
        columns["noise_floor"].append(known_or_none(ece_noise_floor(predicted, num_bins, seed=seed + k)))
        columns["brier"].append(known_or_none(brier(predicted, label)))
        columns["auc"].append(known_or_none(auc(confidence[reached, k], records.survived[reached, k])))
    return {name: tuple(values) for name, values in columns.items()}


def mean_ece_draws(records: ConfidenceRecords, confidence: ArrayLike, *, num_bins: int, draws: int,
                   seed: int) -> tuple[float, Floats]:
    """ECE, mean over positions, and the same of ``draws`` samples of whole conversations [D].

    Two confidences measured with one seed on the same records see the same samples: their difference is paired.
    """
    survival = survival_probability(confidence)
    names, group = np.unique(records.conversation, return_inverse=True)
    random = np.random.default_rng(seed)
    weights = random.multinomial(len(names), np.full(len(names), 1.0 / len(names)), size=draws)
    point, drawn = [], []
    for k in range(records.origin.block_length):
        known = records.known[:, k]
        if not known.any():
            continue
        gaps = cell_gaps(survival[known, k], records.survived[known, k], group[known], len(names), num_bins)
        sizes = np.bincount(group[known], minlength=len(names))
        point.append(float(np.abs(gaps.sum(axis=0)).sum() / sizes.sum()))
        drawn.append(np.abs(weights @ gaps).sum(axis=1) / np.maximum(weights @ sizes, 1))
    return float(np.mean(point)), np.mean(drawn, axis=0)


def pivotal(point: float, drawn: Floats) -> Optional[tuple[float, float]]:
    """95 % pivotal bootstrap interval ``2 x - quantiles``; None without draws.

    Resampling adds noise to an ECE, so its percentile interval lies too high; turned round the estimate, the interval
    takes that bias out to first order.
    """
    if not drawn.size:
        return None
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(2 * point - high), float(2 * point - low)


def excess(records: ConfidenceRecords, before: ArrayLike, after: ArrayLike, *, num_bins: int, draws: int,
           seed: int) -> dict[str, Any]:
    """How much of the ECE above its noise floor calibration removes, means over positions.

    ``before`` and ``after`` are confidences [n, K]. Each excess is ECE minus the floor of those predictions;
    ``reduction`` is the share removed, None where there was nothing to remove (the excess before is not above 0).
    """
    result: dict[str, Any] = {}
    samples = {}
    for name, confidence in (("before", before), ("after", after)):
        point, drawn = mean_ece_draws(records, confidence, num_bins=num_bins, draws=draws, seed=seed)
        survival = survival_probability(confidence)
        floors = [ece_noise_floor(survival[known, k], num_bins, seed=seed + k)
                  for k, known in enumerate(records.known.T) if known.any()]
        floor = float(np.mean(floors))
        interval = pivotal(point, drawn)
        samples[name] = (point - floor, drawn - floor)
        result |= {name: point - floor, f"{name}_ci95": interval and (interval[0] - floor, interval[1] - floor),
                   f"noise_floor_{name}": floor}
    change = samples["before"][0] - samples["after"][0]
    result |= {"removed": change, "removed_ci95": pivotal(change, samples["before"][1] - samples["after"][1])}
    result["reduction"] = 1.0 - result["after"] / result["before"] if result["before"] > 0 else None
    return result


def need(found: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Whether a confidence needs calibration, with the numbers that say so.

    ``found`` is what ``excess`` gives. ``needed`` is False where the 95 % interval of the raw confidence's excess over
    its noise floor ends below ``NEGLIGIBLE`` on at least ``ENOUGH_BLOCKS`` blocks; else True where the interval begins
    above 0, and None where so many blocks cannot tell.
    """
    interval = found["before_ci95"]
    needed: Optional[bool] = None
    if interval is not None and interval[1] < NEGLIGIBLE and blocks >= ENOUGH_BLOCKS:
        needed = False
    elif interval is not None and interval[0] > 0:
        needed = True
    return {"needed": needed, "excess": found["before"], "excess_ci95": interval, "blocks": blocks,
            "noise_floor": found["noise_floor_before"], "negligible": NEGLIGIBLE,
            "rule": "no calibration is needed where the 95 % interval of the raw excess over the noise floor ends "
                    f"below {NEGLIGIBLE:g} on at least {ENOUGH_BLOCKS} blocks; it is where the interval begins above "
                    "0; else these blocks cannot tell"}
