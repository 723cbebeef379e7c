"""When to draft and how much to verify, decided so that the output distribution stays the target's.

R requests, K draft tokens. Two decisions, both made before the tokens they affect exist:
whether a round drafts at all, from settled rounds only; and how many drafts each request sends to the target, from the
confidences of their own prefixes (Algorithm 1) or with a capacity from settled rounds (Sec. 5.2).
"""

from collections import deque
from typing import Optional, Sequence, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepspec.calibration import Calibration, sigmoid, survival_probability
from deepspec.decoding.cost import RoundCost
from deepspec.decoding.drift import CostDrift, Trials, trial_gap
from deepspec.scheduling import Floats, Ints, schedule_budget, schedule_prefixes

_HISTORY = 128  # blocks whose survival the next decision is made from
_DECAY = 0.98  # per block, of counts behind observed rates
_PRIOR = 4.0  # blocks that the starting guess counts for
_TRUST_DECAY = 0.996  # per block, of accepted against predicted tokens: noise of fewer than some 250 blocks decides
_TRUST_PRIOR = 64.0  # predicted tokens, all accepted, that the trust in predictions begins with
_SMOOTHING = 0.125  # least weight of a new verdict's predictions
_CLOSE = 1.5  # below this ratio of throughputs a profile is not believed without a look at the clock
_MAX_TRIAL_GAP = 4096  # rounds between two trials of the choice that is predicted to be worse
_VERDICT_ROUNDS = 8  # settled rounds a verdict on drafting holds for; asking costs as much as several schedules
_GROUPS = _VERDICT_ROUNDS  # of blocks, each scheduled like a round, that a verdict is made of: those since the last
_FEW_GROUPS = 16  # the same where drafting did not pay, so that blocks are few and old
_LAG = 2  # rounds between the confidences a capacity is made of and the round that uses it (Sec. 5.2)


