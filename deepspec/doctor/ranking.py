"""Which hypothesis the engine's counts speak for. K draft positions, P prompts.

Of every hypothesis the replay says what each prompt's counts would be. At temperature 0 in equal arithmetic they are
the engine's exactly; where its kernels round differently they are close. The likelihood of a prompt therefore mixes
"equal" with a beta-binomial per position, whose rate comes from the replay over all prompts; the share of equal
prompts is unknown and averaged over a grid. An "unknown" hypothesis with free rates takes what no other explains.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np

from deepspec.doctor.counts import Counts, PromptCounts

UNKNOWN = "unknown"
_gammaln = np.vectorize(math.lgamma, otypes=[np.float64])
_SURPRISE = 0.1  # of a trial being unlike its prediction under the right hypothesis: rounding, chance
_EXACT_SHARES = (0.0, 0.1, 0.5, 0.9, 0.99)  # of prompts whose counts are reproduced exactly


@dataclass(frozen=True)
class Ranked:
    """One hypothesis with its probability. ``twins``: places of others that predict the very same counts."""

    place: int  # in the list that was ranked; -1: unknown
    cause: str
    probability: float
    exact: int  # prompts whose counts it reproduces exactly
    twins: tuple[int, ...] = ()


def _betaln(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return _gammaln(first) + _gammaln(second) - _gammaln(first + second)


def _logsumexp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values)) if math.isfinite(top) else top


def _reached(counts: PromptCounts, width: int) -> np.ndarray[Any, Any]:
    """[K, 2] rounds that came to each position, and those of them that accepted it."""
    accepted = list(counts.accepted or ())[:width]
    accepted += [0] * (width - len(accepted))
    return np.array(list(zip([counts.rounds, *accepted[:-1]], accepted)), dtype=np.float64)


def _beta_binomial(seen: np.ndarray[Any, Any], first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> float:
    """Log probability of the accepted counts given those that came; rates from Beta(first, second) per position."""
    came, kept = seen[:, 0], seen[:, 1]
    ways = _gammaln(came + 1) - _gammaln(kept + 1) - _gammaln(came - kept + 1)
    return float((ways + _betaln(kept + first, came - kept + second) - _betaln(first, second)).sum())


def _sums_only(counts: Counts, width: int) -> Counts:
    """``counts`` without positions, for engines that report sums: one pseudo-position with all of a round's drafts."""
    return Counts(tuple(PromptCounts(item.drafted, item.drafted, item.total, (item.total,)) for item in counts.prompts))


def _prompt_likelihoods(served: Counts, predicted: Counts, width: int) -> tuple[np.ndarray[Any, Any], list[bool]]:
    """Log probability [P] of each prompt under the rates of ``predicted``, and whether it is reproduced exactly."""
    pooled = sum((_reached(item, width) for item in predicted.prompts), np.zeros((width, 2)))
    first, second = pooled[:, 1] + 0.5, pooled[:, 0] - pooled[:, 1] + 0.5
    noisy = np.array([_beta_binomial(_reached(item, width), first, second) for item in served.prompts])
    exact = [item.rounds == other.rounds and item.accepted == other.accepted
             for item, other in zip(served.prompts, predicted.prompts)]
    return noisy, exact


def _likelihood(noisy: np.ndarray[Any, Any], exact: Sequence[bool]) -> float:
    found = []
    for share in _EXACT_SHARES:
        equal = np.where(exact, share, 0.0)
        with np.errstate(divide="ignore"):
            found.append(float(np.logaddexp(np.log(equal), np.log1p(-share) + noisy).sum()))
    return _logsumexp(found) - math.log(len(found))


def _own_rates(served: Counts, predicted: Counts, width: int) -> np.ndarray[Any, Any]:
    """Log probability [P] of each prompt under the rates predicted for it alone, or else under any rates."""
    found = []
    for item, other in zip(served.prompts, predicted.prompts):
        seen, expected = _reached(item, width), _reached(other, width)
        own = _beta_binomial(seen, expected[:, 1] + 0.5, expected[:, 0] - expected[:, 1] + 0.5)
        found.append(np.logaddexp(math.log1p(-_SURPRISE) + own, math.log(_SURPRISE) + _any_rates(seen)))
    return np.array(found)


