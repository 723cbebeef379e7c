"""Task scores of the target alone and of speculative decoding on the same prompts: are they the same within noise?

P prompts (conversations); an answer solves its task or does not.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

from scipy import stats

from deepspec.decoding.types import DecodeResult
from deepspec.evaluation.benchmarks import Conversation
from deepspec.evaluation.scoring import solves

Solved = Mapping[str, bool]  # by conversation
_LEVEL = 0.95


@dataclass(frozen=True)
class PairedScore:
    """Speculative decoding minus the target alone, on the same prompts."""

    difference: float
    ci95: tuple[float, float]
    p_value: float  # two-sided, exact, of no difference (McNemar: signs of the prompts where the two differ)
    gained: int  # prompts that only speculative decoding solved
    lost: int  # prompts that only the target alone solved
    prompts: int

    @property
    def within_noise(self) -> bool:
        """Whether the interval holds no difference."""
        return self.ci95[0] <= 0.0 <= self.ci95[1]


def solved(conversations: Sequence[Conversation], results: Sequence[DecodeResult], text: Callable[[Sequence[int]], str],
           *, run_code: bool) -> dict[str, bool]:
    """Which conversations with a task were solved, by the last answer of each in ``results``; ``text`` decodes tokens.

    Code is run only with ``run_code``; without it, tasks that are code are left out. So is a conversation whose last
    turn was not answered.
    """
    answers = {item.id: item.token_ids for item in results}
    found = {}
    for item in conversations:
        answer = answers.get(f"{item.id}#{item.turns - 1}")
        if item.task is not None and answer is not None and (run_code or not item.task.is_code):
            found[item.id] = solves(item.task, text(answer))
    return found


def score_interval(solved: int, prompts: int) -> Optional[list[float]]:
    """95 % interval of a share by Wilson's formula, which is right for shares near 0 and 1, too; None of nothing."""
    if not prompts:
        return None
    found = stats.binomtest(solved, prompts).proportion_ci(_LEVEL, method="wilson")
    return [float(found.low), float(found.high)]


def paired_score(speculative: Solved, alone: Solved) -> Optional[PairedScore]:
    """Difference of the shares solved on the prompts both have; None without one.

    The interval is Agresti and Min's for matched pairs (half a prompt added to each of the four outcomes), which does
    not shrink to a point where no prompt differs.
    """
    shared = sorted(speculative.keys() & alone.keys())
    if not shared:
        return None
    gained = sum(speculative[name] and not alone[name] for name in shared)
    lost = sum(alone[name] and not speculative[name] for name in shared)
    total = len(shared) + 2.0
    middle = (gained - lost) / total
    spread = (((gained + lost + 1.0) - (gained - lost) ** 2 / total) ** 0.5) / total
    reach = float(stats.norm.ppf(0.5 + _LEVEL / 2)) * spread
    differing = gained + lost
    p_value = float(stats.binomtest(gained, differing).pvalue) if differing else 1.0
    return PairedScore((gained - lost) / len(shared), (max(-1.0, middle - reach), min(1.0, middle + reach)), p_value,
                       gained, lost, len(shared))


def task_score(solved: Solved, alone: Optional[Solved]) -> Optional[dict[str, Any]]:
    """Entry of evaluation.json: the score with its interval, and against the target alone where that was scored; None
    where no prompt has a task."""
    if not solved:
        return None
    hits = sum(solved.values())
    found: dict[str, Any] = {"score": hits / len(solved), "score_ci95": score_interval(hits, len(solved)),
                             "solved": hits, "prompts": len(solved)}
    pair = None if alone is None or alone is solved else paired_score(solved, alone)
    if pair is not None and alone is not None:
        found |= {"target_only_score": sum(alone[name] for name in solved if name in alone) / pair.prompts,
                  "difference": pair.difference, "difference_ci95": list(pair.ci95), "p_value": pair.p_value,
                  "gained": pair.gained, "lost": pair.lost, "within_noise": pair.within_noise}
    return found
