"""Confidence and calibrate stages: records from real decoding of a tiny target, refit, choice of the head."""

import json
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepspec.artifacts import begin, complete, read_manifest
from deepspec.calibration import Calibration, ConfidenceRecords, RecordsOrigin, sigmoid, survival_probability
from deepspec.calibration.head import BIAS, WEIGHT, head_from_tensors, load_confidence, save_head
from deepspec.calibration.refit import LinearHead, fit_head, outcome_brier, refit_head
from deepspec.config.paths import responses_dir
from deepspec.config.schema import Config
from deepspec.errors import InputRefused
from deepspec.stages import calibrate, confidence
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.training.session import RunSession
from tests.unit.decoding.tiny import tiny_drafter, tiny_target

SHA = "c" * 64


@pytest.fixture
def stage(monkeypatch):
    """The stages, with a session that hands out the tiny pair and a checkpoint of the drafter's own weights."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    session = RunSession(target, drafter, Path("step-1"), drafter.shared, SHA, 1)
    monkeypatch.setattr(confidence, "load_run", lambda config: session)
    monkeypatch.setattr(calibrate, "chosen_checkpoint", lambda config: Path("step-1"))
    monkeypatch.setattr(calibrate, "drafter_sha256", lambda checkpoint, weights: SHA)
    monkeypatch.setattr(confidence, "read_head", lambda path: weights)
    return types.SimpleNamespace(confidence=confidence, calibrate=calibrate, drafter=drafter, session=session,
                                 weights=weights)


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.run.name, config.run.dir, config.run.data_root = "r", str(tmp_path / "run"), str(tmp_path / "data")
    config.target.name, config.target.path, config.target.feature_layers = "tiny", "", [0, 2]
    config.drafter.block_size = 4
    config.confidence.max_new_tokens, config.confidence.batch_size, config.confidence.epochs = 24, 8, 10
    config.calibration.bootstrap = 10
    directory = responses_dir(config)
    directory.mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = []
    for i in range(30):
        turn = {"prompt_ids": random.integers(3, 48, 6).tolist(), "response_ids": [4, 1], "finish_reason": "stop"}
        rows.append({"id": f"p{i}", "domain": "math" if i % 2 else "chat", "turns": [turn],
                     "split": "train" if i < 6 else "held_out"})
    (directory / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def synthetic(scale=3.0, blocks=6000, width=24, seed=0):
    """Records whose true confidence is linear in the inputs, and a joint head that is ``scale`` times too sure."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=width) / np.sqrt(width) * 2
    inputs = (random.normal(size=(blocks, 4, width)) * 3 + 1).astype(np.float16)
    z = (inputs.astype(np.float32) - 1) / 3 @ truth.astype(np.float32) + 0.8
    accepted = np.cumprod(random.random((blocks, 4)) < sigmoid(z), axis=1).sum(axis=1)
    names = np.array([f"c{i % 60}" for i in range(blocks)])
    joint = LinearHead((scale * truth / 3).astype(np.float32), float(scale * (0.8 - truth.sum() / 3)))
    origin = RecordsOrigin(4, SHA, 1.0, (1.0,) * 4)
    return ConfidenceRecords(origin, joint.logits(inputs), accepted, np.full(blocks, 4), sigmoid(z).astype(np.float32),
                             names, np.full(blocks, "math"), inputs), joint


def test_refit_mends_an_over_confident_head():
    records, joint = synthetic()
    result = refit_head(records, joint, epochs=20, lr=1e-2, seed=0)
    assert result.chosen == "refit" and result.brier_refit < result.brier_joint - 0.01
    assert result.validation_loss[result.epoch] == min(result.validation_loss)
    error = np.abs(sigmoid(result.head.logits(records.inputs)) - records.analytic_rate).mean()
    assert error < 0.03


def test_refit_keeps_a_head_that_is_right():
    records, joint = synthetic(scale=1.0)
    result = refit_head(records, joint, epochs=3, lr=1e-2, seed=0)
    assert result.chosen == "joint" or result.brier_joint - result.brier_refit < 1e-3


def test_refit_reads_only_reached_positions():
    records, joint = synthetic(blocks=1500)
    spoiled = records.analytic_rate.copy()
    spoiled[~records.reached] = np.nan
    first = refit_head(records, joint, epochs=2, lr=1e-2, seed=0)
    second = refit_head(replace(records, analytic_rate=spoiled), joint, epochs=2, lr=1e-2, seed=0)
    assert (first.head.weight == second.head.weight).all()


def test_refit_of_one_conversation_does_nothing():
    records, joint = synthetic(blocks=60)
    result = refit_head(records.select(records.conversation == "c0"), joint, epochs=2, lr=1e-2, seed=0)
    assert result.chosen == "joint" and result.head is joint


