"""What W&B gets of finished stages: an offline run is read back record by record."""

import json
import os
import struct
from pathlib import Path
from typing import Any, Iterator

import pytest

from deepspec.artifacts import begin, complete
from deepspec.config.compose import compose_config
from deepspec.config.paths import features_dir, prompts_dir, responses_dir
from deepspec.config.schema import Config
from deepspec.stages.tracked import JOB_TYPES, names, read_result, track_stage
from tests.unit.report.make_run import LENGTH, make_run

TEXT = "a prompt nobody else may read"


def records(path: Path) -> Iterator[Any]:
    """Records of a ``.wandb`` file: a LevelDB log of protobuf messages in blocks of 32 KB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        message += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or its last part
            yield Record.FromString(message)
            message = b""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    made = compose_config(["+experiment=tiny", f"run.data_root={tmp_path / 'data'}", f"run.dir={tmp_path / 'run'}"])
    made.tracking.timeout_seconds = 300.0  # W&B's own process may start late on a busy machine
    run = make_run(tmp_path / "run")
    for folder, name, facts in ((prompts_dir(made), "prompts.jsonl", {"splits": {"train": 3}}),
                                (responses_dir(made), "responses.jsonl", {"counts": {"rows": 3}}),
                                (features_dir(made), "index.jsonl", {"bytes": 5})):
        manifest = begin(folder, "test", "f" * 8, facts=facts)
        (folder / name).write_text(json.dumps({"text": TEXT}) + "\n")
        complete(folder, manifest, [name])
    (run / "export").mkdir(exist_ok=True)
    for name in ("config.json", "README.md", "manifest.json", "model.safetensors"):
        (run / "export" / name).write_text("{}")
    tag = run / "checkpoints" / "step-7"
    tag.mkdir(parents=True)
    (tag / "manifest.json").write_text("{}")
    (run / "checkpoints" / "latest").write_text("step-7\n")
    return made


def read_back(run: Path) -> dict[str, dict[str, Any]]:
    """By job type: summary keys, artifacts with their entries, and configuration of each offline run."""
    found = {}
    for path in run.glob("wandb/offline-run-*/*.wandb"):
        job: dict[str, Any] = {"summary": {}, "artifacts": {}, "inputs": None}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run" and record.run.job_type:
                job |= {"job_type": record.run.job_type, "group": record.run.run_group}
            elif kind == "summary":
                job["summary"] |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
            elif kind == "artifact":
                entries = {entry.path: entry.ref for entry in record.artifact.manifest.contents}
                job["artifacts"][record.artifact.name] = (record.artifact.type, entries)
            elif kind == "config":
                for item in record.config.update:
                    if item.key == "inputs":
                        job["inputs"] = json.loads(item.value_json)
        found[job["job_type"]] = job
    return found


def test_every_stage_leaves_a_run_with_its_artifact_and_lineage(config: Config, tmp_path: Path) -> None:
    for stage in JOB_TYPES:
        track_stage(config, stage, os.environ)
    found = read_back(tmp_path / "run")
    assert set(found) == set(JOB_TYPES.values())
    assert {job["group"] for job in found.values()} == {"tiny"}
    named = names(config)
    for stage, job_type in JOB_TYPES.items():
        assert named[stage] in found[job_type]["artifacts"], stage
    responses = found["generate_responses"]
    assert responses["inputs"] == [named["prompts"]] and responses["summary"]["responses/counts/rows"] == 3
    kind, entries = responses["artifacts"][named["responses"]]
    assert kind == "responses" and entries["manifest.json"] == ""
    assert entries["responses.jsonl"] == (responses_dir(config) / "responses.jsonl").resolve().as_uri()
    assert found["extract_features"]["inputs"] == [named["responses"]]
    evaluation = found["evaluate_drafter"]
    assert evaluation["inputs"] == [named["train"], named["calibrate"], named["profile"]]
    table = next((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/eval/values*.json"))
    values = json.loads(table.read_text())
    assert values["columns"] == ["setting", "benchmark", "position", "metric", "value"]
    rows = [row for row in values["data"] if row[3] == "conditional_acceptance"]
    assert {row[2] for row in rows} == set(range(1, LENGTH + 1))
    assert found["export_drafter"]["artifacts"][named["export"]][1]["model.safetensors"].startswith("file://")


def test_no_text_of_a_prompt_leaves(config: Config, tmp_path: Path) -> None:
    for stage in ("prompts", "responses", "features"):
        track_stage(config, stage, os.environ)
    written = [path for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
    assert written and not any(TEXT.encode() in path.read_bytes() for path in written)


def test_the_checkpoint_is_an_artifact_of_training(config: Config) -> None:
    left = read_result(config, "train")
    assert left.artifact is not None and left.artifact.aliases == ("step-7",)
    assert left.inputs == (names(config)["features"], names(config)["responses"])


def test_weights_are_uploaded_only_when_asked_for(config: Config, tmp_path: Path) -> None:
    kept = read_result(config, "export").artifact
    assert kept is not None and [path.name for path in kept.references] == ["model.safetensors"]
    config.tracking.upload_drafter = True
    sent = read_result(config, "export").artifact
    assert sent is not None and sent.references == ()
    assert tmp_path / "run" / "export" / "model.safetensors" in sent.files


def test_nothing_is_written_when_tracking_is_off(config: Config, tmp_path: Path) -> None:
    for stage in JOB_TYPES:
        track_stage(config, stage, {"WANDB_MODE": "disabled"})
    assert not (tmp_path / "run" / "wandb").exists()


def test_stages_that_left_nothing_are_no_error(tmp_path: Path) -> None:
    config = compose_config(["+experiment=tiny", f"run.data_root={tmp_path}", f"run.dir={tmp_path / 'run'}"])
    for stage in (*JOB_TYPES, "train"):
        assert read_result(config, stage).artifact is None
