"""Hidden states from serving engines: the numbers of the target itself, and every way in which a server can fail."""

import functools
import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from fake_server import FakeServer
from hidden_state_server import Spoil, TinyEngine, sglang, vllm
from tiny_data import save_target, tiny_config

from deepspec import artifacts
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.engines.sglang_hidden import join_rows
from deepspec.data.feature_store import FeatureStore
from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused, UserError
from deepspec.stages import features, served

LAYERS = [1, 3, 4]  # 0 and 2 of ours, then the last one
ROWS = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target: Path) -> TinyEngine:
    return TinyEngine(target)


@pytest.fixture()
def config(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """With answers to train on, and servers that are given up after tenths of a second."""
    config = tiny_config(tmp_path / "data", target, tmp_path / "unused")
    directory = paths.responses_dir(config)
    manifest = artifacts.begin(directory, "responses", "fingerprint")
    generator = torch.Generator().manual_seed(0)
    with open(directory / "responses.jsonl", "w", encoding="utf-8") as handle:
        for index in range(ROWS):
            ids = torch.randint(10, 260, (12 + 3 * index,), generator=generator).tolist()
            turn = {"prompt_ids": ids[:8], "response_ids": ids[8:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": "chat", "messages": [], "turns": [turn],
                                     "split": "train" if index < 10 else "held_out"}) + "\n")
    artifacts.complete(directory, manifest, ["responses.jsonl"])
    quick = functools.partial(served.EngineOptions, base_timeout=1.0, retry_wait=0.01)
    monkeypatch.setattr(served, "EngineOptions", quick)
    return config


def asked_of(config: Config, *servers: FakeServer, **options: Any) -> Config:
    """The same run with features from ``servers``."""
    quick = {"concurrency": 4, "retries": 1, "patience_seconds": 0.3, "breaker_failures": 2, "seconds_per_token": 0.001,
             "logprob_tolerance": 1e-3}  # a random model is unsure of everything, so differences are small
    server = replace(config.features.server, servers=[server.url for server in servers], **(quick | options))
    return replace(config, features=replace(config.features, mode="server", server=server))


