"""Acceptance computed instead of tossed: what one round is expected to accept, given what was read or drafted.

N anchors, K draft positions, V vocabulary; p is the target's distribution, q the drafter's, both as decoding samples
from them. A round at an anchor accepts drafted tokens x_1, x_2, .. each with probability min(1, p/q)(x_k) (Sec. 2.1).
Given the prefix before it, position k is therefore accepted with probability

    sum_v q(v) min(1, p(v)/q(v)) = sum_v min(p, q)(v) = 1 - |p - q|_1 / 2 = a_k    (Eq. 8),

and the expected number of accepted tokens is E[sum_k R_k a_k], where R_k says how far the prefix x_<k carries. Three
ways of getting at R_k, one ``AnchorValues`` each:

``drafted``: x is drafted by the drafter, x_k ~ q_k(. | x_<k), and the target reads it. A drafted prefix survives with
    probability R_k = prod_{j<k} min(1, p_j/q_j)(x_j), so E_x[sum_k R_k a_k] is the expectation of one round from this
    anchor, whatever text is before it. (The product of the a_j along drafts is not: it lets improbable drafts, which
    the target would have thrown out, lead on to the next position with full weight.)

``answers``: x is the target's own answer y, drawn from p. A round at an anchor of y either accepts y_1 .. y_n and goes
    on in y, or parts from its draft where y does; the probability of accepting y_j, given that the answer goes on with
    y_j, is min(p, q)(y_j) / p(y_j) = min(1, q_j/p_j)(y_j). R_k is the product of these, and E_y[sum_k R_k a_k] is the
    expectation of one round. The same probabilities say at which token of y the next round begins, so all rounds of
    the answer are known in expectation: see answers.py. This is what sampled decoding estimates.

``teacher_forced``: the product R_k = prod_{j<k} a_j along whatever text there is, as in training. Biased (the text is
    not drawn from min(p, q)), cheap (no target forward where hidden states are stored), good for comparisons.

A drafted end-of-turn token that is accepted ends the answer: its round has no bonus token.
"""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspec.decoding.verification import analytic_acceptance
from deepspec.evaluation.metrics import AcceptanceCounts, conversation_of
from deepspec.targets.sampling import Sampling, target_probs

Floats = NDArray[np.float64]
_BYTES = 1 << 28  # of one group of rows; some copies come on top


@dataclass(frozen=True)
class AnchorValues:
    """One expected round per anchor. ``weight`` is how many rounds begin there: 1 where anchors are drawn evenly."""

    sample: NDArray[np.str_]  # [N] id of the text
    domain: NDArray[np.str_]  # [N]
    position: NDArray[np.int64]  # [N] of the anchor in its text
    weight: Floats  # [N]
    reach: Floats  # [N, K] probability that the position is judged, R_k; 0 behind the end of the text
    rate: Floats  # [N, K] a_k (Eq. 8)
    stop: Floats  # [N, K] probability that the position is accepted with an end-of-turn token

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def lengths(self) -> Floats:
        """[N] expected tokens of the round, bonus token included."""
        return 1.0 + (self.reach * (self.rate - self.stop)).sum(axis=1)

    def counts(self) -> AcceptanceCounts:
        """Expected counts per conversation, in the order of their names: what ``AcceptanceCounts.of`` counts."""
        names, place = np.unique([conversation_of(name) for name in self.sample.tolist()], return_inverse=True)
        accepted = self.reach * self.rate

        def summed(values: Floats) -> Floats:
            total = np.zeros((len(names), *values.shape[1:]))
            np.add.at(total, place, values)
            return total

        rounds = summed(self.weight)
        drafted = rounds * self.rate.shape[1]
        return AcceptanceCounts(
            rounds, drafted, drafted, summed(self.weight * accepted.sum(axis=1)),
            summed(self.weight * (1.0 - (self.reach * self.stop).sum(axis=1))),
            summed(self.weight[:, None] * self.reach), summed(self.weight[:, None] * accepted),
            summed(self.weight * self.lengths), names.astype(np.str_))

    def select(self, rows: NDArray[Any]) -> "AnchorValues":
        """The anchors named by a mask or indices [N]."""
        return AnchorValues(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    @classmethod
    def concatenate(cls, parts: Sequence["AnchorValues"]) -> "AnchorValues":
        """All anchors of ``parts`` (at least one)."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts])
                      for name in cls.__dataclass_fields__})

    @classmethod
    def none(cls, length: int) -> "AnchorValues":
        """No anchor; ``length`` is K."""
        text, flat, wide = np.zeros(0, dtype=np.str_), np.zeros(0), np.zeros((0, length))
        return cls(text, text, np.zeros(0, dtype=np.int64), flat, wide, wide, wide)


@dataclass(frozen=True)
class Judged:
    """What the two distributions say at n places."""

    rate: Tensor  # [n] Eq. 8
    draft_at: Tensor  # [n] q of the token
    target_at: Tensor  # [n] p of the token
    stop: Tensor  # [n] sum of min(p, q) over the end-of-turn tokens


def judge(draft: Tensor, target: Tensor, ids: Tensor, stop_ids: Sequence[int]) -> Judged:
    """Compare distributions ``draft`` and ``target`` [n, V] float32, at tokens ``ids`` [n]."""
    ends = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=draft.device)
    return Judged(
        rate=analytic_acceptance(target, draft),
        draft_at=draft.gather(1, ids[:, None])[:, 0], target_at=target.gather(1, ids[:, None])[:, 0],
        stop=torch.minimum(draft[:, ends], target[:, ends]).sum(dim=-1),
    )


def survival(numerator: Tensor, denominator: Tensor) -> Tensor:
    """min(1, a/b), 0 where both are 0; where b alone has been rounded to 0 the ratio is 1."""
    largest = torch.maximum(numerator, denominator)
    return torch.where(largest > 0, numerator.double() / largest.double().clamp(min=1e-300), 0.0)


def before(kept: Tensor) -> Tensor:
    """R_k = prod_{j<k} kept_j: [N, K] to [N, K], 1 at the first position."""
    shifted = torch.ones_like(kept)
    shifted[:, 1:] = kept[:, :-1].cumprod(dim=1)
    return shifted


def draft_probs(logits: Tensor, sampling: Sampling, tokenizer_size: int) -> Tensor:
    """q [n, V] of draft logits [n, V] as decoding draws from it: rows of the embedding without a token get nothing."""
    if tokenizer_size < logits.shape[-1]:
        logits = logits.clone()
        logits[:, tokenizer_size:] = float("-inf")
    return target_probs(logits, sampling)


def rows_at_once(vocabulary: int) -> int:
    """Distributions that are held at the same time."""
    return max(1, _BYTES // (4 * vocabulary))


def anchor_values(samples: Sequence[str], domains: Sequence[str], positions: Tensor, *, reach: Tensor, rate: Tensor,
                  stop: Tensor, weight: Optional[Floats] = None) -> AnchorValues:
    """``AnchorValues`` of tensors [N, K]; ``samples`` and ``domains`` are those of each anchor."""
    found = positions.cpu().numpy().astype(np.int64)
    arrays = [values.double().cpu().numpy() for values in (reach, rate, stop)]
    return AnchorValues(np.array(samples, dtype=np.str_), np.array(domains, dtype=np.str_), found,
                        np.ones(len(found)) if weight is None else weight, *arrays)
