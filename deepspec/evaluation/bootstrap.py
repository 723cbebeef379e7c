"""Intervals by resampling prompts. P prompts, S resamples, prompts drawn whole: their rounds are not independent."""

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