def test_start_is_kept_when_no_epoch_improves_it():
    records, joint = synthetic(scale=1.0, blocks=400)
    inputs, rate = records.inputs.reshape(-1, 24), records.analytic_rate.reshape(-1).astype(np.float64)
    head, losses = fit_head(inputs, 1 - rate, (inputs, rate), joint, epochs=3, lr=1e-2, seed=0)
    assert head is joint and len(losses) == 4


def test_outcome_brier_by_hand():
    records, _ = synthetic(blocks=2)
    records = replace(records, accepted=np.array([0, 4]))
    logits = np.zeros((2, 4), dtype=np.float32)
    assert outcome_brier(records, logits) == pytest.approx(0.25)


def test_cut_at_a_drafted_end_token_does_not_depend_on_the_outcome(stage):
    cut = stage.confidence.known_positions
    assert cut(4, np.array([7, 5, 1, 9]), frozenset({1})) == 2  # x_2 ends the turn: positions 3 and 4 are unknown
    assert cut(4, np.array([1, 5, 6, 9]), frozenset({1})) == 4  # the anchor does not count
    assert cut(1, np.array([7, 5, 1, 9]), frozenset({1})) == 1


def test_records_agree_with_the_drafter(stage, config):
    records = stage.confidence.collect(config, stage.session)
    assert len(records) > 50 and set(records.domain) == {"math", "chat"} and len(set(records.conversation)) <= 24
    assert records.inputs.shape == (len(records), 4, 72) and records.inputs.dtype == np.float16
    logits = head_from_tensors(stage.weights).logits(records.inputs)
    assert np.abs(logits - records.logits).max() < 0.05  # half precision of the inputs
    assert ((records.analytic_rate >= 0) & (records.analytic_rate <= 1)).all()
    reached = records.reached[:, 0]
    rate, seen = records.analytic_rate[reached, 0].mean(), records.survived[reached, 0].mean()
    assert abs(rate - seen) < 4 * 0.5 / np.sqrt(reached.sum())


def test_stage_writes_records_summary_and_calibration(stage, config, caplog):
    with caplog.at_level("INFO"):
        stage.confidence.run(config)
        stage.calibrate.run(config)
    run = stage.confidence.run_dir(config)
    manifest = read_manifest(run / "confidence")
    assert manifest.status == "complete" and manifest.facts["drafter_sha256"] == SHA
    summary = json.loads((run / "confidence" / "summary.json").read_text())
    for head in ("joint", "refit"):
        assert {"auc", "brier", "ece"} <= set(summary[head]) and len(summary[head]["ece"]) == 4
    assert summary["chosen"] == manifest.facts["chosen"] and "Brier" in summary["rule"]
    assert {"auc", "brier", "ece"} == set(summary["comparison"])
    assert all(len(entry["difference_ci95"]) == 2 for entry in summary["comparison"].values())
    assert ("head.safetensors" in manifest.files) == (summary["chosen"] == "refit")
    records = ConfidenceRecords.load(run / "confidence" / "records.npz")
    assert records.origin.confidence_head == summary["chosen"] and records.inputs is None
    assert records.origin.thinking is False and records.origin.verification == "full"
    calibration = Calibration.load(run / "calibration.json", block_size=4, drafter_sha256=SHA)
    parts = summary["blocks_per_split"]
    assert calibration.num_samples == parts["report"] and calibration.fit_split["blocks"] == parts["fit"]
    survival = survival_probability(calibration.apply(records.logits))
    assert survival.shape == records.logits.shape and "noise floor" in caplog.text


def test_stage_starts_from_the_joint_head_even_if_a_refit_is_in_place(stage, config):
    stage.drafter.confidence_head.proj.weight.zero_()
    stage.confidence.run(config)
    assert torch.equal(stage.drafter.confidence_head.proj.weight, stage.weights[WEIGHT])


