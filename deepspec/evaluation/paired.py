"""Two drafters on the same prompts: what makes a prompt easy for both cancels. P prompts (conversations)."""

from dataclasses import dataclass
from typing import Optional

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from deepspec.evaluation.bootstrap import resample_weights
from deepspec.evaluation.metrics import AcceptanceCounts

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """A minus B on the same prompts."""

    effect: float  # difference of pooled acceptance lengths, tokens per round
    ratio: float  # A / B
    interval: tuple[float, float]  # 95 % of the difference, bootstrap over prompts
    ratio_interval: tuple[float, float]  # 95 % of the ratio, the same draws
    p_value: float  # two-sided, of no difference: signs of the prompts' shares flipped
    standardised: Optional[float]  # mean of the prompts' shares / their standard deviation; None where all are alike
    prompts: int


def _sums(counts: AcceptanceCounts) -> tuple[Floats, Floats]:
    return (counts.accepted + counts.bonus).astype(np.float64), counts.rounds.astype(np.float64)


def shares(first: AcceptanceCounts, second: AcceptanceCounts) -> Floats:
    """Each prompt's share [P] of the difference of pooled acceptance lengths; they sum to it.

    With t the acceptance length of both drafters together, a prompt with n tokens in r rounds of a drafter that has R
    rounds in all moves that drafter's length by (n - t r) / R. Without a difference the two moves of a prompt could
    change places, so the sign of a share means nothing.
    """
    (top_a, bottom_a), (top_b, bottom_b) = _sums(first), _sums(second)
    common = (top_a.sum() + top_b.sum()) / (bottom_a.sum() + bottom_b.sum())
    return (top_a - common * bottom_a) / bottom_a.sum() - (top_b - common * bottom_b) / bottom_b.sum()


def sign_flip_p_value(values: Floats, resamples: int, seed: int) -> float:
    """Two-sided p-value of a mean of 0 when signs are exchangeable: all 2^P sign patterns, or ``resamples`` of them."""
    if not np.abs(values).max() > 0:
        return 1.0
    test = stats.permutation_test((values,), np.mean, permutation_type="samples", vectorized=True,
                                  n_resamples=max(1, resamples), rng=np.random.default_rng(seed))
    return float(test.pvalue)


def compare(first: AcceptanceCounts, second: AcceptanceCounts, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Paired comparison of two drafters whose counts are of the same prompts in the same order.

    Both are resampled with the same draws of whole prompts. Raises ValueError for different prompts, fewer than two,
    or a drafter without rounds.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} prompts: a paired comparison needs the same two or more")
    if len(first.prompts) and len(second.prompts) and first.prompts.tolist() != second.prompts.tolist():
        raise ValueError("a paired comparison needs the same prompts in the same order")
    (top_a, bottom_a), (top_b, bottom_b) = _sums(first), _sums(second)
    if not (bottom_a.sum() > 0 and bottom_b.sum() > 0):
        raise ValueError("a paired comparison needs rounds of both drafters")
    weights = resample_weights(len(first), resamples, seed)
    below = weights @ bottom_a, weights @ bottom_b
    used = (below[0] > 0) & (below[1] > 0)
    lengths = [(weights @ top)[used] / part[used] for top, part in zip((top_a, top_b), below)]
    low, high = np.percentile(lengths[0] - lengths[1], (2.5, 97.5))
    least, most = np.percentile(lengths[0] / lengths[1], (2.5, 97.5))
    values = [top_a.sum() / bottom_a.sum(), top_b.sum() / bottom_b.sum()]
    own = shares(first, second)
    spread = float(own.std(ddof=1))
    return Comparison(
        effect=float(values[0] - values[1]), ratio=float(values[0] / values[1]), interval=(float(low), float(high)),
        ratio_interval=(float(least), float(most)), p_value=sign_flip_p_value(own, resamples, seed),
        standardised=float(own.mean()) / spread if spread > 0 else None, prompts=len(first))
