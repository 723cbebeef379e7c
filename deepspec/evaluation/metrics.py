"""What acceptance means, in numbers that pool. P prompts, K draft tokens. Ratios travel as sums, divided once."""

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from deepspec.decoding.types import DecodeResult
from deepspec.errors import InputRefused

Counts = NDArray[Any]  # int64, or float64 for expectations

DEFINITIONS = (
    "acceptance_length = sum over rounds of (accepted draft tokens + bonus token) / rounds, pooled over all "
    "prompts and divided once. A round is one propose-and-verify step of one request. The bonus token (or the "
    "token that replaces the first rejected draft) counts. A round in which an accepted draft token ends the "
    "answer counts its draft tokens up to and including that token, and no bonus. The prefill, which yields the "
    "first token, is not a round. The last round of an answer that is cut at its token budget counts in full with "
    "fixed lengths. accepted_per_position[k]: rounds that accepted at least k+1 draft tokens. "
    "conditional_acceptance[k]: of the rounds that accepted the k tokens before and whose token k+1 was judged, "
    "the share that accepted it; positions after an accepted end of turn are not judged. drafted: draft tokens "
    "sent to the target. Intervals: 95 %, percentile bootstrap over prompts. tokens_per_second: generated tokens "
    "of a benchmark / wall seconds of its decoding, ranks side by side. draft_ms, verify_ms: per round of a whole "
    "batch. Domains pool their benchmarks, acceptance_length_macro is the mean over them; macro is the mean of "
    "benchmarks. acceptance_length_by_prompt: each prompt by itself, mean, quantiles. Settings of mode analytic hold "
    "expectations instead of counts: estimator analytic, of decoding along answers drawn from the target, with rounds "
    "beginning where decoding would begin them (it estimates what sampled settings count); drafted, of one round at "
    "each of some evenly drawn anchors of held-out responses, along drafts; teacher_forced, products of "
    "1 - |p_d - p_t|_1 / 2 along the responses, as in training. The last two exceed what decoding gets, whose rounds "
    "begin more often where text is hard to guess: for comparing drafters only. task_score: share of the prompts with "
    "a known solution that the answer reached, Wilson interval; difference: minus the target alone on the same prompts "
    "under the same conditions, interval for matched pairs (Agresti and Min), p exact on the prompts that differ; the "
    "macro's is pooled over all prompts. by_context_length, by_thinking: rounds of all benchmarks, told apart by the "
    "tokens before them (prompt and answer) and by whether their conversation reasons. draft_vocab_coverage: share of "
    "the generated tokens that a drafter with a reduced vocabulary can propose, a ceiling on acceptance."
)


def conversation_of(name: str) -> str:
    """Turns of one conversation (ids ``x#0``, ``x#1``) are one prompt, because they are not independent."""
    return name.rpartition("#")[0] or name


def _unnamed() -> NDArray[np.str_]:
    return np.zeros(0, dtype=np.str_)


@dataclass(frozen=True)
class AcceptanceCounts:
    """Sums per prompt, so that any pooling and any bootstrap is a sum over rows.

    Whole numbers where rounds were decoded, expectations (float64) where acceptance was computed (analytic.py).
    """

    rounds: Counts  # [P]
    proposed: Counts  # [P] tokens the drafter proposed
    drafted: Counts  # [P] of these, sent to the target
    accepted: Counts  # [P]
    bonus: Counts  # [P]
    reached: Counts  # [P, K] rounds that accepted everything before the position and judged it
    survived: Counts  # [P, K] rounds that accepted the position
    tokens: Counts  # [P] generated
    prompts: NDArray[np.str_] = field(default_factory=_unnamed)  # [P] ids, empty where nobody needs them

    def __len__(self) -> int:
        return len(self.rounds)

    @classmethod
    def of(cls, results: Sequence[DecodeResult], length: int) -> "AcceptanceCounts":
        """Count the rounds of finished answers; ``length`` is K. Prompts are conversations, ordered by their ids."""
        groups: dict[str, list[DecodeResult]] = {}
        for item in results:
            groups.setdefault(conversation_of(item.id), []).append(item)
        shape = (len(groups), length)
        sums = np.zeros((len(groups), 6), dtype=np.int64)
        reached, survived = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        position = np.arange(length)
        for row, name in enumerate(sorted(groups)):
            records = [record for item in groups[name] for record in item.rounds]
            values = np.array([(record.drafted, record.verified, record.accepted, record.bonus, record.known)
                               for record in records], dtype=np.int64).reshape(-1, 5)
            tokens = sum(len(item.token_ids) for item in groups[name])
            sums[row] = [len(records), *values[:, :4].sum(axis=0), tokens]
            accepted, known = values[:, 2:3], values[:, 4:5]
            survived[row] = (position < accepted).sum(axis=0)
            reached[row] = ((position <= accepted) & (position < known)).sum(axis=0)
        rounds, proposed, drafted, total, bonus, generated = sums.T
        return cls(rounds, proposed, drafted, total, bonus, reached, survived, generated,
                   np.array(sorted(groups), dtype=np.str_))

    def select(self, rows: NDArray[Any]) -> "AcceptanceCounts":
        """The prompts named by a mask or indices [P]."""
        return AcceptanceCounts(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__
                                   if name != "prompts" or len(self.prompts)})

    def positions(self, length: int) -> "AcceptanceCounts":
        """The same counts as of blocks of ``length`` draft tokens; positions beyond this drafter's are never judged."""
        missing = [(0, 0), (0, length - self.reached.shape[1])]
        return replace(self, reached=np.pad(self.reached, missing), survived=np.pad(self.survived, missing))

    @classmethod
    def concatenate(cls, parts: Iterable["AcceptanceCounts"]) -> "AcceptanceCounts":
        """All prompts of ``parts``."""
        parts = list(parts)
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts])
                      for name in cls.__dataclass_fields__})