def _any_rates(seen: np.ndarray[Any, Any]) -> float:
    ones = np.ones(len(seen))
    return _beta_binomial(seen, ones, ones)


def _trial_scores(served: Counts, predictions: Sequence[Counts], width: int) -> tuple[list[float], list[int]]:
    """``_scores`` of answers that were chosen to differ: each has its own rates, also for the unknown one."""
    served, predictions, width = _comparable(served, predictions, width)
    scores, exacts = [], []
    for counts in predictions:
        _, exact = _prompt_likelihoods(served, counts, width)
        scores.append(_likelihood(_own_rates(served, counts, width), exact))
        exacts.append(sum(exact))
    return [*scores, sum(_any_rates(_reached(item, width)) for item in served.prompts)], exacts


def _comparable(served: Counts, predictions: Sequence[Counts], width: int) -> tuple[Counts, Sequence[Counts], int]:
    """All as they are, or as sums where the engine reports only these."""
    if all(item.accepted is not None for item in served.prompts):
        return served, predictions, width
    return _sums_only(served, width), [_sums_only(counts, width) for counts in predictions], 1


def _scores(served: Counts, predictions: Sequence[Counts], width: int) -> tuple[list[float], list[int]]:
    """Log likelihood of ``served`` under each of ``predictions`` and, last, with free rates; prompts reproduced."""
    served, predictions, width = _comparable(served, predictions, width)
    scores, exacts = [], []
    for counts in predictions:
        noisy, exact = _prompt_likelihoods(served, counts, width)
        scores.append(_likelihood(noisy, exact))
        exacts.append(sum(exact))
    total = sum((_reached(item, width) for item in served.prompts), np.zeros((width, 2)))
    pooled = _any_rates(total)
    ones = np.ones(width)
    # Free rates shared by all prompts: the pooled marginal, spread over the prompts as counts allow.
    spread = sum(_beta_binomial(_reached(item, width), ones * 1e9 * rate_of(total), ones * 1e9 * (1 - rate_of(total)))
                 for item in served.prompts)
    whole = _beta_binomial(total, ones * 1e9 * rate_of(total), ones * 1e9 * (1 - rate_of(total)))
    return [*scores, pooled + spread - whole], exacts


def rank(served: Counts, predictions: Sequence[tuple[str, Counts]], width: int,
         more: Optional[tuple[Counts, Sequence[Counts]]] = None) -> list[Ranked]:
    """Probabilities of ``predictions`` (cause and predicted counts), likeliest first, with the unknown one among them.

    Causes have equal priors; several hypotheses of one cause share its prior. ``more``: counts of trials with what each
    hypothesis predicts of them.
    """
    causes = [cause for cause, _ in predictions]
    found = [counts for _, counts in predictions]
    scores, exacts = _scores(served, found, width)
    seen: list[tuple[Counts, ...]] = [(counts,) for counts in found]
    if more is not None:
        others, also = _trial_scores(*more, width)
        scores = [one + other for one, other in zip(scores, others)]
        exacts = [one + other for one, other in zip(exacts, also)]
        seen = list(zip(found, more[1]))
    scores = [score - math.log(causes.count(cause)) for score, cause in zip(scores, causes)] + scores[-1:]
    weights = np.exp(np.array(scores) - _logsumexp(scores))
    same = [tuple(other for other in range(len(seen)) if other != place and seen[other] == seen[place])
            for place in range(len(seen))]
    ranked = [Ranked(place, causes[place], float(weights[place]), exacts[place], same[place])
              for place in range(len(seen))]
    ranked.append(Ranked(-1, UNKNOWN, float(weights[-1]), 0))
    return sorted(ranked, key=lambda item: -item.probability)


def rate_of(total: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Acceptance rate [K] of pooled counts, kept inside (0, 1)."""
    return (total[:, 1] + 0.5) / (total[:, 0] + 1.0)


def by_cause(ranked: Sequence[Ranked]) -> dict[str, float]:
    """Probability of each cause, likeliest first."""
    found: dict[str, float] = {}
    for item in ranked:
        found[item.cause] = found.get(item.cause, 0.0) + item.probability
    return dict(sorted(found.items(), key=lambda item: -item[1]))
