"""The train stage on real parts: a random target, stored responses, features on disk or computed while training."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "targets"))

from tiny_targets import FEATURES, ROWS, random_ids, save_tiny  # noqa: E402
from tiny_training import tiny_config  # noqa: E402

from deepspec.artifacts import begin, complete  # noqa: E402
from deepspec.config.paths import responses_dir  # noqa: E402
from deepspec.config.schema import TargetConfig, TargetShape  # noqa: E402
from deepspec.errors import InputRefused  # noqa: E402
from deepspec.stages import export, features, train  # noqa: E402
from deepspec.training import checkpoint  # noqa: E402
from deepspec.training.session import load_run  # noqa: E402


def make_config(root: Path, run: str = "run", **trainer):
    config = tiny_config(root / run, **({"max_steps": 3, "micro_batch_size": 1} | trainer))
    config.run.data_root = str(root / "data")
    config.target = TargetConfig(
        name="tiny", source="hf", path=str(root / "target"), dtype="float32", feature_layers=list(FEATURES),
        mask_token_id=4, shape=TargetShape("qwen3", 64, 96, 4, 4, 2, 16, ROWS),
    )
    config.features.codec = "fp32"
    config.data.max_length = 64
    return config


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stage")
    save_tiny(root / "target")
    config = make_config(root)
    directory = responses_dir(config)
    manifest = begin(directory, "responses", "fingerprint")
    with open(directory / "responses.jsonl", "w") as handle:
        for index in range(12):
            ids = random_ids(30, seed=index).tolist()
            turn = {"prompt_ids": ids[:8], "response_ids": ids[8:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": ("math", "chat")[index % 2], "messages": [],
                                     "split": "held_out" if index >= 8 else "train", "turns": [turn]}) + "\n")
    complete(directory, manifest, ["responses.jsonl"])
    features.run(config)
    return root


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_cached_and_online_features_train_alike(root, caplog):
    caplog.set_level(logging.INFO)
    cached, online = make_config(root, "cached", keep_last=1), make_config(root, "online")
    online.features.mode = "online"
    train.run(cached)
    train.run(online)
    assert losses(root / "cached") == pytest.approx(losses(root / "online"), rel=1e-5)
    assert len((root / "cached/validation.jsonl").read_text().splitlines()) == 1
    assert "trained to step 3 of 3" in caplog.text


def test_trainings_of_several_seeds_share_one_store(root):
    found = {}
    for name, step in (("none", None), ("same", 0), ("other", 1)):
        config = make_config(root, f"seed-{name}")
        config.trainer.seed = None if step is None else config.run.seed + step
        train.run(config)
        found[name] = losses(root / f"seed-{name}")
    assert found["none"] == found["same"] != found["other"]
    config.trainer.seed += 1
    with pytest.raises(InputRefused, match=f"seed: {config.trainer.seed - 1} in the checkpoint"):
        train.run(config)


def test_decodes_held_out_prompts_while_training(root, caplog):
    caplog.set_level(logging.INFO)
    config = make_config(root, "decoding", decode_every=2, decode_prompts=3, decode_tokens=9)
    train.run(config)
    found = [json.loads(line) for line in (root / "decoding/validation.jsonl").read_text().splitlines()]
    assert [(row["step"], "decoded" in row) for row in found] == [(2, True), (3, False)]
    decoded = found[0]["decoded"]
    assert decoded["num_prompts"] == 3 and decoded["tokens"] >= 3 and decoded["rounds"] > 0
    assert 1.0 <= decoded["acceptance_length"] <= 5.0 and set(decoded["domains"]) == {"chat", "math"}
    assert "decoded 3 held-out prompts at step 2" in caplog.text
    plain = make_config(root, "not-decoding")
    train.run(plain)
    assert losses(root / "decoding") == losses(root / "not-decoding"), "looking must not change training"


def test_later_stages_get_target_and_drafter_that_belong_together(root):
    config = make_config(root, "session")
    train.run(config)
    session = load_run(config)
    assert session.step == 3 and session.checkpoint == checkpoint.latest(root / "session")
    assert session.drafter_sha256 == checkpoint.drafter_sha256(session.checkpoint)
    assert not session.drafter.training and not any(p.requires_grad for p in session.drafter.parameters())
    assert torch.equal(session.shared.embed, session.target.embed_weight)
    for change, message in (
        ({"mask_token_id": 3}, "mask_token_id: 4 in the checkpoint, 3 in the configuration"),
        ({"feature_layers": [0, 1]}, r"feature_layers: \(0, 2\) in the checkpoint, \(0, 1\)"),
    ):
        other = make_config(root, "session")
        other.target = replace(other.target, **change)
        with pytest.raises(InputRefused, match=message):
            load_run(other)
    other = make_config(root, "session")
    other.drafter.block_size = 7
    with pytest.raises(InputRefused, match="block_size: 4 in the checkpoint, 7"):
        load_run(other)
    config.export.checkpoint = "step-9"
    with pytest.raises(InputRefused, match="step-3"):
        load_run(config)


def test_another_target_is_refused_before_training_and_after(root, tmp_path):
    config = make_config(root, "moved")
    train.run(config)
    save_tiny(tmp_path / "target", rms_norm_eps=1e-3)
    config.target.path = str(tmp_path / "target")
    with pytest.raises(InputRefused, match="target"):
        load_run(config)


def test_warm_start_and_init_from(root):
    config = make_config(root, "warm", max_steps=1)
    config.drafter.warm_start = True
    train.run(config)
    again = make_config(root, "continued", max_steps=1)
    again.drafter.init_from = str(checkpoint.latest(root / "warm") / "drafter")
    train.run(again)
    again = make_config(root, "wrong")
    again.drafter.init_from = str(root)
    with pytest.raises(InputRefused, match="Give the folder of a drafter"):
        train.run(again)


def test_stop_signal_ends_the_process_with_zero(root, monkeypatch):
    config = make_config(root, "stopped")

    def stopped(self):
        return train.TrainResult(2, 3, True, True, {"loss": 1.0, "acceptance_length_proxy": 1.0, "skipped_steps": 0})

    monkeypatch.setattr(train.DrafterTrainer, "run", stopped)
    monkeypatch.setattr(train.distributed, "shutdown", lambda: None)
    with pytest.raises(SystemExit) as ended:
        train.run(config)
    assert ended.value.code == 0


def test_averaged_weights_are_what_later_stages_get_on_request(root):
    config = make_config(root, "averaged", ema_decay=0.9)
    train.run(config)
    plain = load_run(config)
    config.export.weights, config.export.checkpoint = "ema", "best"
    session = load_run(config)
    assert session.weights == "ema" and session.checkpoint == plain.checkpoint
    assert session.drafter_sha256 == checkpoint.drafter_sha256(session.checkpoint, "ema") != plain.drafter_sha256
    stored = checkpoint.load_tensors(session.checkpoint)["ema"]
    assert all(torch.equal(p, stored[name]) for name, p in session.drafter.named_parameters())
    request = export.request_for(config, session)
    assert all(torch.equal(p, stored[name]) for name, p in request.drafter.named_parameters())
    assert request.origin.drafter_sha256 == session.drafter_sha256


def test_a_reduced_draft_vocabulary_is_chosen_by_the_data_and_kept(root, caplog):
    caplog.set_level(logging.INFO)
    config = make_config(root, "reduced")
    config.drafter.draft_vocab_size = 40
    train.run(config)
    shape = checkpoint.read_shape(checkpoint.latest(root / "reduced"))
    assert len(shape.draft_ids) == 40 and list(shape.draft_ids) == sorted(set(shape.draft_ids))
    rows = [json.loads(line) for line in (root / "reduced/metrics.jsonl").read_text().splitlines()]
    assert all(0.0 < row["draft_vocab_coverage"] < 1.0 for row in rows)
    assert "draft vocabulary: 40 of" in caplog.text
    config.trainer.max_steps = 4
    train.run(config)  # the same tokens again
    assert "trained to step 4 of 4" in caplog.text
    assert load_run(config).drafter.shape == checkpoint.read_shape(checkpoint.latest(root / "reduced"))
    config.drafter.draft_vocab_size = None
    with pytest.raises(InputRefused, match="draft_ids: 40 values that begin"):
        load_run(config)


def test_medusa_trains_from_its_store_to_its_export(root, caplog):
    caplog.set_level(logging.INFO)
    config = make_config(root, "medusa")
    config.drafter = replace(config.drafter, algorithm="medusa", num_layers=1, head="none", confidence_head=False,
                             confidence_with_markov=False)
    config.objective = replace(config.objective, ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0)
    config.target.feature_layers = [3]
    features.run(config)
    train.run(config)
    export.run(config)
    values = json.loads((root / "medusa/export/config.json").read_text())
    assert values["architectures"] == ["MedusaModel"] and values["num_heads"] == config.drafter.block_size
    assert "a medusa drafter" in (root / "medusa/export/README.md").read_text()
