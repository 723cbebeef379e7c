"""Checks of the options of hidden states."""

import math
from urllib.parse import urlsplit

from deepspec.config.schema import Config, FeaturesConfig
from deepspec.config.schema_features import FeatureServerConfig
from deepspec.errors import ConfigError
from deepspec.planning.require import choice, require, whole, wholes, within

MODES = ("cached", "online", "hybrid", "disaggregated", "server")
ALLOWED = ("target_fingerprint", "renderer_hash", "responses_fingerprint")  # fields that may differ if asked for


def check_features(config: Config) -> None:
    """Raises ConfigError."""
    features = config.features
    choice("features.mode", features.mode, MODES)
    choice("features.codec", features.codec, ("bf16", "int8", "fp8-e4m3", "lossless", "fp32"))
    wholes("features", features, ("token_budget", "shard_megabytes"), 1)
    wholes("features", features, ("queue_depth",), 1)
    within("features.queue_timeout", features.queue_timeout, 0.0, math.inf, open_low=True)
    _target_ranks(config)
    within("features.held_out_fraction", features.held_out_fraction, 0.0, 1.0, open_high=True)
    for name in features.allow:
        choice("features.allow", name, ALLOWED)
    _path(features)
    if features.mode == "server":
        _server(features.server)


def _target_ranks(config: Config) -> None:
    count, mode = config.target.ranks, config.features.mode
    whole("target.ranks", count, 0)
    if mode == "disaggregated" and not count:
        raise ConfigError("features.mode=disaggregated needs ranks that run the target. Set target.ranks to 1 or more; "
                          "the last so many ranks of the launch are then for it.")
    if mode != "disaggregated" and count:
        raise ConfigError(f"target.ranks={count} is only for features.mode=disaggregated, but features.mode={mode}. "
                          "Set target.ranks=0, or use features=disaggregated.")


def _path(features: FeaturesConfig) -> None:
    if features.path is None:
        return
    require(bool(features.path), "features.path", features.path, "null or the folder of a feature store")
    require(features.mode == "cached", "features.mode", features.mode,
            f"cached with features.path={features.path!r}, which is read as it is")


def _server(server: FeatureServerConfig) -> None:
    choice("features.server.engine", server.engine, ("vllm", "sglang"))
    require(bool(server.servers), "features.server.servers", list(server.servers),
            "a list of base URLs ending in /v1 when features.mode=server")
    sglang = server.engine == "sglang"
    if bool(server.last_servers) != sglang:
        raise ConfigError(f"features.server.last_servers={list(server.last_servers)!r} is not possible: with "
                          "features.server.engine=sglang it must name the servers of the last hidden state, with vllm "
                          "it must be empty.")
    for key, urls in (("servers", server.servers), ("last_servers", server.last_servers)):
        for url in urls:
            require(_is_address(url), f"features.server.{key}", url,
                    "made of URLs ending in /v1, such as http://127.0.0.1:8000/v1")
    if sglang and server.files is not None:
        raise ConfigError(f"features.server.files={server.files!r} is only for features.server.engine=vllm: SGLang "
                          "answers with the numbers themselves.")
    wholes("features.server", server, ("concurrency", "breaker_failures"), 1)
    wholes("features.server", server, ("retries",), 0)
    within("features.server.seconds_per_token", server.seconds_per_token, 0.0, math.inf, open_low=True)
    within("features.server.patience_seconds", server.patience_seconds, 0.0, math.inf)
    within("features.server.logprob_tolerance", server.logprob_tolerance, 0.0, math.inf, open_low=True)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # refuses what is no number or too large
    except ValueError:
        return False
    return (parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
            and parts.path.rstrip("/").endswith("/v1") and not parts.query and not parts.fragment)
