"""Who asks, when, and for what: requests drawn from recorded conversations."""

from dataclasses import dataclass, field
from typing import Mapping, Optional, Sequence

import numpy as np

from deepspec.errors import InputRefused
from deepspec.simulation.traces import Traces


@dataclass
class SimulatedRequest:
    """One request on its way through the simulation; times in seconds since its start."""

    arrival: float
    trace: int  # conversation of the traces it follows
    prompt_tokens: int
    answer_tokens: int
    block: int = 0  # rounds drafted so far
    prefilled: int = 0  # prompt tokens in the cache
    generated: int = 0
    admitted: Optional[float] = None
    first_token: Optional[float] = None
    finished: Optional[float] = None

    @property
    def decoding(self) -> bool:
        """Whether the prompt is done, so that the request can draft."""
        return self.generated > 0

    @property
    def context(self) -> int:
        """Tokens in the cache."""
        return self.prefilled + max(self.generated - 1, 0)


@dataclass(frozen=True)
class Workload:
    """A stream of requests.

    ``rate`` None is a closed loop: ``concurrency`` users, each with one request in flight and the next one ready;
    otherwise requests arrive at ``rate`` per second, exponentially distributed in between (Poisson).
    """

    requests: int
    concurrency: int
    rate: Optional[float] = None
    domain_mix: Mapping[str, float] = field(default_factory=dict)  # weights; empty: as recorded
    answer_tokens: Optional[int] = None  # of every answer; None: as recorded
    prompt_tokens: Optional[int] = None  # of every prompt; None: as recorded


def domain_weights(traces: Traces, mix: Mapping[str, float]) -> dict[str, float]:
    """Share of each domain. Raises InputRefused for a domain without a recorded conversation."""
    known = sorted(set(traces.domains.tolist()))
    if not mix:
        return {name: len(traces.of_domain(name)) / len(traces) for name in known}
    unknown = sorted(name for name, weight in mix.items() if weight > 0 and name not in known)
    if unknown:
        raise InputRefused(f"simulate.domain_mix names {', '.join(unknown)}, but the recorded conversations are of "
                           f"{', '.join(known)}. Correct the name, or record such prompts (data.sources) first.")
    total = sum(mix.values())
    return {name: weight / total for name, weight in mix.items() if weight > 0}


def draw(traces: Traces, workload: Workload, random: np.random.Generator) -> list[SimulatedRequest]:
    """Requests in the order of their arrival: a domain by the mix, then one of its conversations."""
    weights = domain_weights(traces, workload.domain_mix)
    names = list(weights)
    # Exact shares in random order: chance in the mix would be noise in every comparison of policies.
    counts = np.floor(np.array([weights[name] for name in names]) * workload.requests).astype(int)
    for index in np.argsort(-(np.array(list(weights.values())) * workload.requests - counts))[
            :workload.requests - counts.sum()]:
        counts[index] += 1
    chosen: list[int] = []
    for name, count in zip(names, counts):
        pool = random.permutation(traces.of_domain(name))
        chosen.extend(np.resize(pool, count).tolist())
    order = random.permutation(len(chosen))
    gaps = np.zeros(len(chosen))
    if workload.rate is not None:
        gaps = random.exponential(1.0 / workload.rate, len(chosen))
    return requests_of(traces, [chosen[index] for index in order], np.cumsum(gaps), workload.answer_tokens,
                       workload.prompt_tokens)


def requests_of(traces: Traces, conversations: Sequence[int], arrivals: Sequence[float] | np.ndarray,
                answer_tokens: Optional[int] = None, prompt_tokens: Optional[int] = None) -> list[SimulatedRequest]:
    """Requests that follow ``conversations`` and arrive at ``arrivals``."""
    return [SimulatedRequest(float(arrival), int(index), int(prompt_tokens or traces.prompt_tokens[index]),
                             int(answer_tokens or traces.answer_tokens[index]))
            for index, arrival in zip(conversations, arrivals)]
