"""When to draft and how much to verify, decided so that the output distribution stays the target's.

R requests, K draft tokens. Two decisions, both made before the tokens they affect exist:
whether a round drafts at all, from settled rounds only; and how many drafts each request sends to the target, from the
confidences of their own prefixes (Algorithm 1).
"""

from collections import deque
from typing import Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration import sigmoid, survival_probability
from deepspec.decoding.cost import RoundCost
from deepspec.scheduling import Floats, Ints, schedule_budget, schedule_prefixes

_HISTORY = 128  # blocks whose survival the next decision is made from
_DECAY = 0.98  # per block, of counts behind observed rates
_PRIOR = 4.0  # blocks that the starting guess counts for
_MAX_PROBE_GAP = 256  # rounds; the gap doubles while probing does not pay


class ThroughputScheduler:
    """Verification lengths by calibrated confidence and measured cost, with "no speculation" as one of the choices.

    A block without a confidence head is judged by observed conditional acceptance of settled rounds. State is a
    function of settled rounds, so two decodes with the same inputs decide alike; every decode starts with ``reset``.
    """

    def __init__(self, cost: RoundCost, draft_length: int, *, temperatures: Optional[Sequence[float]] = None,
                 policy: str = "early_stop", min_gain: float = 0.01, probe_every: int = 16) -> None:
        """``policy``: early_stop (Algorithm 1) | lagged (Sec. 5.2). ``min_gain``: predicted share below which it is not
        worth drafting. ``probe_every``: rounds without drafting before one drafts again."""
        if policy not in ("early_stop", "lagged"):
            raise ValueError(f"policy={policy!r} must be early_stop or lagged")
        self.cost = cost
        self.draft_length = draft_length
        self.temperatures = np.asarray([1.0] * draft_length if temperatures is None else temperatures, dtype=np.float64)
        self.policy = policy
        self.min_gain = min_gain
        self.probe_every = probe_every
        self.reset()

    def reset(self) -> None:
        """Forget all settled rounds."""
        self._history: deque[Floats] = deque(maxlen=_HISTORY)
        self._lagged: Optional[Floats] = None
        self._reached = np.full(self.draft_length, _PRIOR)
        self._survived = np.full(self.draft_length, 0.7 * _PRIOR)
        self._predicted = self._observed = _PRIOR
        self._idle = 0
        self._gap = self.probe_every
        self._verdict: tuple[int, bool] = (-1, True)

    def survival(self, confidence_logits: Optional[ArrayLike], requests: int) -> Floats:
        """a_{r,j} [R, K]: calibrated where there is a confidence head, else observed rates for every request."""
        if confidence_logits is None:
            return np.tile(survival_probability(self._survived / self._reached), (requests, 1))
        return survival_probability(sigmoid(np.asarray(confidence_logits, dtype=np.float64) / self.temperatures))

    def should_draft(self, requests: int) -> bool:
        """Whether this round drafts: if settled blocks say that it pays at this load, or to find out again."""
        if not self._history:
            return True
        if self._verdict[0] != requests:
            self._verdict = (requests, self._pays(requests))
        if self._verdict[1]:
            self._idle, self._gap = 0, self.probe_every
            return True
        self._idle += 1
        if self._idle < self._gap:
            return False
        self._idle, self._gap = 0, min(2 * self._gap, _MAX_PROBE_GAP)
        return True

    def _pays(self, requests: int) -> bool:
        """Predicted tokens per second with drafting, lengths chosen as they would be, against plain decoding."""
        blocks = np.stack(self._history)
        groups = max(1, min(8, len(blocks) // requests))
        take = np.arange(groups * requests) % len(blocks)
        trust = self._observed / self._predicted  # how many accepted tokens each predicted one turned out to be
        curve = self.cost.verify_curve(requests)
        draft = self.cost.draft_seconds(requests)
        tokens = seconds = 0.0
        for group in blocks[len(blocks) - 1 - take].reshape(groups, requests, -1):
            choice = schedule_prefixes(group, lambda size: 1.0 / (draft + curve(size)))
            tokens += requests + trust * (choice.acceptance_length - requests)
            seconds += draft + float(curve(choice.batch_tokens))
        plain = requests / float(curve(requests))
        return tokens / seconds > (1.0 + self.min_gain) * plain

    def lengths(self, survival: Floats, caps: Ints) -> Ints:
        """Draft tokens to verify per request [R] for current survivals [R, K] and longest useful prefixes [R]."""
        requests = len(survival)
        curve, draft = self.cost.verify_curve(requests), self.cost.draft_seconds(requests)

        def steps_per_second(batch_tokens: ArrayLike) -> Floats:
            return 1.0 / (draft + curve(batch_tokens))

        if self.policy == "lagged":
            return schedule_budget(survival, self._lagged, steps_per_second, caps=caps, min_gain=self.min_gain).lengths
        return schedule_prefixes(survival, steps_per_second, caps=caps).lengths

    def observe(self, survival: Floats, known: Ints, accepted: Ints) -> None:
        """Learn from a settled round: survivals [R, K] that scheduled it, judged and accepted positions [R]."""
        self._history.extend(survival)
        self._lagged = survival
        position = np.arange(self.draft_length)
        judged = position < known[:, None]
        decay = _DECAY ** len(survival)
        self._predicted = decay * self._predicted + float(survival[judged].sum())
        self._observed = decay * self._observed + float(accepted.sum())
        reached = judged & (position <= accepted[:, None])
        self._reached = decay * self._reached + reached.sum(axis=0) + (1 - decay) * _PRIOR
        survived = (position < accepted[:, None]).sum(axis=0)
        self._survived = decay * self._survived + survived + (1 - decay) * 0.7 * _PRIOR
        self._verdict = (-1, True)
