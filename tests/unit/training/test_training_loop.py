"""The loop: rows of metrics, steps that must be skipped, memory, validation."""

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import SHAPE, TinySource, tiny_config, tiny_trainer

from deepspec.errors import UserError
from deepspec.tracking import Tracker
from deepspec.training import checkpoint
from deepspec.training.memory import peak_bytes, release_free_pages
from deepspec.training.metrics import MetricsFile, Sums, objective_row
from deepspec.training.validate import choose, make_validator

FIELDS = ["step", "epoch", "samples", "loss", "loss_ce", "loss_tv", "loss_confidence", "acceptance_rate@1",
          "acceptance_rate@2", "acceptance_rate@3", "acceptance_rate@4", "acceptance_length_proxy", "lr", "grad_norm",
          "skipped_steps", "seconds", "tokens_per_second", "peak_memory_bytes", "wait_share", "forward_share",
          "backward_share", "optimizer_share"]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_exactly_the_fields_of_the_contract(tmp_path):
    tiny_trainer(tmp_path).run()
    found = rows(tmp_path / "metrics.jsonl")
    assert [list(row) for row in found] == [FIELDS] * 10
    assert [row["step"] for row in found] == list(range(1, 11))
    assert [row["epoch"] for row in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [row["samples"] for row in found] == [4 * step for step in range(1, 11)]
    assert found[0]["lr"] == 0.5e-2 and found[1]["lr"] == 1e-2 and max(row["lr"] for row in found) == 1e-2
    assert all(1.0 <= row["acceptance_length_proxy"] <= 5.0 for row in found)
    assert all(row["loss"] == pytest.approx(0.1 * row["loss_ce"] + 0.9 * row["loss_tv"] + row["loss_confidence"])
               for row in found)
    assert found[-1]["loss"] < found[0]["loss"]


def test_saves_and_logs_count_optimizer_steps(tmp_path):
    tiny_trainer(tmp_path, micro_batch_size=1, save_every=4, log_every=3, keep_last=9).run()
    assert checkpoint.complete_tags(tmp_path) == ["step-4", "step-8", "step-10"]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [3, 6, 9, 10]


def test_epochs_decide_and_the_tail_is_trained(tmp_path):
    trainer = tiny_trainer(tmp_path, source=TinySource(10), epochs=2, max_steps=None)
    assert trainer.run().step == 6
    assert [row["samples"] for row in rows(tmp_path / "metrics.jsonl")] == [4, 8, 10, 14, 18, 20]


def test_each_epoch_reads_every_sample_once(tmp_path):
    source = TinySource(10)
    trainer = tiny_trainer(tmp_path, source=source, epochs=3, max_steps=None)
    seen = [sorted(i for w in windows for s in w.steps for i in s.indices)
            for windows in zip(*[iter(trainer._windows())] * 3)]
    assert seen == [list(range(10))] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision,value", [("fp32", math.nan), ("bf16", math.inf)])
def test_bad_sample_costs_its_step_and_nothing_else(tmp_path, caplog, stage, precision, value):
    config = tiny_config(tmp_path, precision=precision, max_steps=6)
    config.engine.zero_stage = stage
    tiny_trainer(tmp_path, config=config, source=TinySource(poison={7: value})).run()
    warnings = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(warnings) == 2 and all("sample-7" in text for text in warnings)
    found = rows(tmp_path / "metrics.jsonl")
    assert found[-1]["skipped_steps"] == 2 and [row["loss"] is None for row in found].count(True) == 2
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        tensors = load_file(checkpoint.latest(tmp_path) / name)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert checkpoint.read_state(checkpoint.latest(tmp_path)).adam_step == 4


def test_a_skipped_step_leaves_no_trace_in_the_weights(tmp_path):
    """With the bad window first, the good ones must train as if it had not been there, the schedule aside."""
    for stage in (0, 1, 2, 3):
        config = tiny_config(tmp_path / str(stage), max_steps=1)
        config.engine.zero_stage = stage
        trainer = tiny_trainer(tmp_path, config=config, source=TinySource(poison=dict.fromkeys(range(12), math.nan)))
        before = {name: p.clone() for name, p in trainer._drafter.named_parameters()}
        trainer.run()
        after = load_file(checkpoint.latest(tmp_path / str(stage)) / checkpoint.MODEL)
        assert all(torch.equal(before[name], after[name]) for name in before), stage


def test_too_many_bad_steps_stop_the_run_with_the_checkpoint_intact(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).run()
    good = (checkpoint.latest(tmp_path) / checkpoint.MODEL).read_bytes()
    bad = TinySource(poison=dict.fromkeys(range(12), math.nan))
    with pytest.raises(UserError, match="3 steps in a row"):
        tiny_trainer(tmp_path, source=bad).run()
    assert checkpoint.latest(tmp_path).name == "step-2"
    assert (checkpoint.latest(tmp_path) / checkpoint.MODEL).read_bytes() == good


def test_no_sample_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no training sample"):
        tiny_trainer(tmp_path, source=TinySource(0))


def test_metrics_are_cut_at_the_step_of_the_checkpoint(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append({"step": step, "loss": math.nan if step == 2 else 0.5})
    with open(file.path, "a") as handle:
        handle.write('{"step": 4, "lo')
    file.truncate(2)
    assert rows(file.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    file.truncate(0)
    assert file.path.read_text() == ""


def test_ratios_are_divided_once():
    """Two packs with 1 and 1000 supervised slots: the logged value is the objective, not the mean of means."""
    sums = Sums()
    for weight, loss in ((1.0, 5.0), (1000.0, 1.0)):
        zero = torch.zeros((), dtype=torch.float64)
        count = torch.tensor([weight], dtype=torch.float64)
        sums.add({
            "loss_ce": zero + weight * loss, "weight_ce": zero + weight, "loss_tv": zero, "weight_tv": zero + weight,
            "loss_confidence": zero, "weight_confidence": zero, "acceptance_rate": count * loss / 10,
            "acceptance_rate_count": count, "acceptance_length_proxy": zero + 3,
            "acceptance_length_proxy_count": zero + 2,
        })
    values, extra = sums.reduce([7.0])
    row = objective_row(values, tiny_config("x").objective)
    assert row["loss_ce"] == pytest.approx(1005 / 1001) and row["loss"] == pytest.approx(0.1 * 1005 / 1001)
    assert row["acceptance_rate@1"] == pytest.approx(100.5 / 1001)
    assert row["loss_confidence"] == 0.0 and row["acceptance_length_proxy"] == 1.5 and extra == [7.0]


def test_validation_counts_each_sample_once_and_restores_training_mode(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = tiny_config(tmp_path, validate_every=4, validation_samples=7, max_steps=6)
    held_out = TinySource(9, seed=8)
    trainer = tiny_trainer(tmp_path, config=config)
    modes = []
    validator = make_validator(held_out, SHAPE, config.trainer, config.objective, seed=5, run_dir=tmp_path,
                               tracker=Tracker())

    def validate(engine, step):
        validator(engine, step)
        modes.append(engine.module.training)

    trainer.validate = validate
    trainer.run()
    found = rows(tmp_path / "validation.jsonl")
    assert [row["step"] for row in found] == [4, 6] and modes == [True, True]
    counts = {name: part["num_samples"] for name, part in found[0]["domains"].items()}
    assert counts == {"chat": 2, "code": 2, "math": 3}
    assert sorted(held_out.read[:7]) == list(choose(["math", "code", "chat"] * 3, 7)) == [0, 1, 2, 3, 4, 5, 6]
    low, high = (f([p["acceptance_length_proxy"] for p in found[0]["domains"].values()]) for f in (min, max))
    assert low <= found[0]["acceptance_length_proxy"] <= high
    validator(trainer.engine, 6)
    again = rows(tmp_path / "validation.jsonl")
    assert again[-1] == again[-2], "anchors of validation must not move"


def test_domains_are_chosen_evenly():
    assert choose(["a"] * 8 + ["b"] * 2, 4) == [0, 1, 8, 9]
    assert choose(["a", "b"], 0) == [0, 1]


def test_memory_helpers():
    assert peak_bytes() > 1 << 20
    release_free_pages()
