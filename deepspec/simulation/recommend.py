"""Which drafter, how many draft tokens and which way of decoding serve a load best, and why."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Optional, Sequence

from deepspec.config.schema import SchedulerConfig, SimulateConfig
from deepspec.decoding.modes import SCHEDULED
from deepspec.simulation.subjects import Subject
from deepspec.simulation.sweep import Point, closed_loop, run_point
from deepspec.simulation.workload import Workload

_WORTH = 0.02  # a gain below this share does not justify a longer block or a scheduler


@dataclass(frozen=True)
class Recommendation:
    """The choice for one load."""

    concurrency: int
    promised: float  # tokens per second per user; 0: nothing
    met: bool
    point: Point
    layers: Optional[int]
    settings: dict[str, Any]  # options to serve with
    reason: str


def _candidates(subject: Subject, load: Workload, config: SimulateConfig, scheduler: SchedulerConfig, seed: int,
                first: bool) -> list[tuple[Point, Subject, dict[str, Any]]]:
    """Plain decoding, every fixed length and the schedules, each with the options that make it so."""
    found = []

    def add(policy: Any, settings: dict[str, Any]) -> None:
        found.append((run_point(subject, policy, load, config, seed), subject, settings))

    if first:
        add(subject.policy("none", scheduler), {"mode": "none"})
    for length in range(1, subject.traces.draft_length + 1):
        add(subject.policy("fixed", scheduler, length), {"mode": "fixed", "num_speculative_tokens": length})
    for mode in SCHEDULED:
        settings = {"mode": mode, "num_speculative_tokens": subject.traces.draft_length,
                    "scheduler.min_gain": scheduler.min_gain}
        add(subject.policy(mode, scheduler), settings)
        if config.min_tokens_per_second_per_user > 0:
            promised = replace(scheduler, min_tokens_per_second_per_user=config.min_tokens_per_second_per_user)
            add(subject.policy(mode, promised), settings | {
                "scheduler.min_tokens_per_second_per_user": config.min_tokens_per_second_per_user})
    return found


def _name(point: Point) -> str:
    if point.policy == "none":
        return "no speculation"
    how = f"fixed length {point.length}" if point.length is not None else point.policy
    return f"{point.drafter}, {how}"


def _effort(point: Point) -> tuple[int, int]:
    """How much machinery a choice needs: what is simpler wins a near tie."""
    return (0 if point.policy == "none" else 1 if point.length is not None else 2, point.length or 0)


def _best(found: Sequence[tuple[Point, Subject, dict[str, Any]]]) -> tuple[Point, Subject, dict[str, Any]]:
    top = max(point.tokens_per_second for point, _, _ in found)
    near = [item for item in found if item[0].tokens_per_second >= (1.0 - _WORTH) * top]
    return min(near, key=lambda item: (_effort(item[0]), -item[0].tokens_per_second))


def _reason(point: Point, others: Sequence[Point], promised: float, met: bool, fastest: Point) -> str:
    parts = [f"{_name(point)} gives {point.tokens_per_second:.4g} tokens/s at {point.concurrency} users, "
             f"{point.tokens_per_second_per_user:.3g} per user"]
    plain = next((item for item in others if item.policy == "none"), None)
    if plain is not None and point.policy != "none":
        gain = point.tokens_per_second / plain.tokens_per_second - 1.0
        parts.append(f"{100 * abs(gain):.0f} % {'above' if gain >= 0 else 'below'} no speculation")
    rest = [item for item in others if _name(item) != _name(point)]
    if rest:
        second = max(rest, key=lambda item: item.tokens_per_second)
        parts.append(f"next is {_name(second)} with {second.tokens_per_second:.4g}"
                     + (f" (simpler choices win within {100 * _WORTH:.0f} %)"
                        if second.tokens_per_second > point.tokens_per_second else ""))
    if point.policy == "none":
        parts.append("no draft token earns the time it costs at this load")
    elif point.length is None:
        parts.append(f"it verifies {point.verify_budget:.2f} tokens per request and round and drafts in "
                     f"{100 * point.rounds_that_drafted:.0f} % of the rounds")
    if promised > 0 and met:
        parts.append(f"the promise of {promised:g} tokens/s per user is kept")
    elif promised > 0:
        parts.append(f"no choice keeps the promise of {promised:g} tokens/s per user at this load: this one comes "
                     f"nearest ({fastest.tokens_per_second_per_user:.3g}); serve fewer users per replica")
    if point.extrapolated:
        parts.append("more requests than the profile has measured: profile larger profile.num_reqs to be sure")
    return "; ".join(parts) + "."


def recommend(subjects: Sequence[Subject], config: SimulateConfig, scheduler: SchedulerConfig, *,
              seed: int = 0) -> list[Recommendation]:
    """One recommendation per ``simulate.concurrency``.

    Highest throughput among the choices that give every user ``simulate.min_tokens_per_second_per_user`` (pooled mean);
    within 2 % the simpler choice. If none keeps the promise, the choice that comes nearest.
    """
    result = []
    promised = config.min_tokens_per_second_per_user
    for users in sorted(set(config.concurrency)):
        load = closed_loop(config, users)
        found = [item for place, subject in enumerate(subjects)
                 for item in _candidates(subject, load, config, scheduler, seed, place == 0)]
        keeping = [item for item in found if item[0].tokens_per_second_per_user >= promised]
        fastest = max(found, key=lambda item: item[0].tokens_per_second_per_user)
        point, subject, settings = _best(keeping) if keeping else fastest
        reason = _reason(point, [item[0] for item in (keeping or found)], promised, bool(keeping), fastest[0])
        if point.policy != "none":
            settings = {"run": subject.name, "algorithm": subject.algorithm} | settings
        result.append(Recommendation(users, promised, bool(keeping), point,
                                     subject.layers if point.policy != "none" else None, settings, reason))
    return result


def as_json(found: Sequence[Recommendation]) -> list[dict[str, Any]]:
    """Content of simulation.json's ``recommendations``."""
    return [asdict(item) for item in found]