@pytest.fixture()
def files(tmp_path: Path) -> Path:
    """The folder that server and client share."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def samples(config: Config) -> dict[str, Any]:
    store = FeatureStore(paths.features_dir(config))
    return {record.sample_id: store.read(index) for index, record in enumerate(store.records)}


def assert_same(config: Config, other: Config, left_out: frozenset[str] = frozenset()) -> None:
    ours, theirs = samples(config), samples(other)
    assert ours.keys() == theirs.keys() - left_out
    for name, item in ours.items():
        wanted = theirs[name]
        assert torch.equal(item.sample.input_ids, wanted.sample.input_ids)
        assert torch.equal(item.sample.loss_mask, wanted.sample.loss_mask)
        torch.testing.assert_close(item.features, wanted.features, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(item.last_hidden, wanted.last_hidden, atol=2e-5, rtol=1e-4)


def test_vllm_gives_the_numbers_of_the_target(config: Config, engine: TinyEngine, files: Path,
                                              caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    features.run(config)
    with FakeServer(vllm(engine, files, LAYERS, delay=0.05)) as server:
        asked = asked_of(config, server, quantization="fp8")
        features.run(asked)
        features.run(asked)  # up to date: no request
        assert len(server.requests) == ROWS and server.most_in_flight > 1
    assert_same(asked, config)
    assert os.listdir(files) == []  # read, then deleted
    manifest = artifacts.read_manifest(paths.features_dir(asked))
    assert manifest.facts["served"] == {"engine": "vllm", "engine_version": None, "model": "tiny",
                                        "model_root": None, "engine_quantization": None, "quantization": "fp8",
                                        "dtype": "float32"}
    header = artifacts.read_manifest(paths.features_dir(config)).facts["header"]
    assert manifest.facts["header"] == header
    assert paths.features_dir(asked) != paths.features_dir(config)
    assert caplog.text.count("are its own within") == 1
    first, later = server.requests[0], server.requests[-1]
    assert first["max_tokens"] == 1 and first["return_token_ids"] and first["prompt_logprobs"] == 1
    assert "prompt_logprobs" not in later


@pytest.mark.parametrize("before_norm", [False, True])
def test_sglang_gives_the_numbers_of_the_target(config: Config, engine: TinyEngine, before_norm: bool) -> None:
    features.run(config)
    with FakeServer(sglang(engine, [0, 2])) as layers, \
            FakeServer(sglang(engine, None, before_norm=before_norm)) as last:
        asked = asked_of(config, layers, engine="sglang", last_servers=[last.url])
        features.run(asked)
        assert len(layers.requests) == len(last.requests) == ROWS
    assert_same(asked, config)


def of_row(config: Config, number: int) -> list[int]:
    turn = json.loads((paths.responses_dir(config) / "responses.jsonl").read_text().splitlines()[number])["turns"][0]
    return turn["prompt_ids"] + turn["response_ids"]


def shorter(_: list[int], made: dict[str, Any]) -> None:
    made["states"] = made["states"][3:]


def other_tokens(_: list[int], made: dict[str, Any]) -> None:
    made["token_ids"][2] += 1


def other_echo(_: list[int], made: dict[str, Any]) -> None:
    choice = made["reply"]["choices"][0]
    choice["prompt_token_ids"] = choice["prompt_token_ids"][:-1]


def no_number(_: list[int], made: dict[str, Any]) -> None:
    made["states"][4, 1, 7] = float("nan")


def other_text(_: list[int], made: dict[str, Any]) -> None:
    made["states"] = made["states"].flip(0) * 3


def no_file(_: list[int], made: dict[str, Any]) -> None:
    made["states"] = None


def boom(_: list[int], made: dict[str, Any]) -> dict[str, Any]:
    return {"status": 500, "text": "boom"}


def too_long(_: list[int], made: dict[str, Any]) -> dict[str, Any]:
    return {"status": 400, "text": "maximum context length is 16 tokens"}


def hang(_: list[int], made: dict[str, Any]) -> None:
    time.sleep(5)


@pytest.mark.parametrize("spoil, reason", [
    (shorter, "hidden states of 33 of 36 tokens. If it skips tokens whose cache it has, start it with "
              "--no-enable-prefix-caching"),
    (other_tokens, "file: token 2 came back as"),
    (other_echo, "reply: 35 token ids came back for the 36 that were sent"),
    (no_number, "layer 2: value nan at token 4, channel 7"),
    (other_text, "differ from the server's own by"),
    (no_file, "did not appear"),
    (boom, "HTTP 500"),
    (too_long, "maximum context length is 16 tokens"),
    (hang, "no reply from"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_one_bad_sample_is_set_aside_and_nothing_else_is_lost(config: Config, engine: TinyEngine, files: Path,
                                                              spoil: Spoil, reason: str) -> None:
    features.run(config)
    bad = of_row(config, 8)

    def only_that(ids: list[int], made: dict[str, Any]) -> Any:
        return spoil(ids, made) if ids == bad else None

    with FakeServer(vllm(engine, files, LAYERS, only_that)) as server:
        asked = asked_of(config, server)
        features.run(asked)
    assert_same(asked, config, left_out=frozenset({"p8"}))
    directory = paths.features_dir(asked)
    assert artifacts.read_manifest(directory).facts["quarantined"] == ["p8"]
    found = [row for path in directory.glob("quarantine-*.jsonl") for _, row in read_rows(path)]
    assert [row["sample_id"] for row in found] == ["p8"] and reason in found[0]["reason"]
    assert not [name for name in os.listdir(files) if name.endswith(".safetensors")]


def lacks_last(_: list[int], made: dict[str, Any]) -> None:
    made["states"] = made["states"][:, :2]


def half(_: list[int], made: dict[str, Any]) -> None:
    made["states"] = made["states"].half()


def no_path(_: list[int], made: dict[str, Any]) -> None:
    del made["reply"]["kv_transfer_params"]


def elsewhere(_: list[int], made: dict[str, Any]) -> None:
    made["reply"]["kv_transfer_params"]["hidden_states_path"] = "/not/here/cmpl-1.safetensors"


@pytest.mark.parametrize("spoil, message", [
    (lacks_last, r"expected \(\d+, 3, 64\): eagle_aux_hidden_state_layer_ids must be \[1, 3, 4\]"),
    (half, "hidden states are float16, but target.dtype says float32"),
    (no_path, "it was not started to hand out hidden states"),
    (elsewhere, "did not appear: is the server's folder"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_server_that_was_started_for_something_else_stops_the_stage(
        config: Config, engine: TinyEngine, files: Path, spoil: Spoil, message: str) -> None:
    with FakeServer(vllm(engine, files, LAYERS, spoil)) as server, pytest.raises(InputRefused, match=message):
        features.run(asked_of(config, server))


def test_another_model_and_another_last_layer_are_noticed(config: Config, engine: TinyEngine, files: Path,
                                                          tmp_path: Path) -> None:
    other = TinyEngine(save_target(tmp_path / "other", seed=1))
    for answer in (vllm(other, files, LAYERS), vllm(engine, files, [1, 4, 3])):
        with FakeServer(answer) as server, pytest.raises(InputRefused, match="serves another model than target.path"):
            features.run(asked_of(config, server))


@pytest.mark.parametrize("ids, found", [([0, 2, 4], "the embedding"), ([2, 4, 4], "layer 1")])
def test_layers_counted_in_another_way_are_noticed(config: Config, engine: TinyEngine, files: Path, ids: list[int],
                                                   found: str) -> None:
    with FakeServer(vllm(engine, files, ids)) as server, \
            pytest.raises(InputRefused, match=f"gives {found} as layer 0 of target.feature_layers=.0, 2.: .* ids"):
        features.run(asked_of(config, server))


def test_many_bad_samples_stop_the_stage_and_the_next_run_continues(config: Config, engine: TinyEngine,
                                                                    files: Path) -> None:
    good = {tuple(of_row(config, number)) for number in (3, 11, 12, 13)}

    def most(ids: list[int], made: dict[str, Any]) -> Any:
        return None if tuple(ids) in good else boom(ids, made)

    with FakeServer(vllm(engine, files, LAYERS, most)) as server:
        asked = asked_of(config, server, concurrency=1)
        with pytest.raises(UserError, match="2 samples have unusable hidden states, at most 1 may; the last: .*500"):
            features.run(asked)
    with FakeServer(vllm(engine, files, LAYERS)) as server:
        asked.features.server.servers = [server.url]
        features.run(asked)
        assert ROWS - 4 <= len(server.requests) < ROWS  # what was there is not asked for again
    features.run(config)
    assert_same(asked, config)


class Dying:
    """Answers ``count`` requests, then closes its port."""

    def __init__(self, engine: TinyEngine, files: Path, count: int) -> None:
        self._left, self._answer = count, vllm(engine, files, LAYERS)
        self.server = FakeServer(self)

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            if self._left == -1:
                self.server.stop()
            time.sleep(0.2)
        return self._answer(body)


def test_a_server_that_dies_half_way_leaves_the_work_to_the_others(config: Config, engine: TinyEngine,
                                                                   files: Path) -> None:
    features.run(config)
    dying = Dying(engine, files, 4)
    with FakeServer(vllm(engine, files, LAYERS)) as server, dying.server:
        asked = asked_of(config, server, dying.server)
        features.run(asked)
    assert_same(asked, config)


def test_when_the_only_server_dies_what_is_there_stays(config: Config, engine: TinyEngine, files: Path) -> None:
    dying = Dying(engine, files, 6)
    asked = asked_of(config, dying.server)
    with dying.server, pytest.raises(UserError, match="stopped answering.*continues from there"):
        features.run(asked)
    there = {record["sample_id"] for path in paths.features_dir(asked).glob("shard-*.json")
             for record in json.loads(path.read_text())["records"]}
    assert 2 <= len(there) <= 6
    with FakeServer(vllm(engine, files, LAYERS)) as server:
        asked.features.server.servers = [server.url]
        features.run(asked)
        assert len(server.requests) == ROWS - len(there)
    features.run(config)
    assert_same(asked, config)


def test_what_a_killed_run_left_in_the_servers_folder_goes(config: Config, engine: TinyEngine, files: Path) -> None:
    with FakeServer(vllm(engine, files, LAYERS)) as server:
        asked = asked_of(config, server)
        left = files / f"cmpl-{served._job(asked)}-abc-0-1.safetensors"
        others = files / "cmpl-somebody-else.safetensors"
        for path in (left, Path(f"{left}.lock"), others):
            path.write_bytes(b"x")
            os.utime(path, (time.time() - 1000,) * 2)
        features.run(asked)
    assert os.listdir(files) == [others.name]


def test_the_servers_folder_may_have_another_name_here(config: Config, engine: TinyEngine, files: Path,
                                                       tmp_path: Path) -> None:
    def renamed(_: list[int], made: dict[str, Any]) -> None:
        transfer = made["reply"]["kv_transfer_params"]
        transfer["hidden_states_path"] = f"/mnt/there/{Path(transfer['hidden_states_path']).name}"

    with FakeServer(vllm(engine, files, LAYERS, renamed)) as server:
        features.run(asked_of(config, server, files=str(files)))


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "hidden-states"]


def test_sglang_servers_that_skip_tokens_or_give_something_else(config: Config, engine: TinyEngine) -> None:
    bad = of_row(config, 8)

    def cached(ids: list[int], made: dict[str, Any]) -> None:
        if ids == bad:
            states = made["reply"]["meta_info"]["hidden_states"]
            states[0] = states[0][16:]

    with FakeServer(sglang(engine, [0, 2], cached)) as layers, FakeServer(sglang(engine, None)) as last:
        asked = asked_of(config, layers, engine="sglang", last_servers=[last.url])
        features.run(asked)
        found = [row for path in paths.features_dir(asked).glob("quarantine-*.jsonl") for _, row in read_rows(path)]
        assert [row["sample_id"] for row in found] == ["p8"]
        assert "hidden states of 20 of 36 tokens. Start the server with --disable-radix-cache" in found[0]["reason"]

    def without(_: list[int], made: dict[str, Any]) -> None:
        del made["reply"]["meta_info"]["hidden_states"]

    for layers_answer, message in ((sglang(engine, [0]), "--return-aux-hidden-state-layer-ids 0 2"),
                                   (sglang(engine, [0, 2], without), "not started to return hidden states")):
        with FakeServer(layers_answer) as layers, FakeServer(sglang(engine, None)) as last:
            asked = asked_of(config, layers, engine="sglang", last_servers=[last.url], quantization="awq")
            with pytest.raises(InputRefused, match=message):
                features.run(asked)


def test_chunks_and_rows_are_joined() -> None:
    rows = torch.arange(12.0).view(4, 3)
    assert torch.equal(join_rows([rows[:2].tolist(), rows[2:3].tolist(), rows[3].tolist()]), rows)