def test_records_are_the_same_on_any_number_of_ranks(stage, config, monkeypatch):
    alone = stage.confidence.collect(config, stage.session)
    parts = []
    monkeypatch.setattr(stage.confidence.distributed, "world_size", lambda: 2)
    for rank in (1, 0):
        monkeypatch.setattr(stage.confidence.distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(stage.confidence.distributed, "gather_objects",
                            lambda own, rank=rank: parts.append(own) if rank else [own, *parts])
        records = stage.confidence.collect(config, stage.session)
    assert (records.conversation == alone.conversation).all() and (records.accepted == alone.accepted).all()
    assert np.abs(records.logits - alone.logits).max() < 1e-4


def test_limits_on_prompts_and_blocks(stage, config):
    requests = stage.confidence.held_out_requests(config, 6)
    assert len(requests) == 6 and sum(request.domain == "math" for request in requests) == 3
    config.confidence.max_prompts, config.confidence.batch_size, config.confidence.max_blocks = None, 2, 1
    records = stage.confidence.collect(config, stage.session)
    assert len(set(records.conversation)) <= 4


def test_without_a_confidence_head_nothing_is_written(stage, config):
    config.drafter.confidence_head = False
    stage.confidence.run(config)
    stage.calibrate.run(config)
    assert not stage.confidence.run_dir(config).exists()


def test_without_refit_the_joint_head_stays(stage, config):
    config.confidence.refit = False
    stage.confidence.run(config)
    stage.calibrate.run(config)
    run = stage.confidence.run_dir(config)
    summary = json.loads((run / "confidence" / "summary.json").read_text())
    assert summary["chosen"] == "joint" and summary["refit"] is None and summary["blocks_per_split"]["refit"] == 0
    assert not (run / "confidence" / "head.safetensors").exists()
    assert load_confidence(run, stage.drafter, SHA) is False


def test_too_few_conversations_leave_the_records_as_they_were(stage, config):
    stage.confidence.run(config)
    folder = stage.confidence.run_dir(config) / "confidence"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    config.confidence.max_prompts = 1
    with pytest.raises(InputRefused, match="1 conversations are too few.*none is left for"):
        stage.confidence.run(config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_held_out_responses(stage, config):
    path = responses_dir(config) / "responses.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:6]))
    with pytest.raises(InputRefused, match="no held-out responses"):
        stage.confidence.held_out_requests(config, 6)


def test_more_prompts_than_there_are_answers(config, tmp_path, target_tokenizer, caplog):
    rows = [{"prompt": "w3 w4 w5", "id": "a", "domain": "math"}, {"turns": ["w7", "w8"]},
            {"prompt": "w9", "id": "t", "split": "train"}, {"prompt": "w3 w4", "id": "seen"},
            {"prompt": "w1 " * 40, "id": "long"}]
    config.confidence.prompts, config.data.max_length = str(tmp_path / "p.jsonl"), 30
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = responses_dir(config)
    directory.mkdir(parents=True, exist_ok=True)  # another maximum length is another data set
    turn = {"prompt_ids": [3, 4], "response_ids": [4, 1], "finish_reason": "stop"}
    with open(directory / "responses.jsonl", "a", encoding="utf-8") as handle:
        handle.write(json.dumps({"id": "own", "domain": "math", "turns": [turn], "split": "train"}) + "\n")
    with caplog.at_level("INFO"):
        found = {one.id: one for one in held_out_requests(config, None, target_tokenizer)}
    assert set(found) == {"a", "row-2"} and found["a"].domain == "math" and found["a"].prompt_ids == (3, 4, 5)
    assert found["row-2"].prompt_ids == (7,) and "2 of the training split, 1 longer" in caplog.text
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "split": "train"}\n')
    with pytest.raises(InputRefused, match="p.jsonl' has no prompt that"):
        held_out_requests(config, None, target_tokenizer)
    (tmp_path / "p.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(InputRefused, match="p.jsonl:1: not a prompt"):
        held_out_requests(config, None, target_tokenizer)


@pytest.fixture
def target_tokenizer():
    """Token ids are the numbers in the text."""
    def template(messages, **options):
        return [int(word[1:]) for message in messages for word in message["content"].split()]

    return types.SimpleNamespace(chat_template="any", apply_chat_template=template)


def test_calibrate_refuses_records_of_another_temperature(stage, config):
    stage.confidence.run(config)
    config.confidence.temperature = 0.0
    with pytest.raises(InputRefused, match="sampling_temperature is 1.0, needed is 0.0"):
        stage.calibrate.run(config)


def test_chosen_head_is_put_in_place_for_these_weights_only(stage, config, caplog):
    directory = stage.confidence.run_dir(config) / "confidence"
    head = LinearHead(np.arange(72, dtype=np.float32), -0.5)
    manifest = begin(directory, "confidence", "f", facts={"drafter_sha256": SHA, "chosen": "refit"})
    assert load_confidence(directory.parent, stage.drafter, SHA) is False  # unfinished
    save_head(directory / "head.safetensors", head)
    complete(directory, manifest, ["head.safetensors"])
    assert load_file(directory / "head.safetensors")[WEIGHT].shape == (1, 72)
    assert load_confidence(directory.parent, stage.drafter, "e" * 64) is False and "another checkpoint" in caplog.text
    assert load_confidence(directory.parent, stage.drafter, SHA) is True
    assert stage.drafter.confidence_head.proj.bias.item() == -0.5
    assert stage.drafter.confidence_head.proj.weight[0, 5] == 5.0 and BIAS.endswith("bias")
    (directory / "head.safetensors").write_bytes(b"torn")
    with pytest.raises(InputRefused, match="is not what the confidence stage wrote"):
        load_confidence(directory.parent, stage.drafter, SHA)
