"""The stage on a checkpoint as training leaves it: exported once, verified again on the next call."""

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from random_run import make_config
from safetensors.torch import load_file

from deepspec.artifacts import read_manifest
from deepspec.errors import InputRefused
from deepspec.stages import export
from deepspec.training import saving
from deepspec.training.checkpoint import TrainState
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
