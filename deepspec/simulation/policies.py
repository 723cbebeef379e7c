"""What is verified: nothing, a fixed length, or what the scheduler of the decoder itself decides."""

from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np

from deepspec.decoding.policy import ThroughputScheduler
from deepspec.scheduling import Floats, Ints


@dataclass(frozen=True)
class Policy:
    """A way of decoding. ``length`` 0 without a scheduler is plain decoding by the target alone."""

    name: str
    length: int = 0
    scheduler: Optional[Callable[[], ThroughputScheduler]] = None

    @property
    def alone(self) -> bool:
        """Whether the target runs without a drafter at its side."""
        return self.length == 0 and self.scheduler is None


class Lengths:
    """The policy's decisions in the course of one simulation."""

    def __init__(self, policy: Policy, draft_length: int) -> None:
        self._policy, self._draft_length = policy, draft_length
        self._scheduler = policy.scheduler() if policy.scheduler is not None else None
        self._survival: Optional[Floats] = None

    def drafts(self, requests: int) -> bool:
        """Whether a round of so many decoding requests drafts."""
        if requests == 0 or self._policy.alone:
            return False
        return self._scheduler is None or self._scheduler.should_draft(requests)

    @property
    def trial(self) -> bool:
        """Whether the round that drafts only looks whether it would pay, and so drafts for a few requests."""
        return self._scheduler is not None and self._scheduler.trial

    def choose(self, logits: Optional[Any], left: Ints) -> Ints:
        """Draft tokens to verify [R] for confidence logits [R, K] (None: no head) and tokens that can be used [R]."""
        if self._scheduler is None:
            return np.full(len(left), min(self._policy.length, self._draft_length))
        self._survival = self._scheduler.survival(logits, len(left))
        return self._scheduler.lengths(self._survival, np.clip(left, 0, self._draft_length))

    def settle(self, known: Ints, accepted: Ints) -> None:
        """Tell the scheduler what became of the round."""
        if self._scheduler is not None and self._survival is not None:
            self._scheduler.observe(self._survival, known, accepted)

    def took(self, requests: int, batch_tokens: int, drafted: bool, seconds: float) -> None:
        """Tell the scheduler how long a step without prompts took, as the decoder does."""
        if self._scheduler is not None:
            self._scheduler.observe_seconds(requests, batch_tokens, drafted, seconds)
