"""Options of what decides and predicts speed: throughput profile, scheduler, serving simulation."""

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class ProfileConfig:
    """Grid of the throughput profile, and whose rounds are timed."""

    source: str = "in_process"  # in_process | sglang | vllm: a running server at profile.endpoint
    endpoint: str = ""  # base URL of the server, without /v1
    num_reqs: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    # Draft tokens verified per request; a number above the length of a block counts as that length.
    verify_lengths: list[int] = field(default_factory=lambda: [0, 1, 3, 7])
    kv_lengths: list[int] = field(default_factory=lambda: [512])
    prefill_tokens: list[int] = field(default_factory=lambda: [32, 256])  # prompts whose forward is timed
    samples_per_cell: int = 32
    warmup: int = 3
    max_batch_tokens: int = 256
    seconds_limit: float = 0.0  # stop adding samples after this, at least 3 per cell; 0 = no limit
    extend: bool = False  # keep the cells of an earlier profile of the same server (vLLM verifies one length at a time)
    min_samples: int = 3  # cells with fewer are refused by the scheduler


@dataclass
class SchedulerConfig:
    """How much is verified, where evaluation or simulation decode with a schedule (Algorithm 1, Sec. 5.2)."""

    # predicted share of throughput below which drafting is not worth it; profiles are hardly ever surer than this
    min_gain: float = 0.03
    max_verify: Optional[int] = None  # most draft tokens of one request in one step; null: the whole block
    # Promised to every request; no draft token is verified that would take a slower one further below it. 0: nothing.
    min_tokens_per_second_per_user: float = 0.0
    probe_share: float = 0.01  # of the throughput, that trying the choice predicted to be worse may cost
    # Correct the profile by what rounds really take: which rounds draft then depends on the clock, too, not on the seed
    adapt: bool = True


@dataclass
class SimulateConfig:
    """Serving, simulated from profile and recorded acceptance (launch/simulate_serving.py)."""

    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])  # users with one request in flight
    arrival_rates: list[float] = field(default_factory=list)  # requests per second (Poisson), simulated as well
    requests: int = 96  # of each simulation
    policies: list[str] = field(default_factory=lambda: ["none", "fixed", "scheduled", "asynchronous"])
    domain_mix: dict[str, float] = field(default_factory=dict)  # weight of each domain; empty: as recorded
    prompt_tokens: Optional[int] = None  # of every prompt; null: as recorded
    answer_tokens: Optional[int] = None  # of every answer; null: as recorded
    max_concurrent: int = 256  # requests the engine runs at a time; others wait
    kv_tokens: Optional[int] = None  # prompt and answer tokens its cache holds; null: no limit
    prefill_tokens: int = 2048  # prompt tokens of one step
    min_tokens_per_second_per_user: float = 0.0  # what a user is to get (SLA) in the recommendation
