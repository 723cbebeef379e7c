"""Which hypothesis the engine's counts speak for. K draft positions, P prompts.

Of every hypothesis the replay says what each prompt's counts would be. At temperature 0 in equal arithmetic they are
the engine's exactly; where its kernels round differently they are close. The likelihood of a prompt therefore mixes
"equal" with a beta-binomial per position, whose rate comes from the replay over all prompts; the share of equal
prompts is unknown and averaged over a grid. An "unknown" hypothesis with free rates takes what no other explains.
"""

import math
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from deepspec.doctor.counts import Counts, PromptCounts

UNKNOWN = "unknown"
_gammaln = np.vectorize(math.lgamma, otypes=[np.float64])
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


def rank(served: Counts, predictions: Sequence[tuple[str, Counts]], width: int) -> list[Ranked]:
    """Probabilities of ``predictions`` (cause and predicted counts), likeliest first, with the unknown one among them.

    Causes have equal priors; several hypotheses of one cause share its prior.
    """
    if any(item.accepted is None for item in served.prompts):
        served = _sums_only(served, width)
        predictions = [(cause, _sums_only(counts, width)) for cause, counts in predictions]
        width = 1
    causes = [cause for cause, _ in predictions]
    scores, exacts = [], []
    for cause, counts in predictions:
        noisy, exact = _prompt_likelihoods(served, counts, width)
        scores.append(_likelihood(noisy, exact) - np.log(causes.count(cause)))
        exacts.append(sum(exact))
    ones = np.ones(width)
    total = sum((_reached(item, width) for item in served.prompts), np.zeros((width, 2)))
    pooled = _beta_binomial(total, ones, ones)
    # Free rates shared by all prompts: the pooled marginal, spread over the prompts as counts allow.
    spread = sum(_beta_binomial(_reached(item, width), ones * 1e9 * rate_of(total), ones * 1e9 * (1 - rate_of(total)))
                 for item in served.prompts)
    whole = _beta_binomial(total, ones * 1e9 * rate_of(total), ones * 1e9 * (1 - rate_of(total)))
    scores.append(pooled + spread - whole)
    weights = np.exp(np.array(scores) - _logsumexp(scores))
    same = {place: tuple(other for other in range(len(predictions)) if other != place
                         and predictions[other][1] == predictions[place][1]) for place in range(len(predictions))}
    ranked = [Ranked(place, causes[place], float(weights[place]), exacts[place], same[place])
              for place in range(len(predictions))]
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
