"""Options of hidden states that a serving engine computes. See schema.py."""

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class FeatureServerConfig:
    """Servers that hand out hidden states (features.mode=server)."""

    engine: str = "vllm"  # vllm (extract_hidden_states) | sglang (return_hidden_states)
    servers: list[str] = field(default_factory=list)  # base URLs ending in /v1; of the layers with sglang
    last_servers: list[str] = field(default_factory=list)  # sglang: base URLs of servers of the last hidden state
    model: Optional[str] = None  # name at the server; null: the first one it lists
    quantization: Optional[str] = None  # of the served weights, for example fp8; recorded, and part of the store's name
    files: Optional[str] = None  # vllm: folder of its files as it is called here; null: the path the server names
    store: bool = True  # false: no disk, every epoch asks the servers again
    concurrency: int = 16  # samples in flight over all servers
    seconds_per_token: float = 0.05  # request timeout = 30 s + tokens of the sample * this
    retries: int = 4
    breaker_failures: int = 5  # in a row, of different rows, before a server gets no requests until it recovers
    patience_seconds: float = 60.0  # without any server that works, before the job stops
    logprob_tolerance: float = 0.1  # nats between the server's log-probabilities and lm_head(last hidden), on average
