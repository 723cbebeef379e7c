"""Intervals by resampling prompts. P prompts, S resamples, prompts drawn whole: their rounds are not independent."""

from dataclasses import dataclass
from typing import Optional

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepspec.evaluation.metrics import AcceptanceCounts

Floats = NDArray[np.float64]
_BLOCK = 1 << 22  # resampled prompts held at once


def resample_weights(prompts: int, resamples: int, seed: int) -> Floats:
    """How often each prompt is drawn in each resample [S, P], float64; rows sum to P."""
    random = np.random.default_rng(seed)
    return random.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=resamples).astype(np.float64)


def ratio_bootstrap(numerator: ArrayLike, denominator: ArrayLike, resamples: int, seed: int = 0) -> Floats:
    """Resampled values [S] of a pooled ratio of per-prompt sums [P]; resamples without a denominator are left out."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    values = []
    step = max(1, _BLOCK // max(1, len(top)))
    for start in range(0, resamples, step):
        weights = resample_weights(len(top), min(step, resamples - start), seed + start)
        below = weights @ bottom
        values.append((weights @ top)[below > 0] / below[below > 0])
    return np.concatenate(values) if values else np.zeros(0)


def percentile_interval(values: Floats) -> Optional[list[float]]:
    """[2.5 %, 97.5 %] of resampled values, None without values."""
    if not len(values):
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return [float(low), float(high)]


def acceptance_length_interval(counts: AcceptanceCounts, resamples: int, seed: int = 0) -> Optional[list[float]]:
    """95 % percentile interval of the pooled acceptance length; None with fewer than two prompts, which say nothing
    about other prompts."""
    if len(counts) < 2 or not resamples or not counts.rounds.sum():
        return None
    return percentile_interval(ratio_bootstrap(counts.accepted + counts.bonus, counts.rounds, resamples, seed))


@dataclass(frozen=True)
class Comparison:
    """A minus B on the same prompts."""

    effect: float  # difference of pooled acceptance lengths
    ratio: float  # A / B
    interval: tuple[float, float]  # 95 % of the difference
    p_value: float  # two-sided, of no difference
    prompts: int


def compare(first: AcceptanceCounts, second: AcceptanceCounts, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Paired comparison of two drafters whose counts are of the same prompts in the same order.

    Both are resampled with the same draws, so what makes a prompt easy for both cancels. The p-value is twice the
    smaller share of resampled differences on one side of zero, at least 2 / (resamples + 1). Raises ValueError for
    different prompts or fewer than two.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} prompts: a paired comparison needs the same two or more")
    tops = [(part.accepted + part.bonus).astype(np.float64) for part in (first, second)]
    rounds = [part.rounds.astype(np.float64) for part in (first, second)]
    weights = resample_weights(len(first), resamples, seed)
    below = [weights @ part for part in rounds]
    used = (below[0] > 0) & (below[1] > 0)
    difference = (weights @ tops[0])[used] / below[0][used] - (weights @ tops[1])[used] / below[1][used]
    values = [top.sum() / part.sum() for top, part in zip(tops, rounds)]
    side = min((difference <= 0).sum(), (difference >= 0).sum())
    low, high = np.percentile(difference, (2.5, 97.5))
    return Comparison(float(values[0] - values[1]), float(values[0] / values[1]), (float(low), float(high)),
                      float(min(1.0, 2.0 * (side + 1) / (len(difference) + 1))), len(first))
