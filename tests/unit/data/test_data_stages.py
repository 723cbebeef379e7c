"""The three data stages together: skipped when done, continued when killed, refused when mixed up."""

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, last_user, reply
from tiny_data import CHAT_TEMPLATE, chat, save_target, tiny_config

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data import rendezvous
from deepspec.data.rendezvous import Rendezvous
from deepspec.data.responses import read_responses
from deepspec.data.sources import CachedFeatures, Expected
from deepspec.errors import InputRefused, UserError
from deepspec.stages import features, prompts, responses

ROOT = Path(__file__).resolve().parents[3]


def rows(count: int = 14) -> list[dict[str, Any]]:
    return [chat(*(["fox %d" % index] + ["?", "and the dog?"] * (index % 3 == 0))) for index in range(count)]


def config_in(folder: Path, seed: int = 0) -> Config:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    config = tiny_config(folder / "data", save_target(folder / "target", seed), path)
    config.responses.error_limit = 0.5  # a random target says empty things now and then
    return config


@pytest.fixture()
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def run_all(config: Config) -> None:
    for stage in (prompts, responses, features):
        stage.run(config)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_stages_build_on_each_other_and_are_skipped_when_done(config: Config,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    run_all(config)
    manifests = [artifacts.read_manifest(folder(config)) for folder in
                 (paths.prompts_dir, paths.responses_dir, paths.features_dir)]
    assert [manifest.status for manifest in manifests] == ["complete"] * 3
    assert manifests[1].inputs == {"prompts": manifests[0].fingerprint}
    assert manifests[2].inputs == {"responses": manifests[1].fingerprint}
    assert manifests[1].facts["sampling"]["temperature"] == 1.0
    assert manifests[1].facts["template_kwargs"] == {"enable_thinking": False}
    facts = manifests[2].facts
    assert abs(facts["estimated_bytes"] / facts["bytes"] - 1) < 0.05
    renderer_hash = manifests[1].facts["renderer_hash"]
    for split in ("train", "held_out"):
        store = CachedFeatures(paths.features_dir(config), split=split, expected=Expected(renderer_hash=renderer_hash))
        assert len(store) == facts["samples"][split] > 0
    before = snapshot(paths.features_dir(config).parent)
    with caplog.at_level(logging.INFO):
        run_all(config)
    assert [sum(f"{stage}: up to date" in message for message in caplog.messages)
            for stage in ("prompts", "responses", "features")] == [1, 1, 1]
    assert snapshot(paths.features_dir(config).parent) == before


def test_an_edited_file_of_prompts_is_another_input(config: Config, tmp_path: Path) -> None:
    run_all(config)
    answers = {row.id: row.turns for row in read_responses(paths.responses_dir(config))}
    with open(tmp_path / "prompts.jsonl", "a", encoding="utf-8") as handle:
        handle.write("\n" + json.dumps(chat("quick")) + "\n")
    run_all(config)
    grown = {row.id: row.turns for row in read_responses(paths.responses_dir(config))}
    assert len(grown) == len(answers) + 1
    assert answers.items() <= grown.items()  # kept, not asked again


def test_a_missing_stage_names_its_command(config: Config) -> None:
    with pytest.raises(InputRefused, match="collect_prompts.py"):
        responses.run(config)
    with pytest.raises(InputRefused, match="generate_responses.py"):
        features.run(config)


def test_killed_answers_are_continued(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts.run(config)
    original, count = responses.PartWriter.answer, 0

    def answer(self: Any, row: Any) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        original(self, row)

    monkeypatch.setattr(responses.PartWriter, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        responses.run(config)
    monkeypatch.undo()
    assert not artifacts.is_complete(paths.responses_dir(config))
    responses.run(config)
    interrupted = snapshot(paths.responses_dir(config))["responses.jsonl"]
    for path in paths.responses_dir(config).rglob("*.json*"):
        path.unlink()
    responses.run(config)
    assert snapshot(paths.responses_dir(config))["responses.jsonl"] == interrupted


def test_killed_features_are_continued(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.features.shard_megabytes = 0  # a shard per sample
    prompts.run(config)
    responses.run(config)
    original, count = features.FeatureWriter.write, 0

    def write(self: Any, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise KeyboardInterrupt
        original(self, *arguments)

    monkeypatch.setattr(features.FeatureWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        features.run(config)
    monkeypatch.undo()
    kept = {name: content for name, content in snapshot(paths.features_dir(config)).items() if name.endswith(".bin")}
    assert len(kept) == 4
    features.run(config)
    assert kept.items() <= snapshot(paths.features_dir(config)).items()
    store = CachedFeatures(paths.features_dir(config))
    assert len(store.get(range(len(store)))) == len(store)


def test_a_bad_sample_is_set_aside_and_too_many_stop(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts.run(config)
    responses.run(config)
    original = features.encode_samples
    bad: list[str] = []

    def encode(target: Any, samples: Any) -> list:
        items = original(target, samples)
        for item in items:
            if item.sample.sample_id in bad:
                item.features[2, 5] = float("nan")
        return items

    monkeypatch.setattr(features, "encode_samples", encode)
    names = [row.id for row in read_responses(paths.responses_dir(config), "train")]
    bad[:] = names[:3]
    with pytest.raises(UserError, match="unusable hidden states.*layer 0"):
        features.run(config)
    bad[:] = names[:1]
    features.run(config)
    manifest = artifacts.read_manifest(paths.features_dir(config))
    assert [name.split("#")[0] for name in manifest.facts["quarantined"]] == names[:1]
    found = CachedFeatures(paths.features_dir(config))
    assert names[0] not in {info.sample_id for info in found.samples}
    assert torch.isfinite(found.get([0])[0].features).all()


def test_hidden_states_that_are_not_those_of_the_logits_are_refused(config: Config,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample of a build is checked: here every row is that of the token before."""
    prompts.run(config)
    responses.run(config)
    original = features.encode_samples
    monkeypatch.setattr(features, "encode_samples", lambda *arguments: [
        replace(item, last_hidden=item.last_hidden.roll(1, dims=0)) for item in original(*arguments)])
    with pytest.raises(InputRefused, match="do not reproduce its logits"):
        features.run(config)
    assert not list(paths.features_dir(config).glob("shard-*"))


def test_a_disk_that_is_too_small_is_refused_before_extraction(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    prompts.run(config)
    responses.run(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(InputRefused, match="10 B free"):
        features.run(config)
    assert not list(paths.features_dir(config).glob("*"))


def test_another_template_or_target_is_refused_by_name(config: Config, tmp_path: Path) -> None:
    prompts.run(config)
    responses.run(config)
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE + "\n")
    with pytest.raises(InputRefused, match="renderer_hash="):
        features.run(config)
    save_target(tmp_path / "target", seed=1)
    with pytest.raises(InputRefused, match="target_fingerprint="):
        features.run(config)


def test_half_done_answers_of_another_target_are_not_continued(config: Config, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    prompts.run(config)
    config.responses.error_limit = -1.0
    with pytest.raises(UserError, match="error_limit"):
        responses.run(config)
    save_target(tmp_path / "target", seed=1)
    with pytest.raises(InputRefused, match="has answers made with target_fingerprint="):
        responses.run(config)


def test_online_features_store_nothing(config: Config) -> None:
    config.features = replace(config.features, mode="online")
    features.run(config)
    assert not paths.features_dir(config).exists()


def test_answers_from_a_server_reach_the_same_store(config: Config) -> None:
    prompts.run(config)
    config.responses.error_limit = 0.02
    with FakeServer(lambda body: {"status": 400} if "fox 3" in last_user(body) else reply("the quick dog")) as server:
        config.responses = replace(config.responses, backend="server", servers=[server.url], retries=3)
        with pytest.raises(UserError, match="1 failed.*Failures are 7.1%.*errors.jsonl"):
            responses.run(config)
        assert not artifacts.is_complete(paths.responses_dir(config))
        asked = len(server.requests)
        config.responses.error_limit = 0.1
        responses.run(config)
        assert len(server.requests) == asked + 1  # only the failed row again
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.requests)
    features.run(config)
    assert artifacts.read_manifest(paths.responses_dir(config)).facts["counts"]["failed"] == 1
    assert len(CachedFeatures(paths.features_dir(config))) > 0


def test_ranks_meet_through_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(distributed, "init", lambda: None)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    meetings = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        meetings.append(Rendezvous(tmp_path, "work"))
    for stale in (0, 1, 3):
        (tmp_path / f".work-0000{stale}.done").write_text("{}")
    for meeting in meetings:
        meeting.start()
    assert not list(tmp_path.glob(".work*.done"))
    meetings[0].finish({"rows": 1})
    original, polls = time.sleep, 0

    def sleep(seconds: float) -> None:
        nonlocal polls
        polls += 1
        original(seconds)
        if polls == 50:
            meetings[1].finish({"rows": 2})

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    with caplog.at_level(logging.INFO):
        assert meetings[0].collect() == [{"rows": 1}, {"rows": 2}]
    assert any("waiting for 1 of 2 ranks (rank 1 first)" in message for message in caplog.messages)
    for meeting in meetings:
        meeting.end()
    assert not list(tmp_path.iterdir())


LAUNCHED = """
import sys
sys.argv = [word for word in sys.argv if not word.startswith("--local_rank")]
from pathlib import Path
from test_data_stages import run_all, tiny_config
from deepspec import distributed
import torch
torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = tiny_config(folder / "data", folder / "target", folder / "prompts.jsonl")
config.responses.error_limit = 0.5
run_all(config)
distributed.shutdown()
"""


@pytest.mark.slow
def test_two_ranks_under_the_launcher_give_the_answers_of_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (config_in(tmp_path / name) for name in ("one", "two"))
    run_all(one)
    script = tmp_path / "run.py"
    script.write_text(LAUNCHED)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "DS_ACCELERATOR": "cpu"}
    launcher = Path(sys.executable).with_name("deepspeed")
    done = subprocess.run(
        [str(launcher), "--num_accelerators", "2", str(script), str(tmp_path / "two")], env=environment,
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = ({row.id: row for row in read_responses(paths.responses_dir(config))} for config in (one, two))
    assert first == second
    left, right = (CachedFeatures(paths.features_dir(config)) for config in (one, two))
    assert left.samples == right.samples
    assert len({record.shard for record in right.store.records}) == 2
    for a, b in zip(left.get(range(len(left))), right.get(range(len(right)))):
        torch.testing.assert_close(a.features, b.features, atol=1e-5, rtol=1e-5)