def acceptance_length(counts: AcceptanceCounts) -> Optional[float]:
    """tau: tokens per round, bonus included, pooled (footnote 3); None without a round."""
    rounds = float(counts.rounds.sum())
    return float(counts.accepted.sum() + counts.bonus.sum()) / rounds if rounds else None


def acceptance_by_prompt(counts: AcceptanceCounts) -> Optional[dict[str, float]]:
    """Acceptance length of each prompt by itself: mean and quantiles over prompts that have rounds; None without."""
    used = counts.rounds > 0
    if not used.any():
        return None
    values = (counts.accepted[used] + counts.bonus[used]) / counts.rounds[used]
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"mean": float(values.mean()), "p10": float(low), "p50": float(middle), "p90": float(high)}


def conditional_acceptance(counts: AcceptanceCounts) -> list[Optional[float]]:
    """Acceptance of position k given that everything before it was accepted (Fig. 2) [K]; None where never judged."""
    reached, survived = counts.reached.sum(axis=0), counts.survived.sum(axis=0)
    return [float(hits / base) if base else None for hits, base in zip(survived, reached)]


def _plain(value: Any) -> float:
    """A count as JSON holds it: whole where it was counted, three decimals where it is an expectation."""
    return int(value) if float(value).is_integer() else round(float(value), 3)


def accepted_histogram(counts: AcceptanceCounts) -> list[float]:
    """Rounds that accepted exactly 0, 1, .. K draft tokens [K + 1]. Expectations may not fall along the positions in
    small samples, then the smaller count is 0."""
    at_least = np.concatenate(([counts.rounds.sum()], counts.survived.sum(axis=0), [0]))
    return [_plain(max(value, 0)) for value in at_least[:-1] - at_least[1:]]


def latency_per_token(draft_seconds: float, verify_seconds: float, tokens_per_round: float) -> float:
    """``L = (T_draft + T_verify) / tau`` (Eq. 1): seconds per token from seconds per round and tau (bonus included)."""
    return (draft_seconds + verify_seconds) / tokens_per_round


def summary(counts: AcceptanceCounts) -> dict[str, Any]:
    """Pooled numbers of some prompts; undefined ones are None."""
    return {
        "num_prompts": len(counts), "rounds": _plain(counts.rounds.sum()), "drafted": _plain(counts.drafted.sum()),
        "accepted": _plain(counts.accepted.sum()), "tokens": _plain(counts.tokens.sum()),
        "acceptance_length": acceptance_length(counts), "acceptance_length_by_prompt": acceptance_by_prompt(counts),
        "accepted_per_position": [_plain(value) for value in counts.survived.sum(axis=0)],
        "conditional_acceptance": conditional_acceptance(counts), "accepted_histogram": accepted_histogram(counts),
    }


def require_proposals(counts: AcceptanceCounts, where: str) -> None:
    """Raise InputRefused if the drafter was never run although there were rounds: its numbers would look like plain
    decoding and nobody would know why."""
    rounds = int(counts.rounds.sum())
    if rounds and not int(counts.proposed.sum()):
        raise InputRefused(f"{where}: {rounds} rounds and not one drafted token; the drafter does not take part. Check "
                           "that the checkpoint, the block size and the target belong together.")
