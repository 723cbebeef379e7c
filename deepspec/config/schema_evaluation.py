"""Options of the evaluation. See schema.py."""

from dataclasses import dataclass, field
from typing import Any, Optional

MISSING: Any = "???"
ESTIMATORS = ("sampled", "analytic", "drafted", "teacher_forced")
MIXED = "mixed"


@dataclass
class BenchmarkConfig:
    """One set of evaluation prompts; rows are ``{"turns": [...]}``, ``{"prompt": ...}`` or ``{"messages": ...}``. With
    ``answer``, or ``test`` / ``test_list`` and ``entry_point``, the task is scored (evaluation/scoring.py)."""

    name: str = MISSING
    path: str = MISSING  # file, "held_out" for this run's own held-out prompts, "embedded_math" for tasks with answers
    domain: str = "chat"
    limit: Optional[int] = None


@dataclass
class EvaluateConfig:
    """Lossless speculative decoding against plain decoding of the target."""

    benchmarks: list[BenchmarkConfig] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    max_new_tokens: int = 2048
    batch_size: int = 8
    batch_sizes: list[int] = field(default_factory=list)  # decode with each of these in turn; empty: batch_size alone
    # Reasoning of the target: true, false, mixed (each prompt as it was answered, others responses.thinking_share of
    # them); one setting each. Empty: mixed where responses.thinking_share is set, else as target.thinking says.
    thinking: list[Any] = field(default_factory=list)
    # sampled: count what decoding accepts | analytic: what it would accept on average along the target's own answers |
    # drafted, teacher_forced: one round at each of evaluate.anchors anchors of the held-out responses, along drafts or
    # along the responses (evaluation/analytic.py)
    estimators: list[str] = field(default_factory=lambda: ["sampled", "analytic"])
    anchors: int = 4000  # of drafted and teacher_forced, spread over the held-out responses
    modes: list[str] = field(default_factory=lambda: ["none", "fixed", "scheduled"])  # and asynchronous (Sec. 5.2)
    # acceptance is also reported by context length before the round, in tokens, cut here
    context_buckets: list[int] = field(default_factory=lambda: [512, 2048, 4096, 8192, 16384, 32768])
    bootstrap: int = 2000
    baseline_untrained: bool = False  # also evaluate the drafter as initialised
    run_code: bool = False  # run the code of answers that come with tests, limited but not isolated, to score them
    check_greedy: int = 2  # prompts per benchmark whose greedy output is compared with the target's own
