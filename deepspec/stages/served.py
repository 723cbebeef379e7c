"""Servers of hidden states as the configuration describes them, for the stages that read from them."""

from typing import Sequence

from deepspec import distributed
from deepspec.artifacts import canonical_hash
from deepspec.config.paths import features_key, model_cache, run_dir
from deepspec.config.schema import Config
from deepspec.data.engines.capture import EngineOptions
from deepspec.data.served import ServedTarget
from deepspec.data.server_pool import BreakerOptions
from deepspec.targets.head import TargetHead
from deepspec.targets.shallow import FirstLayers


def served_target(config: Config, head: TargetHead) -> ServedTarget:
    """Not connected yet: use it as a context manager. Every rank has its own, and its share of the requests."""
    server = config.features.server
    options = EngineOptions(
        urls=_mine(server.servers), last_urls=_mine(server.last_servers), model=server.model,
        layers=tuple(head.feature_layers), num_layers=head.spec.num_layers, hidden_size=head.spec.hidden_size,
        dtype=str(head.dtype).removeprefix("torch."),
        concurrency=max(1, server.concurrency // distributed.world_size()), retries=server.retries,
        seconds_per_token=server.seconds_per_token, files=server.files,
        breaker=BreakerOptions(server.breaker_failures, server.patience_seconds), job=_job(config),
    )
    first = FirstLayers(config.target, model_cache(config), head.spec.num_layers)
    return ServedTarget(server.engine, options, head, tolerance=server.logprob_tolerance, layer_of=first.layer_of)


def _mine(urls: Sequence[str]) -> list[str]:
    """All servers, each rank beginning at another one: a server with nothing to do is taken in order."""
    start = distributed.rank() % max(1, len(urls))
    return [*urls[start:], *urls[:start]]


def _job(config: Config) -> str:
    """The same after a restart, so that what a killed run left in the servers' folder is found and deleted."""
    what: dict[str, object] = {"features": features_key(config)}
    if not config.features.server.store:
        what["run"] = str(run_dir(config).absolute())
    return f"deepspec-{canonical_hash(what, 10)}"
