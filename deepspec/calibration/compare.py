"""Two confidences of the same blocks side by side, with paired intervals. n blocks, K positions, D bootstrap draws."""

from typing import Any, Optional

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepspec.calibration.measure import mean_ece_draws, pivotal
from deepspec.calibration.metrics import Floats, sigmoid, survival_probability
from deepspec.calibration.records import ConfidenceRecords


def weighted_auc(score: ArrayLike, label: ArrayLike, weights: ArrayLike) -> Floats:
    """AUC (ties count half) when sample i counts ``weights[d, i]`` times, [D]; NaN where a class has no weight."""
    _, place = np.unique(np.asarray(score, dtype=np.float64), return_inverse=True)
    positive, size = np.asarray(label).astype(bool), int(place.max(initial=-1)) + 1
    values = []
    for row in np.atleast_2d(np.asarray(weights, dtype=np.float64)):
        ups = np.bincount(place, weights=row * positive, minlength=size)
        downs = np.bincount(place, weights=row * ~positive, minlength=size)
        below = np.cumsum(downs) - 0.5 * downs
        total = ups.sum() * downs.sum()
        values.append(float((ups * below).sum() / total) if total else float("nan"))
    return np.array(values)


def _rows(records: ConfidenceRecords, draws: int, seed: int) -> NDArray[np.int64]:
    """How often each block counts, [1 + draws, n]: once, then in samples of whole conversations."""
    names, group = np.unique(records.conversation, return_inverse=True)
    drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    return np.concatenate([np.ones((1, len(names)), dtype=np.int64), drawn])[:, group]


def _means(records: ConfidenceRecords, logits: ArrayLike, weights: NDArray[np.int64]) -> dict[str, Floats]:
    """AUC among blocks that reached a position, and Brier score of the cumulative product; means over positions [D]."""
    survival = survival_probability(sigmoid(logits))
    scores = np.asarray(logits)
    columns: dict[str, list[Floats]] = {"auc": [], "brier": []}
    for k in range(records.origin.block_length):
        known, reached = records.known[:, k], records.reached[:, k]
        if reached.any():
            ranked = weighted_auc(scores[reached, k], records.survived[reached, k], weights[:, reached])
            if np.isfinite(ranked[0]):
                columns["auc"].append(ranked)
        if known.any():
            squared = np.square(survival[known, k] - records.survived[known, k])
            columns["brier"].append(weights[:, known] @ squared / np.maximum(weights[:, known].sum(axis=1), 1))
    return {name: _mean(values, len(weights)) for name, values in columns.items()}


def _mean(values: list[Floats], draws: int) -> Floats:
    """Mean over the positions that have a value, [D]; NaN in a draw where none has."""
    if not values:
        return np.full(draws, np.nan)
    mean: Floats = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return mean


def _entry(first: Floats, second: Floats, interval: Optional[tuple[float, float]]) -> dict[str, Any]:
    return {"joint": _number(first[0]), "refit": _number(second[0]), "difference": _number(second[0] - first[0]),
            "difference_ci95": interval and list(interval)}


def _number(value: Any) -> Optional[float]:
    return float(value) if np.isfinite(value) else None


def _percentiles(drawn: Floats) -> Optional[tuple[float, float]]:
    drawn = drawn[np.isfinite(drawn)]
    return tuple(map(float, np.percentile(drawn, (2.5, 97.5)))) if drawn.size else None  # type: ignore[return-value]


def compare_heads(records: ConfidenceRecords, joint: ArrayLike, refit: ArrayLike, *, num_bins: int, draws: int,
                  seed: int) -> dict[str, Any]:
    """AUC, Brier score and ECE of two heads' logits [n, K] on the same blocks: means over positions.

    A mean is None where no position has data for it (an AUC needs survivors and others). ``difference`` is refit minus
    joint, with a 95 % interval over conversations drawn with replacement, the same ones for both heads; draws without
    data are left out of it, and it is None if none is left.
    """
    weights = _rows(records, draws, seed)
    first, second = _means(records, joint, weights), _means(records, refit, weights)
    result = {name: _entry(first[name], second[name], _percentiles((second[name] - first[name])[1:]))
              for name in ("auc", "brier")}
    points, drawn = zip(*(mean_ece_draws(records, sigmoid(logits), num_bins=num_bins, draws=draws, seed=seed)
                          for logits in (joint, refit)))
    result["ece"] = _entry(np.array([points[0]]), np.array([points[1]]),
                           pivotal(points[1] - points[0], drawn[1] - drawn[0]))
    return result
