"""Options of hidden states from servers and of given stores, and what must be there for them."""

import json
import socket
from pathlib import Path
from typing import Any, Callable

import pytest

from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.preflight import required
from deepspec.planning.preflight_features import check_given_store, check_hidden_state_servers, serve_command
from deepspec.planning.sizes import count_parameters
from deepspec.planning.validate import validate
from deepspec.planning.validate_features import check_features
from deepspec.planning.work import workload

SGLANG = {"engine": "sglang", "last_servers": ["http://b:1/v1"]}


@pytest.fixture
def config(composed: Callable[..., Config], tmp_path: Path) -> Config:
    config = composed("+experiment=tiny", "features=server")
    config.run.dir, config.run.data_root = f"{tmp_path}/run", f"{tmp_path}/data"
    return config


def test_servers_of_both_engines_are_possible(config: Config) -> None:
    validate(config)
    for name, value in SGLANG.items():
        setattr(config.features.server, name, value)
    validate(config)


@pytest.mark.parametrize("changes, said", [
    ({"engine": "tgi"}, "vllm, sglang"), ({"servers": []}, "a list of base URLs"),
    ({"servers": ["localhost:8000"]}, "URLs ending in /v1"), ({"servers": ["http://"]}, "URLs ending in /v1"),
    ({"servers": ["http://a:8000"]}, "URLs ending in /v1"), ({"servers": ["http://a:99999/v1"]}, "URLs ending in /v1"),
    ({"servers": ["http://a:b/v1"]}, "URLs ending in /v1"), ({"servers": ["http://a:0/v1"]}, "URLs ending in /v1"),
    ({"servers": ["http://a:1/v1/completions"]}, "URLs ending in /v1"),
    (SGLANG | {"last_servers": ["b"]}, "features.server.last_servers='b'"),
    ({"last_servers": ["http://b:1/v1"]}, "with vllm it must"),
    ({"engine": "sglang"}, "must name the servers of the last hidden state"),
    (SGLANG | {"files": "/x"}, "only for features.server.engine=vllm"), ({"concurrency": 0}, "at least 1"),
    ({"retries": -1}, "at least 0"), ({"breaker_failures": 0}, "at least 1"), ({"seconds_per_token": 0.0}, "above 0"),
    ({"patience_seconds": -1.0}, "at least 0"), ({"logprob_tolerance": 0.0}, "above 0"),
])
def test_wrong_options_of_servers_are_named(config: Config, changes: dict[str, Any], said: str) -> None:
    for name, value in changes.items():
        setattr(config.features.server, name, value)
    with pytest.raises(ConfigError, match=said):
        check_features(config)


@pytest.mark.parametrize("changes, said", [
    ({"path": ""}, "features.path=''"), ({"path": "x"}, "features.mode='server' is not possible: it must be cached"),
    ({"allow": ["layers"]}, "target_fingerprint, renderer_hash, responses_fingerprint"),
    ({"held_out_fraction": 1.0}, "below 1"),
])
def test_wrong_options_of_stores_are_named(config: Config, changes: dict[str, Any], said: str) -> None:
    for name, value in changes.items():
        setattr(config.features, name, value)
    with pytest.raises(ConfigError, match=said):
        check_features(config)


def test_features_of_a_server_have_a_place_of_their_own(config: Config) -> None:
    places = {paths.features_dir(config)}
    config.features.server.quantization = "fp8"
    places.add(paths.features_dir(config))
    config.features.mode = "cached"
    places.add(paths.features_dir(config))
    assert len(places) == 3


def test_what_is_needed_follows_from_where_hidden_states_are(config: Config) -> None:
    assert required(config, "train") == ("features",) and workload(config, count_parameters(config)).cache_bytes > 0
    config.features.server.store = False
    assert required(config, "train") == ("responses",) and workload(config, count_parameters(config)).cache_bytes == 0


def test_a_server_that_would_be_asked_must_be_there(config: Config, tmp_path: Path) -> None:
    config.features.server.servers = ["http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"]
    with pytest.raises(InputRefused, match=r"No server of features.server.servers answers: .*:9/v1.*:10/v1.*"
                                           r"vllm serve micro .*_layer_ids\": \[2, 5, 7, 8\]"):
        check_hidden_state_servers(config, ["features", "train"])
    check_hidden_state_servers(config, ["train"])  # reads the store
    config.features.server.engine, config.features.server.last_servers = "sglang", ["http://127.0.0.1:9/v1"]
    with pytest.raises(InputRefused, match="DFLASH --return-aux-hidden-state-layer-ids 1 4 6 --disable-radix-cache"):
        check_hidden_state_servers(config, ["features"])
    assert "--enable-return-hidden-states --disable" in serve_command(config, last=True)
    config.features.server.engine, config.features.server.last_servers = "vllm", []
    config.features.server.store = False
    with pytest.raises(InputRefused, match="No server"):
        check_hidden_state_servers(config, ["train"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        config.features.server.servers.append(f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        check_hidden_state_servers(config, ["train"])  # one is enough
        config.features.server.files = str(tmp_path / "nothing")
        with pytest.raises(InputRefused, match="features.server.files=.*nothing' is not a folder here"):
            check_hidden_state_servers(config, ["train"])
        config.features.server.files = str(tmp_path)
        check_hidden_state_servers(config, ["train"])
    config.features.server.files = None
    config.features.server.store = True
    directory = paths.features_dir(config)
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps(
        {"schema_version": 1, "producer": "features", "status": "complete", "fingerprint": ""}))
    config.features.server.servers = ["http://127.0.0.1:9/v1"]
    check_hidden_state_servers(config, ["features", "train"])  # there already


def test_a_given_store_must_be_there(config: Config, tmp_path: Path) -> None:
    config.features.mode, config.features.path = "cached", str(tmp_path / "nothing")
    with pytest.raises(InputRefused, match="is not a feature store"):
        check_given_store(config, ["train"])
    check_given_store(config, ["report"])
    (tmp_path / "file").write_text("x")
    config.features.path = str(tmp_path / "file")
    with pytest.raises(InputRefused, match="Is .*file the right folder"):
        check_given_store(config, ["train"])
    config.features.path = str(tmp_path)
    for header, said in ((3, "is not a feature store"), ({"layers": [1, 4, 6]}, "width None, but target 'micro' has"),
                         ({"hidden_size": 64}, "of width 64, but target 'micro' has 128")):
        (tmp_path / "manifest.json").write_text(json.dumps(
            {"schema_version": 1, "producer": "features", "status": "complete", "fingerprint": "",
             "facts": {"header": header}}))
        with pytest.raises(InputRefused, match=said):
            check_given_store(config, ["train"])
