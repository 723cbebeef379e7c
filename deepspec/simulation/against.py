"""The simulation beside what the evaluation of the same run measured: a check that costs nothing."""

from dataclasses import dataclass
from typing import Any, Iterable, Optional

import numpy as np

from deepspec.config.schema import SchedulerConfig
from deepspec.decoding.modes import MODES
from deepspec.simulation.engine import Limits, simulate
from deepspec.simulation.subjects import Subject
from deepspec.simulation.workload import Workload, draw

TOLERANCE = 0.15  # of measured tokens per second, within which a simulation counts as right
_SIMULATIONS = 4  # of each benchmark, with other draws; seconds are their mean
_HELD_OUT = "held_out"  # benchmarks of the conversations' kind that traces are of


@dataclass(frozen=True)
class Comparison:
    """One way of decoding at the evaluation's batch size, all held-out benchmarks together; tokens per second."""

    setting: str
    policy: str
    concurrency: int
    simulated: float
    measured: float
    error: float  # simulated over measured - 1

    @property
    def agrees(self) -> bool:
        """Whether the simulation is within the tolerance."""
        return abs(self.error) <= TOLERANCE

    def __str__(self) -> str:
        return (f"{self.policy} decoding of {self.concurrency} requests at a time: simulated {self.simulated:.4g} "
                f"tokens/s, the evaluation measured {self.measured:.4g} ({100 * self.error:+.0f} %)")


def against_evaluation(subject: Subject, report: dict[str, Any], scheduler: SchedulerConfig, *,
                       hardware: Optional[str], seed: int = 0) -> list[Comparison]:
    """Simulate what ``evaluation.json`` measured with this drafter, at the traces' sampling temperature.

    Empty where nothing can be compared: no decoded held-out benchmark of a recorded domain, another drafter or
    ``hardware``, or several ranks, which each had a part of the prompts.
    """
    if (report.get("drafter") != subject.traces.drafter_sha256 or report.get("hardware") != hardware
            or report.get("world_size", 1) != 1):
        return []
    longest, found = int(report["max_new_tokens"]), []
    for name, setting in report["settings"].items():
        mode = setting.get("decoding")
        if (mode not in MODES or setting.get("drafter") is not None
                or setting.get("temperature") != subject.traces.sampling_temperature):
            continue
        rows = [row for benchmark, row in setting["benchmarks"].items() if benchmark.startswith(_HELD_OUT)
                and row["tokens_per_second"] and row["domain"] in subject.traces.domains]
        if rows:
            found.append(_compare(name, setting, rows, subject, scheduler, longest, seed))
    return found


def _compare(name: str, setting: dict[str, Any], rows: Iterable[dict[str, Any]], subject: Subject,
             scheduler: SchedulerConfig, longest: int, seed: int) -> Comparison:
    mode, size = setting["decoding"], int(setting["batch_size"])
    policy = subject.policy(mode, scheduler)
    tokens = seconds = generated = spent = 0.0
    for row in rows:
        tokens += row["tokens"]
        seconds += row["tokens"] / row["tokens_per_second"]
        load = Workload(int(row["num_prompts"]), size, None, {row["domain"]: 1.0})
        for draws in range(_SIMULATIONS):
            requests = draw(subject.traces, load, np.random.default_rng(seed + draws))
            for request in requests:
                request.answer_tokens = min(request.answer_tokens, longest)
            outcome = simulate(subject.traces, subject.costs, policy, Limits(size), requests)
            generated += outcome.tokens
            spent += outcome.seconds
    measured, simulated = tokens / seconds, generated / spent
    return Comparison(name, mode, size, simulated, measured, simulated / measured - 1.0)
