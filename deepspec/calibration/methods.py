"""Other ways to calibrate a confidence, each fitted per position among the blocks that survived to it (scikit-learn).

No engine reads these: they are for our own scheduler and for comparison. n samples of one position, K positions.
"""

import math
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.metrics import Floats, sigmoid
from deepspec.calibration.records import ConfidenceRecords

METHODS = ("sts", "platt", "beta", "isotonic")
Map = Mapping[str, Any]  # of one position, as calibration.json holds it
_NO_PENALTY = 1e8  # inverse strength of the ridge: scikit-learn's solvers want a finite one
_EDGE = 1e-12  # isotonic probabilities stay this far from 0 and 1, so that no product is ever stuck


def _logistic(features: Floats, label: Floats) -> tuple[Floats, float]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=_NO_PENALTY, max_iter=1000).fit(features, label)
    return model.coef_[0].astype(np.float64), float(model.intercept_[0])


def fit_platt(logits: Floats, label: Floats) -> dict[str, Any]:
    """Platt scaling ``sigmoid(slope z + intercept)`` of logits z [n] on outcomes [n]."""
    (slope,), intercept = _logistic(logits[:, None], label)
    return {"slope": float(slope), "intercept": intercept}


def _beta_features(logits: Floats) -> Floats:
    """[n, 2]: ``log s`` and ``-log(1 - s)`` for ``s = sigmoid(z)``, exact at any z."""
    return np.stack([-np.logaddexp(0.0, -logits), np.logaddexp(0.0, logits)], axis=-1)


def fit_beta(logits: Floats, label: Floats) -> dict[str, Any]:
    """Beta calibration ``sigmoid(a log s - b log(1 - s) + c)``, a and b at least 0: a negative one is left out."""
    features, kept = _beta_features(logits), [0, 1]
    while kept:
        weights, intercept = _logistic(features[:, kept], label)
        if (weights >= 0).all():
            values = dict(zip(kept, weights.tolist()))
            return {"a": values.get(0, 0.0), "b": values.get(1, 0.0), "c": intercept}
        kept = [place for place, weight in zip(kept, weights) if weight >= 0]
    mean = float(np.clip(label.mean(), 1e-6, 1 - 1e-6))
    return {"a": 0.0, "b": 0.0, "c": math.log(mean / (1 - mean))}


def fit_isotonic(logits: Floats, label: Floats) -> dict[str, Any]:
    """Isotonic regression: a non-decreasing staircase from logits to probabilities, linear between its corners."""
    from sklearn.isotonic import IsotonicRegression

    model = IsotonicRegression(y_min=_EDGE, y_max=1 - _EDGE, out_of_bounds="clip").fit(logits, label)
    return {"x": model.X_thresholds_.tolist(), "y": model.y_thresholds_.tolist()}


_FITS: dict[str, Callable[[Floats, Floats], dict[str, Any]]] = {
    "platt": fit_platt, "beta": fit_beta, "isotonic": fit_isotonic}


def apply_map(one: Optional[Map], logits: ArrayLike) -> Floats:
    """Confidences of one position under its map; None is the plain sigmoid. Any shape, float64."""
    z = np.asarray(logits, dtype=np.float64)
    if one is None:
        return sigmoid(z)
    if "slope" in one:
        return sigmoid(one["slope"] * z + one["intercept"])
    if "a" in one:
        return sigmoid(_beta_features(z) @ np.array([one["a"], one["b"]]) + one["c"])
    return np.interp(z, one["x"], one["y"])


def apply_maps(maps: Sequence[Optional[Map]], logits: ArrayLike) -> Floats:
    """Confidences [..., k] of logits [..., k], each position by its own map."""
    z = np.asarray(logits, dtype=np.float64)
    return np.stack([apply_map(maps[k], z[..., k]) for k in range(z.shape[-1])], axis=-1)


def fit_maps(method: str, records: ConfidenceRecords, min_samples: int) -> list[Optional[dict[str, Any]]]:
    """One map per position [K], fitted on the blocks that reached it.

    A position with fewer than ``min_samples`` of them, or where all had the same outcome, gets None: it stays raw.
    """
    maps: list[Optional[dict[str, Any]]] = []
    for k in range(records.origin.block_length):
        reached = records.reached[:, k]
        logits = records.logits[reached, k].astype(np.float64)
        label = records.survived[reached, k].astype(np.float64)
        usable = len(label) >= max(2, min_samples) and label.min() < label.max()
        maps.append(_FITS[method](logits, label) if usable else None)
    return maps
