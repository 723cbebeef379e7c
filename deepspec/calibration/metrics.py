"""How good a confidence is. R blocks, K draft positions, G bins. Undefined values are NaN here and null in files."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def sigmoid(logits: ArrayLike) -> Floats:
    """``1 / (1 + exp(-x))`` in float64 without overflow at any finite logit."""
    return np.asarray(0.5 + 0.5 * np.tanh(np.asarray(logits, dtype=np.float64) / 2.0), dtype=np.float64)


def survival_probability(confidence: ArrayLike) -> Floats:
    """Prefix survival ``a_{r,j} = prod_{i<=j} c_{r,i}`` (Sec. 3.2.2); [R, K] -> [R, K] float64, also [K] -> [K]."""
    return np.cumprod(np.asarray(confidence, dtype=np.float64), axis=-1, dtype=np.float64)


def _bins(predicted: Floats, num_bins: int) -> NDArray[np.int64]:
    """Index of the equal-width bin of each probability; 1.0 belongs to the last one."""
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)


def expected_calibration_error(predicted: ArrayLike, label: ArrayLike, num_bins: int = 20) -> float:
    """Expected calibration error (ECE) ``sum_g n_g / n |mean predicted_g - mean label_g|`` over equal-width bins.

    Args:
        predicted: probabilities [n].
        label: outcomes [n], 0/1 or booleans.

    Returns:
        A share between 0 and 1; NaN without samples.
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    if predicted.size == 0:
        return float("nan")
    gap = predicted - np.asarray(label, dtype=np.float64)
    sums = np.bincount(_bins(predicted, num_bins), weights=gap, minlength=num_bins)
    return float(np.abs(sums).sum() / predicted.size)


def reliability_curve(predicted: ArrayLike, label: ArrayLike, num_bins: int = 20) -> tuple[Floats, Floats, Floats]:
    """What a reliability diagram draws (Fig. 6): mean prediction, mean outcome and count per non-empty bin."""
    predicted = np.asarray(predicted, dtype=np.float64)
    index = _bins(predicted, num_bins)
    count = np.bincount(index, minlength=num_bins).astype(np.float64)
    used = count > 0
    mean = np.bincount(index, weights=predicted, minlength=num_bins)[used] / count[used]
    outcome = np.bincount(index, weights=np.asarray(label, dtype=np.float64), minlength=num_bins)[used] / count[used]
    return mean, outcome, count[used]


def brier(predicted: ArrayLike, label: ArrayLike) -> float:
    """Mean squared difference of probability and outcome; NaN without samples."""
    predicted = np.asarray(predicted, dtype=np.float64)
    if predicted.size == 0:
        return float("nan")
    return float(np.square(predicted - np.asarray(label, dtype=np.float64)).mean())


def auc(score: ArrayLike, label: ArrayLike) -> float:
    """Chance that a random positive scores above a random negative (ties count half); NaN if a class is missing."""
    score = np.asarray(score, dtype=np.float64)
    positive = np.asarray(label).astype(bool)
    positives = int(positive.sum())
    negatives = positive.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0  # 1-based ranks, averaged over ties
    rank_sum = mean_rank[inverse][positive].sum()
    return float((rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives))


def ece_noise_draws(predicted: ArrayLike, num_bins: int = 20, *, draws: int = 200, seed: int = 0) -> Floats:
    """ECEs [draws] that these predictions [n] would show if they were exactly right: outcomes are drawn from them."""
    predicted = np.asarray(predicted, dtype=np.float64)
    random = np.random.default_rng(seed)
    index = _bins(predicted, num_bins)
    values = np.empty(draws)
    for draw in range(draws):
        gap = predicted - (random.random(predicted.size) < predicted)
        values[draw] = np.abs(np.bincount(index, weights=gap, minlength=num_bins)).sum() / predicted.size
    return values


def ece_noise_quantile(predicted: ArrayLike, num_bins: int = 20, *, level: float = 0.95, draws: int = 200,
                       seed: int = 0) -> float:
    """The ECE that exactly right predictions stay below in ``level`` of the cases on as many samples."""
    return float(np.quantile(ece_noise_draws(predicted, num_bins, draws=draws, seed=seed), level))


def ece_noise_floor(predicted: ArrayLike, num_bins: int = 20, *, draws: int = 200, seed: int = 0) -> float:
    """Mean ECE that these predictions would show on this many samples if they were exactly right.

    Outcomes are drawn from the predictions themselves, ``draws`` times: a finite sample never shows an ECE of 0, so
    this is the value to compare a measured ECE with. Samples are drawn independently; blocks of one conversation are
    not quite, so the true floor is a little higher. NaN without samples.
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    if predicted.size == 0:
        return float("nan")
    return float(ece_noise_draws(predicted, num_bins, draws=draws, seed=seed).mean())


def cell_gaps(predicted: ArrayLike, label: ArrayLike, group: NDArray[np.int64], num_groups: int,
              num_bins: int) -> Floats:
    """[num_groups, num_bins]: sum of prediction minus outcome; summed over groups, its absolute values make the ECE."""
    predicted = np.asarray(predicted, dtype=np.float64)
    gap = predicted - np.asarray(label, dtype=np.float64)
    cell = group * num_bins + _bins(predicted, num_bins)
    sums = np.bincount(cell, weights=gap, minlength=num_groups * num_bins).astype(np.float64)
    return sums.reshape(num_groups, num_bins)


def bootstrap_ece(predicted: ArrayLike, label: ArrayLike, groups: ArrayLike, num_bins: int = 20, *, draws: int = 200,
                  seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the ECE when whole ``groups`` (conversations) are drawn with replacement.

    Resampling adds noise of its own, so near the noise floor the interval lies above the estimate rather than around
    it. (NaN, NaN) without samples or draws.
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    if predicted.size == 0 or draws == 0:
        return float("nan"), float("nan")
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    num_groups = int(group.max()) + 1
    sums = cell_gaps(predicted, label, group, num_groups, num_bins)
    sizes = np.bincount(group, minlength=num_groups)
    random = np.random.default_rng(seed)
    weights = random.multinomial(num_groups, np.full(num_groups, 1.0 / num_groups), size=draws)
    values = np.abs(weights @ sums).sum(axis=1) / (weights @ sizes)
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
