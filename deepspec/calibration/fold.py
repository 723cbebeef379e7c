"""One temperature and one shift for all positions, folded into the confidence head's weights. n blocks, K positions.

Engines that read no temperatures take the raw sigmoid of the head. With ``w / T`` and ``b / T + s`` in the weights that
sigmoid is the calibrated one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.metrics import Floats, sigmoid
from deepspec.calibration.records import ConfidenceRecords

_STEPS = 100  # of Newton's method; it needs about six
_TINY = 1e-10


@dataclass(frozen=True)
class Fold:
    """``z / temperature + shift`` for every position's logit z; (1, 0) changes nothing."""

    temperature: float = 1.0
    shift: float = 0.0

    @property
    def is_identity(self) -> bool:
        """Whether folding changes nothing."""
        return self.temperature == 1.0 and self.shift == 0.0

    def apply(self, logits: ArrayLike) -> Floats:
        """Logits of the folded head, float64, from those of the head as trained; any shape."""
        return np.asarray(logits, dtype=np.float64) / self.temperature + self.shift

    def undo(self, logits: ArrayLike) -> Floats:
        """Logits of the head as trained, float64, from those of a folded head (records an engine made with one)."""
        return (np.asarray(logits, dtype=np.float64) - self.shift) * self.temperature


def fit_scale(score: ArrayLike, label: ArrayLike) -> tuple[float, float]:
    """Slope and intercept [a, b] that maximise the likelihood of labels under ``sigmoid(a x + b)``, by Newton's method.

    Args:
        score: logits x [n].
        label: outcomes, or probabilities of them [n], from 0 to 1.

    Returns:
        (1, 0) where the likelihood has no maximum: fewer than two samples, or labels of one kind only, or a score that
        separates them completely.
    """
    x, y = np.asarray(score, dtype=np.float64), np.asarray(label, dtype=np.float64)
    if x.size < 2 or y.min() == y.max() or x.min() == x.max():
        return 1.0, 0.0
    center, width = x.mean(), x.std()
    design = np.stack([(x - center) / width, np.ones_like(x)], axis=1)  # standardised: one step suits any scale
    weights = np.zeros(2)

    def loss(candidate: Floats) -> float:
        z = design @ candidate
        return float((np.logaddexp(0.0, z) - y * z).mean())

    current = loss(weights)
    for _ in range(_STEPS):
        p = sigmoid(design @ weights)
        gradient = design.T @ (p - y) / x.size
        curvature = (design * (p * (1 - p))[:, None]).T @ design / x.size
        step = np.linalg.solve(curvature + _TINY * np.eye(2), gradient)
        scale = 1.0
        while loss(weights - scale * step) > current and scale > 1e-6:
            scale /= 2
        weights = weights - scale * step
        current = loss(weights)
        if np.abs(scale * step).max() < 1e-10:
            break
    slope = float(weights[0] / width)
    if not np.isfinite(weights).all() or current < 1e-6:  # nothing left to lose: separated, the slope runs away
        return 1.0, 0.0
    return slope, float(weights[1] - weights[0] * center / width)


def fit_fold(records: ConfidenceRecords) -> Fold:
    """The fold of highest likelihood over all positions that were reached (the condition of Eq. 7) together.

    The label is the analytic acceptance rate (Eq. 8) where it is known, else the outcome: both have the same mean and
    the rate has less noise. A fit whose slope is not positive would turn the ranking round; then nothing is folded.
    """
    mask = records.reached
    rate = records.analytic_rate[mask].astype(np.float64)
    label = np.where(np.isfinite(rate), np.clip(rate, 0.0, 1.0), records.survived[mask])
    slope, shift = fit_scale(records.logits[mask], label)
    return Fold(1.0 / slope, shift) if slope > 1e-3 else Fold()
