"""Points of Figs. 7 and 8: every drafter and way of decoding at every load."""

from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import numpy as np

from deepspec.config.schema import SchedulerConfig, SimulateConfig
from deepspec.errors import InputRefused
from deepspec.simulation.engine import Limits, Outcome, simulate
from deepspec.simulation.policies import Policy
from deepspec.simulation.subjects import Subject
from deepspec.simulation.workload import Workload, draw

_REACH = 64  # times the largest profiled number of requests that a closed loop may have in flight


@dataclass(frozen=True)
class Point:
    """One drafter under one load. Rates in tokens per second."""

    drafter: str
    policy: str
    length: Optional[int]  # draft tokens of a fixed length, else None
    concurrency: Optional[int]  # users of a closed loop
    arrival_rate: Optional[float]  # requests per second of an open one
    tokens_per_second: float  # of the engine, without the drain at the end
    # generated tokens over time in service, pooled over requests; in a closed loop of more users than the engine holds
    # requests, over the time until a user's next turn
    tokens_per_second_per_user: float
    slowest_tenth: float  # the same for the request at the 10th percentile
    verify_budget: float  # tokens of a request in a step, its anchor included: mean over rounds
    acceptance_length: float  # tokens of a request from a round
    rounds_that_drafted: float  # share
    mean_batch: float  # requests in flight, mean over steps
    wait_seconds: float  # between arrival and service, mean
    first_token_seconds: float  # between arrival and the first token, mean
    draft_share: float  # of the time
    extrapolated: bool  # more requests in flight than the profile has measured


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _point(subject: Subject, policy: Policy, load: Workload, outcome: Outcome, slots: int) -> Point:
    done = [row for row in outcome.finished if row.finished is not None and row.admitted is not None]
    service = [row.finished - row.admitted for row in done]  # type: ignore[operator]
    rates = [row.generated / seconds for row, seconds in zip(done, service) if seconds > 0]
    rounds = max(outcome.rounds, 1)
    # Users of a closed loop beyond the engine's slots take turns: each waits for as many services as stand before it.
    turns = max(load.concurrency / slots, 1.0) if load.rate is None else 1.0
    waits = [row.admitted - row.arrival for row in done] if load.rate else []  # type: ignore[operator]
    return Point(
        drafter=subject.name if not policy.alone else "", policy=policy.name,
        length=policy.length if policy.scheduler is None and not policy.alone else None,
        concurrency=load.concurrency if load.rate is None else None, arrival_rate=load.rate,
        tokens_per_second=outcome.loaded_tokens_per_second,
        tokens_per_second_per_user=sum(row.generated for row in done) / sum(service) / turns,
        slowest_tenth=float(np.percentile(rates, 10)) / turns, verify_budget=1.0 + outcome.verified / rounds,
        acceptance_length=1.0 + outcome.accepted / rounds, rounds_that_drafted=outcome.draft_steps / outcome.steps,
        mean_batch=outcome.rows / outcome.steps,
        wait_seconds=_mean(waits) if load.rate else (turns - 1.0) * _mean(service),
        first_token_seconds=_mean([row.first_token - (row.arrival if load.rate else row.admitted)  # type: ignore
                                   for row in done]),
        draft_share=outcome.draft_seconds / outcome.seconds,
        extrapolated=outcome.largest_batch > subject.costs.largest_requests)


def _shared(config: SimulateConfig) -> dict[str, Any]:
    return {"domain_mix": dict(config.domain_mix), "answer_tokens": config.answer_tokens,
            "prompt_tokens": config.prompt_tokens}


def closed_loop(config: SimulateConfig, users: int) -> Workload:
    """``users`` with one request in flight each, at least three requests for everyone who is served at a time."""
    return Workload(max(config.requests, 3 * min(users, config.max_concurrent)), users, **_shared(config))


def check_loads(config: SimulateConfig, profiled: int) -> None:
    """Raises InputRefused for closed loops whose requests at a time are far beyond the ``profiled`` ones."""
    reach = _REACH * profiled
    for users in config.concurrency:
        if min(users, config.max_concurrent) > reach:
            raise InputRefused(
                f"simulate.concurrency={users} with simulate.max_concurrent={config.max_concurrent} would run "
                f"{min(users, config.max_concurrent)} requests at a time, but the profile has measured {profiled} at "
                f"most; beyond {reach} its prices mean nothing. Profile larger profile.num_reqs, or lower "
                "simulate.max_concurrent to what the engine holds (the other users wait for their turn).")


def loads_of(config: SimulateConfig) -> list[Workload]:
    """Closed loops by concurrency, then open ones by rate."""
    return [closed_loop(config, users) for users in sorted(set(config.concurrency))] + [
        Workload(config.requests, config.max_concurrent, rate, **_shared(config))
        for rate in sorted(set(config.arrival_rates))]


def run_point(subject: Subject, policy: Policy, load: Workload, config: SimulateConfig, seed: int) -> Point:
    """Simulate one point. Equal seeds give equal requests, so that policies are compared on the same stream."""
    limits = Limits(min(load.concurrency, config.max_concurrent), config.kv_tokens, config.prefill_tokens)
    requests = draw(subject.traces, load, np.random.default_rng(seed))
    outcome = simulate(subject.traces, subject.costs, policy, limits, requests)
    return _point(subject, policy, load, outcome, limits.max_concurrent)


def sweep(subjects: Sequence[Subject], config: SimulateConfig, scheduler: SchedulerConfig, *, seed: int = 0,
          progress: Optional[Callable[[int], Any]] = None) -> list[Point]:
    """All points; plain decoding once, with the first drafter's traces and profile."""
    points = []
    for place, subject in enumerate(subjects):
        for mode in config.policies:
            if mode == "none" and place:
                continue
            for load in loads_of(config):
                points.append(run_point(subject, subject.policy(mode, scheduler), load, config, seed))
                if progress is not None:
                    progress(1)
    return points
