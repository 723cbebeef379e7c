"""What every engine's adapter gives: the hidden states of a token sequence as the engine computed them.

T tokens of a sample, M feature layers, D width.
"""

from dataclasses import dataclass
from typing import Any, Optional, Protocol, Sequence

from torch import Tensor

from deepspec.data.server_pool import BreakerOptions, Server

# What a reply that parses as JSON, but is built in another way, makes of code that takes it apart.
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


class ServerMisused(Exception):
    """The first reply of a server shows that it was started for something else: every row would fail."""


@dataclass(frozen=True)
class TokenLogProb:
    """The engine's own log-probability of ``token`` after position ``position`` (0-based)."""

    position: int
    token: int
    value: float


@dataclass(frozen=True)
class Captured:
    """Hidden states of one sample. ``normalised``: whether ``last`` is after the final norm; None: not known."""

    server: str
    features: Tensor  # [T, M*D], the outputs of our layers
    last: Tensor  # [T, D]
    normalised: Optional[bool]
    logprobs: tuple[TokenLogProb, ...]  # empty where the engine gave none


@dataclass(frozen=True)
class EngineOptions:
    """What adapters need to know of the configuration and of the target."""

    urls: Sequence[str]
    last_urls: Sequence[str]  # servers of the last hidden state, for engines that cannot give both
    model: Optional[str]
    layers: tuple[int, ...]  # ours
    num_layers: int  # of the target
    hidden_size: int
    dtype: str  # of the target, for example bfloat16
    concurrency: int
    retries: int
    seconds_per_token: float
    breaker: BreakerOptions
    job: str  # names the requests of this job, and files that are left of it
    files: Optional[str] = None  # where the server's folder is here, when that is not where the server says
    retry_wait: float = 0.5
    base_timeout: float = 30.0  # seconds, besides those per token

    def timeout(self, tokens: int) -> float:
        """Seconds one request may take."""
        return self.base_timeout + tokens * self.seconds_per_token


class HiddenStateEngine(Protocol):
    """One engine. All methods run in one event loop."""

    async def connect(self) -> dict[str, Any]:
        """Find the servers; returns what is recorded of them. Raises InputRefused if none can serve."""
        ...

    async def capture(self, token_ids: Sequence[int], row: str) -> Captured:
        """Hidden states of ``token_ids``. Raises RowRejected, ServerMisused or ServersDead."""
        ...

    async def close(self) -> None:
        """Drop connections."""
        ...

    @property
    def servers(self) -> list[Server]:
        """With their counts."""
        ...


def echo_problem(token_ids: Sequence[int], echoed: Sequence[int]) -> Optional[str]:
    """What is wrong with the ids that came back, None if they are those that were sent."""
    if list(echoed) == list(token_ids):
        return None
    if len(echoed) != len(token_ids):
        return f"{len(echoed)} token ids came back for the {len(token_ids)} that were sent"
    place = next(index for index, (sent, back) in enumerate(zip(token_ids, echoed)) if sent != back)
    return f"token {place} came back as {echoed[place]}, but {token_ids[place]} was sent"
