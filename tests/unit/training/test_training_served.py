"""Training on hidden states of a serving engine, with a store and without one: the same as on the target's own."""

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator

import pytest

sys.path.append(str(Path(__file__).parents[1] / "data"))

from fake_server import FakeServer  # noqa: E402
from hidden_state_server import TinyEngine, vllm  # noqa: E402
from tiny_data import MASK  # noqa: E402
from tiny_data import save_target  # noqa: E402
from tiny_data import ROWS as VOCABULARY  # noqa: E402
from tiny_training import tiny_config  # noqa: E402

from deepspec.artifacts import begin, complete  # noqa: E402
from deepspec.config.paths import responses_dir  # noqa: E402
from deepspec.config.schema import Config, TargetConfig, TargetShape  # noqa: E402
from deepspec.errors import InputRefused, UserError  # noqa: E402
from deepspec.stages import features, train  # noqa: E402
from deepspec.targets.head import load_head  # noqa: E402
from deepspec.training import checkpoint  # noqa: E402
from deepspec.training.learned import Quantization, quantization_of, warn_of_another_engine  # noqa: E402
from deepspec.training.session import load_run  # noqa: E402

SAMPLES, HELD_OUT = 8, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    save_target(root / "target")
    (root / "shared").mkdir()
    config = run_config(root, "unused")
    directory = responses_dir(config)
    manifest = begin(directory, "responses", "fingerprint")
    with open(directory / "responses.jsonl", "w") as handle:
        for index in range(SAMPLES + HELD_OUT):
            ids = [(7 + index) * place % 250 + 5 for place in range(24 + index)]
            turn = {"prompt_ids": ids[:8], "response_ids": ids[8:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": "chat", "messages": [], "turns": [turn],
                                     "split": "train" if index < SAMPLES else "held_out"}) + "\n")
    complete(directory, manifest, ["responses.jsonl"])
    return root


@pytest.fixture()
def server(root: Path) -> Iterator[FakeServer]:
    with FakeServer(vllm(TinyEngine(root / "target"), root / "shared", [1, 3, 4])) as server:
        yield server


def run_config(root: Path, run: str) -> Config:
    config = tiny_config(root / run, max_steps=None, epochs=2, micro_batch_size=1, global_batch_size=4)
    config.run.data_root = str(root / "data")
    config.target = TargetConfig(
        name="tiny", path=str(root / "target"), dtype="float32", feature_layers=[0, 2], mask_token_id=MASK,
        shape=TargetShape("qwen3", 64, 96, 4, 4, 2, 16, VOCABULARY))
    config.features.codec, config.data.max_length = "fp32", 64
    return config


def served_config(root: Path, run: str, server: FakeServer, *, store: bool) -> Config:
    config = run_config(root, run)
    config.features.mode = "server"
    config.features.server.servers, config.features.server.store = [server.url], store
    config.features.server.logprob_tolerance = 1e-3
    return config


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_served_and_own_hidden_states_train_alike(root: Path, server: FakeServer,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    online = run_config(root, "online")
    online.features.mode = "online"
    train.run(online)
    stored = served_config(root, "stored", server, store=True)
    features.run(stored)
    assert len(server.requests) == SAMPLES + HELD_OUT
    train.run(stored)
    assert len(server.requests) == SAMPLES + HELD_OUT, "training reads the store"
    live = served_config(root, "live", server, store=False)
    features.run(live)
    assert "nothing to store" in caplog.text
    train.run(live)
    asked = len(server.requests) - SAMPLES - HELD_OUT
    assert asked >= 2 * SAMPLES + HELD_OUT, "every epoch asks again"
    assert losses(root / "online") == pytest.approx(losses(root / "stored"), rel=1e-4)
    assert losses(root / "online") == pytest.approx(losses(root / "live"), rel=1e-4)
    assert os.listdir(root / "shared") == []
    caplog.clear()
    session = load_run(stored)  # the whole target: of the same fingerprint as its head
    caplog.clear()
    warn_of_another_engine(stored, session.target.spec)
    warn_of_another_engine(online, session.target.spec)
    assert not caplog.messages, "nothing was said of quantisation"
    assert session.checkpoint == checkpoint.latest(root / "stored")


def test_a_quantised_engine_is_remembered(root: Path, server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    config = served_config(root, "fp8", server, store=True)
    config.features.server.quantization = "fp8"
    features.run(config)
    spec = load_head(config.target, device="cpu", cache_dir=root).spec
    warn_of_another_engine(config, spec)
    assert "hidden states of vllm serving tiny as fp8; here the target runs as not quantised" in caplog.text
    caplog.clear()
    quantised = dataclasses.replace(spec, quantization="compressed-tensors-fp8")
    warn_of_another_engine(config, quantised)
    assert not caplog.messages and quantization_of(config, quantised).same
    assert quantization_of(config, spec) == Quantization("fp8", None)


def test_a_server_that_contradicts_the_option_is_refused(root: Path, server: FakeServer) -> None:
    config = served_config(root, "awq", server, store=True)
    served: Any = SimpleNamespace(facts={"model": "tiny", "engine_quantization": "fp8"})
    config.features.server.quantization = "awq"
    with pytest.raises(InputRefused, match="quantization=awq, but the server of tiny says its weights are fp8"):
        features.served_facts(config, served)
    config.features.server.quantization = None
    assert features.served_facts(config, served)["quantization"] == "fp8"


def test_the_layers_of_the_target_are_never_loaded(root: Path, server: FakeServer,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the whole target was loaded")

    monkeypatch.setattr(train, "load_target", load)
    monkeypatch.setattr(features, "load_target", load)
    config = served_config(root, "head", server, store=True)
    features.run(config)
    train.run(config)
    assert len(losses(root / "head")) == 4


def test_without_a_store_a_sample_that_is_refused_ends_training(root: Path) -> None:
    engine = TinyEngine(root / "target")
    good = vllm(engine, root / "shared", [1, 3, 4])

    def answer(body: dict) -> dict:
        return {"status": 400, "text": "too long"} if len(body["prompt"]) == 27 else good(body)

    with FakeServer(answer) as server, pytest.raises(UserError, match="27 tokens got no hidden states: .*too long"):
        train.run(served_config(root, "refused", server, store=False))


def test_a_server_that_is_not_there_is_noticed_before_training(root: Path, server: FakeServer) -> None:
    config = served_config(root, "absent", server, store=False)
    config.features.server.servers = ["http://127.0.0.1:9/v1"]
    with pytest.raises(InputRefused, match="features.server.servers"):
        train.run(config)
