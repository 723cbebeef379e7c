"""The stage on a checkpoint as training leaves it: exported once, verified again on the next call."""

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from random_run import make_config
from safetensors.torch import load_file

from deepspec.artifacts import read_manifest
from deepspec.calibration import Calibration, ConfidenceRecords, RecordsOrigin, calibrate, sigmoid
from deepspec.config.schema import CalibrationConfig
from deepspec.errors import InputRefused
from deepspec.stages import export
from deepspec.training import saving
from deepspec.training.checkpoint import TrainState, drafter_sha256
from deepspec.training.state import MOMENTS


@pytest.fixture
def config(make_request: Callable[..., Any], target_folder: Path, tmp_path: Path) -> Any:
    request = make_request()
    weights = {name: value.detach().clone() for name, value in request.drafter.named_parameters()}
    moments = {key: {name: torch.zeros_like(value) for name, value in weights.items()} for key in MOMENTS}
    state = TrainState(step=3, epoch=0, samples=6, skipped_steps=0, adam_step=3, world_size=1, zero_stage=0,
                       total_steps=3, identity={"target_fingerprint": request.target.fingerprint, "seed": 0})
    saving.save(tmp_path / "run", {"weights": weights} | moments, request.drafter.shape, state, {}, keep_last=1)
    return make_config(target_folder, tmp_path / "run")


def test_exports_then_verifies(config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export.run(config)
    folder = tmp_path / "run" / "export"
    stored = load_file(folder / "model.safetensors")
    trained = load_file(tmp_path / "run" / "checkpoints" / "step-3" / "drafter" / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in trained.items())
    manifest = read_manifest(folder)
    assert manifest.status == "complete"
    assert {"1", "2", "3", "4", "5", "8", "9", "11", "12"} <= set(manifest.facts["checks"])
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        export.run(config)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before and "checks passed" in caplog.text
    (folder / "README.md").write_text("changed")
    with pytest.raises(InputRefused, match="README.md"):
        export.run(config)
    config.export.verify = False
    export.run(config)
    assert (folder / "README.md").read_text() != "changed"


def test_other_options_export_again(config: Any, tmp_path: Path) -> None:
    export.run(config)
    config.export.dtype = "bfloat16"
    export.run(config)
    assert load_file(tmp_path / "run" / "export" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16


def _calibrated(run: Path) -> Calibration:
    """A calibration of the checkpoint of ``run``, fitted on a confidence that is too sure by a factor and a shift."""
    sha256 = drafter_sha256(run / "checkpoints" / "step-3", "trained")
    random = np.random.default_rng(0)
    logits = random.normal(1.0, 2.0, size=(6000, 4)).astype(np.float32)
    accepted = np.cumprod(random.random((6000, 4)) < sigmoid(logits / 2.0 - 0.5), axis=1).sum(axis=1)
    names = np.array([f"c{row % 60}" for row in range(6000)])
    records = ConfidenceRecords(RecordsOrigin(4, sha256, 1.0, (1.0,) * 4), logits, accepted, np.full(6000, 4),
                                np.full((6000, 4), np.nan, np.float32), names, np.full(6000, "math"))
    result = calibrate(records, CalibrationConfig(bootstrap=10), refit_fraction=0.0)
    result.save(run / "calibration.json")
    return result


def test_folded_calibration_is_in_the_weights_and_nowhere_twice(config: Any, tmp_path: Path) -> None:
    calibration = _calibrated(tmp_path / "run")
    folder = tmp_path / "run" / "export"
    names = ("confidence_head.proj.weight", "confidence_head.proj.bias")

    def exported() -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
        export.run(config)
        stored = load_file(folder / "model.safetensors")
        return ([stored[name] for name in names], json.loads((folder / "config.json").read_text()),
                json.loads((folder / "serving" / "dspark_sts.json").read_text()))

    (weight, bias), plain_config, plain_table = exported()
    config.export.fold_calibration = True
    (folded_weight, folded_bias), folded_config, table = exported()
    fold = calibration.folded
    assert abs(fold.temperature - 2.0) < 0.2 and abs(fold.shift + 0.5) < 0.1
    assert torch.allclose(folded_weight, weight / fold.temperature) and not torch.equal(folded_weight, weight)
    assert torch.allclose(folded_bias, bias / fold.temperature + fold.shift)
    assert table["temperatures"] == calibration.fold["temperatures"] != plain_table["temperatures"]
    assert plain_table["temperatures"] == list(calibration.temperatures) and "confidence_fold" not in plain_table
    assert folded_config["deepspec_confidence_fold"] == table["confidence_fold"]
    assert "deepspec_confidence_fold" not in plain_config
    card = (folder / "README.md").read_text()
    assert "calibrated in its weights" in card and "every engine: export.fold_calibration=true" in card
    config.export.fold_calibration = False
    (again, _), _, _ = exported()
    assert torch.equal(again, weight)


def test_nothing_to_fold_is_refused(config: Any) -> None:
    config.export.fold_calibration = True
    with pytest.raises(InputRefused, match="launch/calibrate.py"):
        export.run(config)
