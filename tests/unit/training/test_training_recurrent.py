"""EAGLE-3 and MTP in the training loop: windows, checkpoints, resume, ZeRO stages and warm start."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from tiny_training import SHAPE, TinySource, shared_weights, tiny_config

from deepspec.data.batch import FeatureSample
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape
from deepspec.errors import InputRefused
from deepspec.training import checkpoint
from deepspec.training.identity import run_identity
from deepspec.training.packs import Packer
from deepspec.training.trainer import DrafterTrainer

ALGORITHMS = ("eagle3", "mtp")


def recurrent_shape(algorithm: str, **changes: Any) -> DrafterShape:
    layers = (3,) if algorithm == "mtp" else SHAPE.feature_layers
    return dataclasses.replace(SHAPE, **{
        "algorithm": algorithm, "num_layers": 1, "head": "none", "markov_rank": 0, "confidence_head": False,
        "confidence_with_markov": False, "feature_layers": layers, **changes})


class Narrow(TinySource):
    """One feature layer of the same samples."""

    def get(self, indices: Any) -> list[FeatureSample]:
        return [dataclasses.replace(row, features=row.features[:, :SHAPE.target_hidden_size].contiguous())
                for row in super().get(indices)]


def trainer_of(run_dir: Path, algorithm: str, *, stage: int = 0, labels: str = "data",
               **options: Any) -> DrafterTrainer:
    unroll = options.pop("unroll", None)
    config = tiny_config(run_dir, **options)
    config.engine.zero_stage = stage
    config.engine.deepspeed = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    config.objective.ce_labels = labels
    shape = recurrent_shape(algorithm, unroll=unroll)
    torch.manual_seed(0)
    drafter = build_drafter(shape, shared_weights())
    source = Narrow() if algorithm == "mtp" else TinySource()
    packer = Packer(source, shape, config.trainer, config.objective, seed=5, num_workers=0)
    return DrafterTrainer(drafter, packer, config, identity=run_identity(config, shape, target="t", data="d"))


def weights_of(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    stage = trainer.engine.zero_optimization_stage()
    return {name: (safe_get_full_fp32_param(item) if stage else item).detach().clone()
            for name, item in trainer.engine.module.drafter.named_parameters()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_trains_alike(tmp_path: Path, algorithm: str, stage: int) -> None:
    plain, other = trainer_of(tmp_path / "0", algorithm, max_steps=3), trainer_of(
        tmp_path / "1", algorithm, stage=stage, max_steps=3)
    rows = [trainer.run().row for trainer in (plain, other)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    one, two = weights_of(plain), weights_of(other)
    start = dict(build_drafter(recurrent_shape(algorithm), shared_weights()).named_parameters())
    assert one.keys() == two.keys() == start.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_and_three_steps_are_six(tmp_path: Path, algorithm: str) -> None:
    whole = trainer_of(tmp_path / "whole", algorithm, max_steps=6, labels="target")
    rows = whole.run().row
    trainer_of(tmp_path / "parts", algorithm, max_steps=6, labels="target", save_every=3).run()
    for path in (tmp_path / "parts/checkpoints").iterdir():
        if path.name != "step-3":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = trainer_of(tmp_path / "parts", algorithm, max_steps=6, labels="target", save_every=3)
    assert again.run().row["loss"] == pytest.approx(rows["loss"], rel=1e-6)
    for name, value in weights_of(again).items():
        torch.testing.assert_close(value, weights_of(whole)[name], rtol=1e-6, atol=1e-8, msg=name)
    found = checkpoint.latest(tmp_path / "parts")
    shape = checkpoint.read_shape(found)
    assert shape == dataclasses.replace(recurrent_shape(algorithm), rope_parameters=shape.rope_parameters)
    loaded = checkpoint.load_drafter(found, shared_weights())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights_of(again)[name]), name


def test_rows_of_metrics_are_as_long_as_the_chain_that_is_trained(tmp_path: Path) -> None:
    row = trainer_of(tmp_path, "mtp", unroll=2, max_steps=2).run().row
    assert "acceptance_rate@2" in row and "acceptance_rate@3" not in row
    shape = checkpoint.read_shape(checkpoint.latest(tmp_path))
    assert (shape.unroll, shape.trained_length, shape.draft_length) == (2, 2, 4)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, "eagle3", max_steps=2).run()
    with pytest.raises(InputRefused, match="algorithm"):
        trainer_of(tmp_path, "mtp", max_steps=4).run()
