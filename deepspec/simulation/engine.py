"""Discrete events of continuous batching: admit, prefill, draft, verify, keep; the clock advances by priced steps.

The order of a step, the shared budget of prompt tokens and the rule that decoding rows never wait for a prompt are
those of ``decoding/decoder.py``.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

import numpy as np

from deepspec.decoding.rows import PREFILL_TOKENS
from deepspec.errors import InputRefused
from deepspec.scheduling import Ints
from deepspec.simulation.costs import StepCosts
from deepspec.simulation.policies import Lengths, Policy
from deepspec.simulation.traces import Traces
from deepspec.simulation.workload import SimulatedRequest


@dataclass(frozen=True)
class Limits:
    """What the engine can hold."""

    max_concurrent: int  # requests in flight; others wait
    kv_tokens: Optional[int] = None  # prompt and answer tokens reserved by requests in flight; None: no limit
    prefill_tokens: int = PREFILL_TOKENS  # prompt tokens of one step


@dataclass
class Outcome:
    """Totals of one simulation."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    draft_steps: int = 0
    rounds: int = 0  # a decoding request in a step
    verified: int = 0  # draft tokens sent to the target
    accepted: int = 0
    rows: int = 0  # requests in flight, summed over steps
    draft_seconds: float = 0.0
    prefill_tokens: int = 0
    loaded_seconds: float = 0.0  # until the last request was admitted: no drain
    loaded_tokens: int = 0
    largest_batch: int = 0
    finished: list[SimulatedRequest] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole simulation."""
        return self.tokens / self.seconds

    @property
    def loaded_tokens_per_second(self) -> float:
        """Throughput while requests were waiting or arriving; the whole one if that was never so."""
        return self.loaded_tokens / self.loaded_seconds if self.loaded_seconds > 0 else self.tokens_per_second


class Simulation:
    """One run of requests through the engine."""

    def __init__(self, traces: Traces, costs: StepCosts, policy: Policy, limits: Limits) -> None:
        self._traces, self._costs, self._policy, self._limits = traces, costs, policy, limits
        self._lengths = Lengths(policy, traces.draft_length)
        self._active: list[SimulatedRequest] = []
        self._now = 0.0
        self._outcome = Outcome()
        self._prices: dict[tuple[int, int, int], float] = {}

    def run(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        """Serve ``requests`` (sorted by arrival). Raises InputRefused for one that can never fit."""
        for request in requests:
            if self._limits.kv_tokens is not None and self._reserved(request) > self._limits.kv_tokens:
                raise InputRefused(f"simulate.kv_tokens={self._limits.kv_tokens} cannot hold one request of "
                                   f"{request.prompt_tokens} prompt and {request.answer_tokens} answer tokens. "
                                   "Raise it or lower simulate.answer_tokens.")
        waiting = deque(requests)
        while waiting or self._active:
            self._admit(waiting)
            if not self._active:
                self._now = max(self._now, waiting[0].arrival)
                continue
            self._step()
            if waiting:
                self._outcome.loaded_seconds, self._outcome.loaded_tokens = self._now, self._outcome.tokens
        self._outcome.seconds = self._now
        return self._outcome

    @staticmethod
    def _reserved(request: SimulatedRequest) -> int:
        return request.prompt_tokens + request.answer_tokens

    def _admit(self, waiting: deque[SimulatedRequest]) -> None:
        held = sum(map(self._reserved, self._active))
        while waiting and waiting[0].arrival <= self._now and len(self._active) < self._limits.max_concurrent:
            held += self._reserved(waiting[0])
            if self._limits.kv_tokens is not None and held > self._limits.kv_tokens:
                return
            request = waiting.popleft()
            request.admitted = self._now
            self._active.append(request)

    def _step(self) -> None:
        """One forward of the target over all rows."""
        ready = [row for row in self._active if row.decoding]
        drafting = self._lengths.drafts(len(ready))
        asked = ready if drafting else []
        if drafting and self._lengths.trial:
            asked = sorted(ready, key=lambda row: row.context)[:max(1, len(ready) // 8)]
        lengths = np.zeros(0, dtype=np.int64)
        if drafting:
            lengths = self._lengths.choose(self._logits(asked), np.array([self._left(row) for row in asked]))
        prompts = self._feed_prompts()
        seconds = self._price(ready, lengths, prompts)
        self._now += seconds
        outcome = self._outcome
        outcome.steps += 1
        outcome.draft_steps += drafting
        outcome.rows += len(self._active)
        outcome.rounds += len(ready)
        outcome.largest_batch = max(outcome.largest_batch, len(self._active))
        outcome.verified += int(lengths.sum())
        outcome.prefill_tokens += prompts
        self._keep(ready, asked, lengths)
        if not prompts:
            self._lengths.took(len(ready), len(ready) + int(lengths.sum()), drafting, seconds)
        for row in self._active:
            if not row.decoding and row.prefilled == row.prompt_tokens:
                self._gain(row, 1)
        for row in [row for row in self._active if row.finished is not None]:
            self._active.remove(row)
            outcome.finished.append(row)

    def _block(self, row: SimulatedRequest) -> int:
        """Block of the traces that the row drafts now; an answer longer than its record begins again."""
        first, last = self._traces.starts[row.trace], self._traces.starts[row.trace + 1]
        return int(first + row.block % (last - first))

    def _logits(self, ready: Sequence[SimulatedRequest]) -> Optional[np.ndarray]:
        if self._traces.logits is None:
            return None
        return self._traces.logits[[self._block(row) for row in ready]]

    @staticmethod
    def _left(row: SimulatedRequest) -> int:
        """Draft tokens the answer still has room for, beside the target's own."""
        return row.answer_tokens - row.generated - 1

    def _feed_prompts(self) -> int:
        budget = self._limits.prefill_tokens
        for row in self._active:
            if not row.decoding:
                fed = min(row.prompt_tokens - row.prefilled, budget)
                row.prefilled += fed
                budget -= fed
        return self._limits.prefill_tokens - budget

    def _price(self, ready: Sequence[SimulatedRequest], lengths: Ints, prompts: int) -> float:
        """Seconds of the step; ``lengths`` of the requests that draft."""
        requests = len(ready)
        whole, added = self._costs.prefill_seconds(prompts, drafting=not self._policy.alone)
        if requests == 0:
            return whole
        # Contexts grow by a token a step; prices do not change that fast.
        bucket = int(self._costs.context([row.context for row in ready])) // 16 * 16
        if self._policy.alone:
            return self._known((requests, -1, bucket), lambda: self._costs.alone_round(requests, bucket)) + added
        tokens = requests + int(lengths.sum())
        seconds = self._known((requests, tokens, bucket), lambda: self._costs.verify_seconds(requests, tokens, bucket))
        draft = 0.0
        if len(lengths):
            draft = self._known((len(lengths), 0, bucket), lambda: self._costs.draft_seconds(len(lengths), bucket))
            self._outcome.draft_seconds += draft
        return seconds + draft + added

    def _known(self, key: tuple[int, int, int], price: Callable[[], float]) -> float:
        """The price of (requests, tokens, context), asked for once; no tokens: drafting, -1: plain decoding."""
        if key not in self._prices:
            self._prices[key] = price()
        return self._prices[key]

    def _keep(self, ready: Sequence[SimulatedRequest], asked: Sequence[SimulatedRequest], lengths: Ints) -> None:
        chosen = {id(row) for row in asked}
        for row in ready:
            if id(row) not in chosen:
                self._gain(row, 1)
        if not asked:
            return
        blocks = [self._block(row) for row in asked]
        accepted = np.minimum(self._traces.accepted[blocks], lengths)
        self._lengths.settle(np.minimum(self._traces.known[blocks], lengths), accepted)
        self._outcome.accepted += int(accepted.sum())
        for row, count in zip(asked, accepted.tolist()):
            row.block += 1
            self._gain(row, 1 + count)

    def _gain(self, row: SimulatedRequest, tokens: int) -> None:
        gained = min(tokens, row.answer_tokens - row.generated)
        row.generated += gained
        self._outcome.tokens += gained
        if row.first_token is None:
            row.first_token = self._now
        if row.generated >= row.answer_tokens:
            row.finished = self._now


def simulate(traces: Traces, costs: StepCosts, policy: Policy, limits: Limits,
             requests: Sequence[SimulatedRequest]) -> Outcome:
    """Serve ``requests`` under ``policy``; the requests are changed in place."""
    return Simulation(traces, costs, policy, limits).run(requests)