class ThroughputScheduler:
    """Verification lengths by calibrated confidence and measured cost, with "no speculation" as one of the choices.

    A block without a confidence head is judged by observed conditional acceptance of settled rounds. State is a
    function of settled rounds, so two decodes with the same inputs decide alike; every decode starts with ``reset``.
    """

    def __init__(self, cost: RoundCost, draft_length: int, *,
                 temperatures: Union[None, Sequence[float], Calibration] = None,
                 policy: str = "early_stop", min_gain: float = 0.01, probe_share: float = 0.01,
                 max_verify: Optional[int] = None, floor: float = 0.0, drift: Optional[CostDrift] = None) -> None:
        """Options of a schedule.

        Args:
            cost: prices of rounds.
            draft_length: K.
            temperatures: of the confidence head, one per position; None leaves it as it is. A whole calibration brings
                its method, which may be another than temperatures.
            policy: early_stop (Algorithm 1) | lagged (Sec. 5.2).
            min_gain: predicted share of throughput below which it is not worth drafting.
            probe_share: share of the throughput that trying the choice predicted to be worse may cost at first; trials
                that change nothing become rarer.
            max_verify: most draft tokens of a request in one round; None: K.
            floor: tokens per second promised to every request; 0: none.
            drift: corrects the profile by the time that settled rounds took, here and in earlier decodes. Decisions
                then depend on the clock, so that two decodes may differ; the output distribution is the target's all
                the same. None: the profile is believed.
        """
        if policy not in ("early_stop", "lagged"):
            raise ValueError(f"policy={policy!r} must be early_stop or lagged")
        self.cost = cost
        self.draft_length = draft_length
        self._calibration = temperatures if isinstance(temperatures, Calibration) else None
        plain = [1.0] * draft_length if temperatures is None or isinstance(temperatures, Calibration) else temperatures
        self.temperatures = np.asarray(plain, dtype=np.float64)
        self.policy = policy
        self.min_gain = min_gain
        self.probe_share = probe_share
        self.max_verify = draft_length if max_verify is None else min(max_verify, draft_length)
        self.floor = floor if floor > 0 else None
        self.drift = drift
        self._prior: Optional[Floats] = None
        self._prices: dict[int, tuple[Floats, Floats, float]] = {}
        self.reset()

    def start_from(self, survival: Floats) -> "ThroughputScheduler":
        """Let every decode start from survivals [n, K] of earlier blocks, of the calibration set say.

        Without them the first rounds of every decode draft to find out, whatever it costs.
        """
        self._prior = np.asarray(survival, dtype=np.float64)[-_HISTORY:] if len(survival) else None
        self.reset()
        return self

    def reset(self) -> None:
        """Forget all settled rounds."""
        self._history: deque[Floats] = deque(() if self._prior is None else self._prior, maxlen=_HISTORY)
        self._earlier: deque[Floats] = deque(maxlen=_LAG)
        self._reached = np.full(self.draft_length, _PRIOR)
        self._guess = np.full(self.draft_length, 0.7)  # conditional acceptance before anything is observed
        if self._prior is not None:
            mean = self._prior.mean(axis=0)
            self._guess = mean / np.maximum(np.concatenate(([1.0], mean[:-1])), 1e-9)
        self._survived = self._guess * _PRIOR
        self._predicted = self._observed = _TRUST_PRIOR
        self.trial = False  # whether the round that drafts now only looks whether it would pay: a few requests will do
        self.blind = self.reread = self.trial_is_due = False  # see should_draft
        self._idle = 0  # rounds since a choice was last tried against the prediction
        self._settled = 0
        self._trials = Trials() if self.drift is None else self.drift.trials
        # By requests: settled rounds it was made of, tokens per second and seconds with drafting over those without,
        # and the verdicts averaged in it.
        self._verdicts: dict[int, tuple[int, float, float, int]] = {}

    def survival(self, confidence_logits: Optional[ArrayLike], requests: int) -> Floats:
        """a_{r,j} [R, K]: calibrated where there is a confidence head, else observed rates for every request."""
        if confidence_logits is None:
            return np.tile(survival_probability(self._survived / self._reached), (requests, 1))
        if self._calibration is not None:
            return survival_probability(self._calibration.apply(confidence_logits))
        return survival_probability(sigmoid(np.asarray(confidence_logits, dtype=np.float64) / self.temperatures))

    def _priced(self, requests: int) -> tuple[Floats, Floats, float]:
        """Rates of a drafting round and seconds of a plain one, for B = R .. R (1 + K), and seconds of drafting."""
        found = self._prices.get(requests)
        if found is None:
            seconds = np.asarray(self.cost.verify_curve(requests)(
                np.arange(requests, requests * (1 + self.draft_length) + 1)), dtype=np.float64)
            draft = self.cost.draft_seconds(requests)
            found = self._prices[requests] = (1.0 / (draft + seconds), seconds, draft)
        return found

    def expect(self, requests: int) -> None:
        """Decide before the first round whether requests are decoded blind at first, if so many are to come."""
        if self._history:
            pays, advantage, _ = self._verdict(requests)
            self.blind = self._is_settled(requests, pays, advantage)

    def should_draft(self, requests: int, seen: Optional[int] = None) -> bool:
        """Whether this round drafts: if settled blocks say that it pays at this load, or to find out again.

        With ``drift`` plain rounds are tried as well where drafting pays, since only their measured time can tell.
        ``seen`` of the requests can draft (None: all). Afterwards ``blind`` says whether new requests need not be seen,
        ``reread`` whether some that are not should be, and ``trial_is_due`` whether that is for a trial.
        """
        seen = requests if seen is None else seen
        self.trial = self.blind = self.reread = self.trial_is_due = False
        if not self._history:
            return seen > 0
        pays, advantage, ratio = self._verdict(requests)
        self.reread = pays and seen < requests
        if pays and self.drift is None:
            return seen > 0
        self._idle += 1
        if self.drift is not None and advantage < _CLOSE and self._idle > 1 and self.drift.lacks(requests, not pays):
            self._idle = 0  # a close call: a few rounds of the other kind, every second one, before it is trusted
            return not pays and seen > 0
        gap = trial_gap(advantage, 1.0 / ratio if pays else ratio, self.probe_share, _MAX_TRIAL_GAP,
                        self._trials.failed(requests, pays))
        if self._idle < gap:
            self.blind = self._is_settled(requests, pays, advantage)
            return pays and seen > 0
        if not pays and not seen:  # the next request to come will do; if none comes, one is read again
            self.trial_is_due = True
            self.reread = self._idle >= 2 * gap
            return False
        self._idle = 0
        self._trials.count(requests, pays)
        self.trial = not pays
        self.blind = self.trial and self._is_settled(requests, pays, advantage)
        return not pays

    def _is_settled(self, requests: int, pays: bool, advantage: float) -> bool:
        """Whether plain decoding is so sure to be better that requests need not be seen by the drafter."""
        return not pays and (advantage >= _CLOSE or self._trials.failed(requests, pays) > 0)

    def _verdict(self, requests: int) -> tuple[bool, float, float]:
        """Whether drafting pays, throughput of the better choice over that of the other, seconds of a drafting round
        over those of a plain one."""
        made, gain, ratio, count = self._verdicts.get(requests, (-_VERDICT_ROUNDS, 1.0, 1.0, 0))
        factor = 1.0 if self.drift is None else self.drift.drafting(requests)
        if self._settled - made >= _VERDICT_ROUNDS or made < min(_VERDICT_ROUNDS, self._settled):
            # While drafting pays rounds settle one after the other, and verdicts are averaged; while it does not only
            # trials settle, and waiting for an average would take thousands of rounds.
            count = count + 1 if gain > factor * (1.0 + self.min_gain) else 1
            groups = _GROUPS if count > 1 else _FEW_GROUPS if requests in self._verdicts else _HISTORY
            new, weight = self._gain(requests, groups), max(_SMOOTHING, 1.0 / count)
            gain, ratio = gain + weight * (new[0] - gain), ratio + weight * (new[1] - ratio)
            self._verdicts[requests] = (self._settled, gain, ratio, count)
        gain, ratio = gain / factor, ratio * factor
        pays = gain > 1.0 + self.min_gain
        return pays, gain if pays else 1.0 / max(gain, 1e-9), ratio

    def worth_reading(self, context: int, left: int, requests: int) -> bool:
        """Whether a request with ``left`` tokens to come wins more by drafting than reading its context again costs."""
        pays, gain, _ = self._verdict(requests)
        seconds = self._priced(requests)[1]
        token = (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        return pays and (1.0 - 1.0 / gain) * left * seconds[0] / requests > context * token

    def _gain(self, requests: int, most: int) -> tuple[float, float]:
        """Predicted tokens per second with drafting, lengths chosen as they would be, over those of plain decoding, and
        the same for the seconds of a round; of the latest blocks, scheduled in at most ``most`` groups."""
        blocks = np.stack(self._history)
        groups = max(1, min(most, len(blocks) // requests))
        take = np.arange(groups * requests) % len(blocks)
        trust = self._observed / self._predicted  # how many accepted tokens each predicted one turned out to be
        rates, plain, _ = self._priced(requests)
        caps = self._caps(np.full(requests, self.draft_length))
        tokens = seconds = 0.0
        for group in blocks[len(blocks) - 1 - take].reshape(groups, requests, -1):
            choice = schedule_prefixes(group, lambda size: rates[size - requests], caps=caps, floors=self.floor)
            tokens += requests + trust * (choice.acceptance_length - requests)
            seconds += 1.0 / float(rates[choice.batch_tokens - requests])
        ratio = seconds / groups / float(plain[0])
        return tokens / groups / requests / ratio, ratio

    def observe_seconds(self, requests: int, batch_tokens: int, drafted: bool, seconds: float) -> None:
        """Learn what a round really took that fed no prompt; without ``drift`` nothing is learnt from clocks."""
        if self.drift is not None and requests and not (drafted and self.trial):
            rates, plain, _ = self._priced(requests)
            place = min(batch_tokens - requests, len(rates) - 1)
            self.drift.observe(requests, drafted, seconds, 1.0 / float(rates[place]) if drafted else float(plain[0]))

    def _caps(self, caps: Ints) -> Optional[Ints]:
        """Longest prefixes, None where nothing is cut."""
        caps = np.minimum(caps, self.max_verify)
        return caps if len(caps) and int(caps.min()) < self.draft_length else None

    def lengths(self, survival: Floats, caps: Ints) -> Ints:
        """Draft tokens to verify per request [R] for current survivals [R, K] and longest useful prefixes [R]."""
        requests = len(survival)
        rates = self._priced(requests)[0]

        def steps_per_second(batch_tokens: NDArray[np.int64]) -> Floats:
            return rates[batch_tokens - requests]

        useful = self._caps(caps)
        if self.policy == "lagged":
            lagged = self._earlier[0] if len(self._earlier) == _LAG else None
            return schedule_budget(survival, lagged, steps_per_second, caps=useful, floors=self.floor,
                                   min_gain=self.min_gain).lengths
        return schedule_prefixes(survival, steps_per_second, caps=useful, floors=self.floor).lengths

    def observe(self, survival: Floats, known: Ints, accepted: Ints) -> None:
        """Learn from a settled round: survivals [R, K] that scheduled it, judged and accepted positions [R]."""
        self._history.extend(survival)
        self._earlier.append(survival)
        self._settled += 1
        position = np.arange(self.draft_length)
        judged = position < known[:, None]
        decay = _DECAY ** len(survival)
        trusted = _TRUST_DECAY ** len(survival)
        self._predicted = trusted * self._predicted + float(survival[judged].sum())
        self._observed = trusted * self._observed + float(accepted.sum())
        reached = judged & (position <= accepted[:, None])
        self._reached = decay * self._reached + reached.sum(axis=0) + (1 - decay) * _PRIOR
        survived = (position < accepted[:, None]).sum(axis=0)
        self._survived = decay * self._survived + survived + (1 - decay) * self._guess * _PRIOR
