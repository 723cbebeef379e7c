"""Points of Figs. 7 and 8: every drafter and way of decoding at every load."""

from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import numpy as np

from deepspec.config.schema import SchedulerConfig, SimulateConfig
from deepspec.simulation.engine import Limits, Outcome, simulate
from deepspec.simulation.policies import Policy
from deepspec.simulation.subjects import Subject
from deepspec.simulation.workload import Workload, draw


@dataclass(frozen=True)
class Point:
    """One drafter under one load. Rates in tokens per second."""

    drafter: str
    policy: str
    length: Optional[int]  # draft tokens of a fixed length, else None
    concurrency: Optional[int]  # users of a closed loop
    arrival_rate: Optional[float]  # requests per second of an open one
    tokens_per_second: float  # of the engine, without the drain at the end
    tokens_per_second_per_user: float  # generated tokens over time in service, pooled over requests
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


def _point(subject: Subject, policy: Policy, load: Workload, outcome: Outcome) -> Point:
    done = [row for row in outcome.finished if row.finished is not None and row.admitted is not None]
    service = [row.finished - row.admitted for row in done]  # type: ignore[operator]
    rates = [row.generated / seconds for row, seconds in zip(done, service) if seconds > 0]
    rounds = max(outcome.rounds, 1)
    return Point(
        drafter=subject.name if not policy.alone else "", policy=policy.name,
        length=policy.length if policy.scheduler is None and not policy.alone else None,
        concurrency=load.concurrency if load.rate is None else None, arrival_rate=load.rate,
        tokens_per_second=outcome.loaded_tokens_per_second,
        tokens_per_second_per_user=sum(row.generated for row in done) / sum(service),
        slowest_tenth=float(np.percentile(rates, 10)), verify_budget=1.0 + outcome.verified / rounds,
        acceptance_length=1.0 + outcome.accepted / rounds, rounds_that_drafted=outcome.draft_steps / outcome.steps,
        mean_batch=outcome.rows / outcome.steps,
        wait_seconds=_mean([row.admitted - row.arrival for row in done]) if load.rate else 0.0,  # type: ignore
        first_token_seconds=_mean([row.first_token - (row.arrival if load.rate else row.admitted)  # type: ignore
                                   for row in done]),
        draft_share=outcome.draft_seconds / outcome.seconds,
        extrapolated=outcome.largest_batch > subject.costs.largest_requests)


def _shared(config: SimulateConfig) -> dict[str, Any]:
    return {"domain_mix": dict(config.domain_mix), "answer_tokens": config.answer_tokens,
            "prompt_tokens": config.prompt_tokens}


def closed_loop(config: SimulateConfig, users: int) -> Workload:
    """``users`` with one request in flight each, at least three requests for everyone."""
    return Workload(max(config.requests, 3 * users), users, **_shared(config))


def loads_of(config: SimulateConfig) -> list[Workload]:
    """Closed loops by concurrency, then open ones by rate."""
    return [closed_loop(config, users) for users in sorted(set(config.concurrency))] + [
        Workload(config.requests, config.max_concurrent, rate, **_shared(config))
        for rate in sorted(set(config.arrival_rates))]


def run_point(subject: Subject, policy: Policy, load: Workload, config: SimulateConfig, seed: int) -> Point:
    """Simulate one point. Equal seeds give equal requests, so that policies are compared on the same stream."""
    limits = Limits(min(load.concurrency, config.max_concurrent), config.kv_tokens, config.prefill_tokens)
    requests = draw(subject.traces, load, np.random.default_rng(seed))
    return _point(subject, policy, load, simulate(subject.traces, subject.costs, policy, limits, requests))


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
