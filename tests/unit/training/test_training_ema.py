"""The average of the weights: what it is, that it is resumed exactly, and who may use it."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_training_checkpoint import StoppingSource, rows
from tiny_training import SHAPE, TinySource, shared_weights, tiny_config, tiny_drafter, tiny_trainer

from deepspec.errors import ConfigError, InputRefused
from deepspec.tracking import Tracker
from deepspec.training import checkpoint
from deepspec.training.engine import masters
from deepspec.training.validate import make_validator

DECAY = 0.9


def trained(run_dir, stage=0, source=None, **options):
    config = tiny_config(run_dir, **({"ema_decay": DECAY} | options))
    config.engine.zero_stage = stage
    trainer = tiny_trainer(run_dir, config=config, source=source)
    return trainer, trainer.run()


def averages(run_dir, step):
    return load_file(run_dir / "checkpoints" / f"step-{step}" / checkpoint.AVERAGE)


def expected(run_dir, steps, decay=DECAY):
    """The average written out in float64 from the weights of every step."""
    value = {name: p.detach().double() for name, p in tiny_drafter().named_parameters()}
    for count, step in enumerate(steps, start=1):
        rate = min(decay, (1 + count) / (10 + count))
        weights = load_file(run_dir / "checkpoints" / f"step-{step}" / checkpoint.MODEL)
        value = {name: rate * value[name] + (1 - rate) * weights[name].double() for name in value}
    return value


@pytest.mark.parametrize("stage,precision", [
    (0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"),
])
def test_it_is_the_average_of_the_weights_of_every_step(tmp_path, stage, precision):
    trained(tmp_path, stage, precision=precision, save_every=1, keep_last=99, max_steps=8)
    value = expected(tmp_path, range(1, 9))
    found = averages(tmp_path, 8)
    assert found.keys() == value.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor.double(), value[name], rtol=1e-5, atol=1e-6), name
    weights = load_file(tmp_path / "checkpoints/step-8" / checkpoint.MODEL)
    assert any(not torch.allclose(found[name], weights[name], atol=1e-4) for name in found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_works_on_offloaded_weights(tmp_path, stage):
    config = tiny_config(tmp_path, ema_decay=DECAY, save_every=1, keep_last=99, max_steps=5)
    config.engine.zero_stage = stage
    config.engine.deepspeed = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    tiny_trainer(tmp_path, config=config).run()
    value, found = expected(tmp_path, range(1, 6)), averages(tmp_path, 5)
    assert all(torch.allclose(found[name].double(), value[name], rtol=1e-5, atol=1e-6) for name in value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averaging_does_not_touch_the_training(tmp_path, stage):
    for name, options in (("with", {}), ("without", {"ema_decay": None})):
        trained(tmp_path / name, stage, save_every=3, **options)
    assert rows(tmp_path / "with") == rows(tmp_path / "without")
    for file in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        one, two = ((tmp_path / run / "checkpoints/step-10" / file).read_bytes() for run in ("with", "without"))
        assert one == two


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_skipped_steps_are_not_averaged_and_nothing_becomes_nan(tmp_path, stage, caplog):
    """A sample that turns bad in the fifth window: weights, moments and average stay finite, and it is named."""
    trained(tmp_path, stage, TinySource(poison={7: math.nan}), save_every=1, keep_last=99, max_steps=6)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    good = [row["step"] for row in lines if row["loss"] is not None]
    assert len(good) == 4 and "sample-7" in caplog.text
    value = expected(tmp_path, good)
    assert all(torch.allclose(tensor.double(), value[name], rtol=1e-5, atol=1e-6)
               for name, tensor in averages(tmp_path, 6).items())
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.AVERAGE):
        tensors = load_file(checkpoint.latest(tmp_path) / name)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


@pytest.mark.parametrize("first,second,tolerance", [(0, 0, 0.0), (2, 2, 0.0), (3, 3, 0.0), (2, 0, 2e-5), (1, 3, 2e-5)])
def test_it_is_resumed_exactly_and_at_another_stage(tmp_path, first, second, tolerance):
    trained(tmp_path / "whole", second)
    _, result = trained(tmp_path / "parts", first, StoppingSource(22))
    assert result.stopped and 3 < result.step < 7
    trained(tmp_path / "parts", second)
    one, two = averages(tmp_path / "whole", 10), averages(tmp_path / "parts", 10)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0.0, atol=tolerance), name


def test_a_resume_with_another_decay_is_refused(tmp_path):
    trained(tmp_path, max_steps=3)
    for decay in (None, 0.99):
        with pytest.raises(InputRefused, match="trainer.ema_decay: 0.9 in the checkpoint"):
            trained(tmp_path, ema_decay=decay)


def test_an_old_checkpoint_without_averages_begins_one_at_its_weights(tmp_path, caplog):
    trained(tmp_path, ema_decay=None, max_steps=3)
    path = tmp_path / "checkpoints/step-3/state.json"
    values = json.loads(path.read_text())
    del values["identity"]["trainer.ema_decay"], values["best_step"], values["best_acceptance"]
    path.write_text(json.dumps(values))
    before = load_file(tmp_path / "checkpoints/step-3" / checkpoint.MODEL)
    trained(tmp_path, max_steps=4, keep_last=9)
    assert "begins at its weights" in caplog.text
    after = load_file(tmp_path / "checkpoints/step-4" / checkpoint.MODEL)
    rate = 2 / 11
    for name, tensor in averages(tmp_path, 4).items():
        assert torch.allclose(tensor, rate * before[name] + (1 - rate) * after[name], atol=1e-6), name


def validated(run_dir, stage=0, **options):
    config = tiny_config(run_dir, **({"ema_decay": DECAY, "validate_every": 3, "save_every": 3, "keep_last": 9}
                                     | options))
    config.engine.zero_stage = stage
    trainer = tiny_trainer(run_dir, config=config)
    trainer.validate = make_validator(TinySource(9, seed=8), SHAPE, config.trainer, config.objective, seed=5,
                                      run_dir=run_dir, tracker=Tracker())
    trainer.run()
    return trainer, [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage,precision", [(0, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")])
def test_validation_measures_both_and_disturbs_nothing(tmp_path, stage, precision):
    trainer, found = validated(tmp_path / "both", stage, precision=precision)
    _, plain = validated(tmp_path / "plain", stage, precision=precision, ema_decay=None)
    assert [row["step"] for row in found] == [3, 6, 9, 10]
    assert [{k: v for k, v in row.items() if k != "ema"} for row in found] == plain
    assert rows(tmp_path / "both") == rows(tmp_path / "plain")
    # What was measured is what is stored: the averages in the place of the weights give the same numbers.
    drafter = tiny_drafter()
    stored = averages(tmp_path / "both", 10)
    for name, parameter in drafter.named_parameters():
        parameter.data.copy_(stored[name])
    module = trainer._outline.filled({f"drafter.{name}": p.data.to(trainer.engine.module.drafter.dtype)
                                      for name, p in drafter.named_parameters()})
    names = sorted({sample.domain for sample in trainer.validate.packer.source.samples})
    domains = [trainer.validate.packer.source.samples[index].domain for index in trainer.validate.indices]
    assert trainer.validate._values(module, domains, names) == found[-1]["ema"]
    assert found[-1]["ema"]["acceptance_length_proxy"] != found[-1]["acceptance_length_proxy"]
    assert trainer.best.acceptance == max(row["ema"]["acceptance_length_proxy"] for row in found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_back_in_their_place_bit_for_bit(tmp_path, stage):
    trainer, _ = trained(tmp_path, stage)
    before = [part.clone() for part in masters(trainer.engine)]
    with trainer.average.as_masters():
        assert not all(torch.equal(a, b) for a, b in zip(before, masters(trainer.engine)))
    assert all(torch.equal(a, b) for a, b in zip(before, masters(trainer.engine)))


def test_averaged_weights_are_loaded_on_request_only(tmp_path):
    trained(tmp_path / "a", max_steps=2)
    found = checkpoint.latest(tmp_path / "a")
    stored = load_file(found / checkpoint.AVERAGE)
    drafter = checkpoint.load_drafter(found, shared_weights(), "ema")
    assert all(torch.equal(p, stored[name]) for name, p in drafter.named_parameters())
    assert checkpoint.drafter_sha256(found, "ema") != checkpoint.drafter_sha256(found)
    trained(tmp_path / "b", ema_decay=None, max_steps=2)
    for use in (lambda path: checkpoint.load_drafter(path, shared_weights(), "ema"),
                lambda path: checkpoint.drafter_sha256(path, "ema")):
        with pytest.raises(InputRefused, match="step-2 has no averaged weights.*trainer.ema_decay"):
            use(checkpoint.latest(tmp_path / "b"))


def test_weights_on_a_disk_are_refused(tmp_path):
    class Swapped:
        fp32_partitioned_groups_flat = [torch.empty(0)]

    class Engine:
        optimizer = Swapped()

        def zero_optimization_stage(self):
            return 3

    with pytest.raises(ConfigError, match="NVMe"):
        masters(Engine())
