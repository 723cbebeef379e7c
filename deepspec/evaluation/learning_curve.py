"""A learning curve from a small run: what acceptance, and so what speed, more training would give. n points."""

from dataclasses import dataclass
from typing import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from deepspec.errors import InputRefused
from deepspec.evaluation.metrics import latency_per_token

Floats = NDArray[np.float64]
LEAST_POINTS = 4
_POWERS = (0.02, 4.0)


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one round on the hardware that was profiled, and of one step of the target alone."""

    draft_ms: float
    verify_ms: float
    alone_ms: float

    def speedup(self, acceptance_length: float) -> float:
        """Over the target alone, by Eq. 1."""
        return self.alone_ms / latency_per_token(self.draft_ms, self.verify_ms, acceptance_length)


@dataclass(frozen=True)
class Prediction:
    """Acceptance length at ``samples`` training samples, with its 95 % interval."""

    samples: float
    acceptance_length: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class LearningCurve:
    """``length(n) = limit - scale * n^-power``, and refits to resampled residuals [S, 3]."""

    limit: float
    scale: float
    power: float
    residual: float  # standard deviation, tokens per round
    points: int
    resampled: Floats
    longest: float  # n of the last point: beyond it the curve is a guess

    def at(self, samples: float) -> Prediction:
        """Percentile interval of the refits' curves, the scatter of a single measurement included."""
        value = float(_curve(samples, self.limit, self.scale, self.power))
        others = np.array([_curve(samples, *one) for one in self.resampled])
        noise = np.random.default_rng(0).normal(0.0, self.residual, len(others))
        low, high = np.percentile(others + noise, (2.5, 97.5))
        return Prediction(samples, value, (float(low), float(high)))


def _curve(samples: float | Floats, limit: float, scale: float, power: float) -> Floats:
    return np.asarray(limit - scale * np.asarray(samples, dtype=np.float64) ** -power)


def _line(relative: Floats, lengths: Floats, power: float, most: float) -> tuple[float, float, float]:
    """Limit and scale of the best curve of ``power``, and its squared error; a limit above ``most`` is cut to it."""
    basis = -relative ** -power
    centred = basis - basis.mean()
    scale = max(0.0, float(centred @ lengths) / max(float(centred @ centred), 1e-300))
    limit = float(lengths.mean() - scale * basis.mean())
    if limit > most:
        limit, scale = most, max(0.0, float(basis @ (lengths - most)) / float(basis @ basis))
    return limit, scale, float(((limit + scale * basis - lengths) ** 2).sum())


def _fitted(samples: Floats, lengths: Floats, most: float) -> Floats:
    """Limit, scale and power by least squares: given the power the rest is linear, so one search over it is enough."""
    relative = samples / samples[0]

    def error(log_power: float) -> float:
        return _line(relative, lengths, float(np.exp(log_power)), most)[2]

    grid = np.log(np.geomspace(*_POWERS, 25))
    best = int(np.argmin([error(value) for value in grid]))
    around = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    power = float(np.exp(optimize.minimize_scalar(error, bounds=around, method="bounded").x))
    limit, scale, _ = _line(relative, lengths, power, most)
    return np.array([limit, scale * samples[0] ** power, power])


def fit_learning_curve(samples: Sequence[float], lengths: Sequence[float], *, most: float, resamples: int = 200,
                       seed: int = 0) -> LearningCurve:
    """Fit acceptance lengths (teacher forced, or any other) after so many training samples.

    ``most`` is the greatest length there can be, draft length + 1. Raises InputRefused with fewer than 4 points or
    points without order.
    """
    x, y = np.asarray(samples, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    if len(x) < LEAST_POINTS:
        raise InputRefused(f"A learning curve needs at least {LEAST_POINTS} validations, there are {len(x)}. Train "
                           "with a smaller trainer.validate_every.")
    if len(x) != len(y) or not (np.diff(x) > 0).all() or x[0] <= 0 or not np.isfinite(y).all():
        raise InputRefused("A learning curve needs finite acceptance lengths at growing numbers of samples.")
    found = _fitted(x, y, most)
    fitted = _curve(x, *found)
    free = max(1, len(x) - 3)
    rest = (y - fitted) * np.sqrt(len(x) / free)  # three parameters have eaten part of the scatter
    random = np.random.default_rng(seed)
    others = np.array([_fitted(x, fitted + random.choice(rest, len(x)), most) for _ in range(resamples)])
    residual = float(np.sqrt(((y - fitted) ** 2).sum() / free))
    limit, scale, power = map(float, found)
    return LearningCurve(limit, scale, power, residual=residual, points=len(x), resampled=others,
                         longest=float(x[-1]))


def decoded_length(teacher_forced: float, now: float, decoded: float) -> float:
    """Acceptance length of decoding where a validation says ``teacher_forced``, from what both said at one time.

    The accepted tokens keep their ratio: they are what the two ways of measuring differ in, the bonus token is not.
    """
    return 1.0 + (teacher_forced - 1.0) * (decoded - 1.0) / (now - 1.0) if now > 1.0 else decoded
