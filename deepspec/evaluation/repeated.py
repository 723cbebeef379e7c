"""Acceptance of repeated trainings: what prompts and what training seeds leave open, in one interval.

n trainings of one drafter that differ in their seed alone, S resamples of prompts, B benchmarks. Prompts are resampled
with the same draws for every training and every drafter, so that what makes a prompt easy for all of them cancels in a
ratio. Trainings are too few to resample: their spread enters as the variance of their mean, and the number of degrees
of freedom (Welch-Satterthwaite) says how well that variance is known.
"""

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from deepspec.evaluation.bootstrap import resample_weights
from deepspec.evaluation.metrics import AcceptanceCounts

Floats = NDArray[np.float64]
Counts = Mapping[str, AcceptanceCounts]  # of one training, by benchmark


@dataclass(frozen=True)
class Estimate:
    """A mean over trainings, or a ratio of two such means, with its 95 % interval (None where nothing tells)."""

    value: float
    interval: Optional[tuple[float, float]]
    prompt_error: float  # standard error from the choice of prompts
    training_error: Optional[float]  # from the choice of training seeds; None with a single training
    trainings: int
    prompts: int


@dataclass(frozen=True)
class Trainings:
    """One number per training: ``values`` [n] as measured, ``draws`` [n, S] on resampled prompts."""

    values: Floats
    draws: Floats
    prompts: int

    def scaled(self, factors: Sequence[float]) -> "Trainings":
        """Every training's numbers times its own factor."""
        column = np.asarray(factors, dtype=np.float64)
        return Trainings(self.values * column, self.draws * column[:, None], self.prompts)


def shared_prompts(trainings: Sequence[Counts]) -> list[dict[str, AcceptanceCounts]]:
    """The counts of benchmarks and prompts that all ``trainings`` have, in the same order."""
    found: list[dict[str, AcceptanceCounts]] = [{} for _ in trainings]
    for name in trainings[0] if trainings else ():
        if not all(name in one for one in trainings):
            continue
        names = set(trainings[0][name].prompts.tolist())
        for one in trainings[1:]:
            names &= set(one[name].prompts.tolist())
        for kept, one in zip(found, trainings):
            counts = one[name]
            rows = [place for place in np.argsort(counts.prompts, kind="stable") if str(counts.prompts[place]) in names]
            kept[name] = counts.select(np.array(rows, dtype=np.int64))
    return found


def acceptance_lengths(trainings: Sequence[Counts], benchmarks: Sequence[str], *, resamples: int,
                       seed: int = 0) -> Optional[Trainings]:
    """Mean over ``benchmarks`` of the pooled acceptance length (tau, bonus included) of every training.

    ``trainings`` are of the same prompts in the same order (``shared_prompts``); a benchmark draws the same prompts
    whatever others there are. None without a training, or with a benchmark that has no prompt or a training without a
    round on one.
    """
    if not trainings or not benchmarks:
        return None
    values, draws, prompts = np.zeros(len(trainings)), np.zeros((len(trainings), resamples)), 0
    for name in benchmarks:
        parts = [one[name] for one in trainings]
        if not len(parts[0]) or not all(part.rounds.sum() > 0 for part in parts):
            return None
        weights = resample_weights(len(parts[0]), resamples, seed)
        prompts += len(parts[0])
        for row, part in enumerate(parts):
            top, bottom = (part.accepted + part.bonus).astype(np.float64), part.rounds.astype(np.float64)
            whole = top.sum() / bottom.sum()
            below = weights @ bottom
            # A resample that drew only prompts without rounds says nothing: the benchmark's own value stands in.
            drawn = np.where(below > 0, (weights @ top) / np.where(below > 0, below, 1.0), whole)
            values[row] += whole / len(benchmarks)
            draws[row] += drawn / len(benchmarks)
    return Trainings(values, draws, prompts)


def _interval(value: float, prompts: tuple[float, int], trainings: Sequence[tuple[float, int]]) -> Optional[
        tuple[float, float]]:
    """``value`` and t standard errors to both sides, from independent (variance, degrees of freedom)."""
    parts = [part for part in (prompts, *trainings) if part[1] > 0]
    total = sum(variance for variance, _ in parts)
    if not parts or total <= 0:
        return None
    freedom = total ** 2 / sum(variance ** 2 / count for variance, count in parts)
    reach = float(stats.t.ppf(0.975, freedom)) * total ** 0.5
    return value - reach, value + reach


def _training_variance(values: Floats) -> float:
    """Of the mean of ``values`` [n]; 0 for a single one, whose degrees of freedom are 0."""
    return float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0


def mean(found: Trainings) -> Estimate:
    """The mean over trainings. Its interval speaks of other prompts and other seeds."""
    value, count = float(found.values.mean()), len(found.values)
    across = float(found.draws.mean(axis=0).var(ddof=1)) if found.draws.shape[1] > 1 else 0.0
    own = _training_variance(found.values)
    return Estimate(value, _interval(value, (across, found.prompts - 1), [(own, count - 1)]), across ** 0.5,
                    own ** 0.5 if count > 1 else None, count, found.prompts)


def gain(first: Trainings, second: Trainings) -> Estimate:
    """Ratio of the means of ``first`` and ``second``, minus 1; of the same prompts, by the same draws.

    Variances are those of the logarithm, so that the interval of A over B is that of B over A turned round.
    """
    means = [float(one.values.mean()) for one in (first, second)]
    value = float(np.log(means[0] / means[1]))
    ratio = np.log(first.draws.mean(axis=0) / second.draws.mean(axis=0))
    across = float(ratio.var(ddof=1)) if len(ratio) > 1 else 0.0
    own = [(_training_variance(one.values) / middle ** 2, len(one.values) - 1)
           for one, middle in zip((first, second), means)]
    bounds = _interval(value, (across, first.prompts - 1), own)
    bounds = None if bounds is None else (float(np.expm1(bounds[0])), float(np.expm1(bounds[1])))
    error = sum(part for part, _ in own) ** 0.5 if all(count > 0 for _, count in own) else None
    return Estimate(float(np.expm1(value)), bounds, across ** 0.5, error, min(len(first.values), len(second.values)),
                    first.prompts)
