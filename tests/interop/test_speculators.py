"""The speculators layout read by that package. Needs it importable, or DEEPSPEC_SPECULATORS_PYTHON (and _PATH)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from random_export import export_random, save_target

PYTHON = os.environ.get("DEEPSPEC_SPECULATORS_PYTHON", sys.executable)
PATH = os.environ.get("DEEPSPEC_SPECULATORS_PATH", "")
AVAILABLE = bool(os.environ.get("DEEPSPEC_SPECULATORS_PYTHON")) or importlib.util.find_spec("speculators") is not None
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="no speculators, and DEEPSPEC_SPECULATORS_PYTHON is not set")
READER = """
import json, sys
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
folder = sys.argv[1]
model, info = SpeculatorModel.from_pretrained(folder, output_loading_info=True)
stored = load_file(f"{folder}/model.safetensors")
state = model.state_dict()
print("REPORT" + json.dumps({
    "kind": type(model).__name__, "info": {key: sorted(map(str, value)) for key, value in info.items()},
    "different": [name for name, value in stored.items() if name not in state or not torch.equal(
        state[name].to(value.dtype), value)],
    "layers": model.config.aux_hidden_state_layer_ids, "anchor": model.config.sample_from_anchor,
}))
"""


def read(folder: Path) -> dict[str, Any]:
    environment = os.environ | ({"PYTHONPATH": PATH} if PATH else {}) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, "-c", READER, str(folder)], capture_output=True, text=True, env=environment,
                          check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("REPORT"))[6:])


@pytest.mark.parametrize("drafter, anchor", [
    ({}, True), ({"sample_from_anchor": False}, False), ({"head": "gated"}, True), ({"head": "rnn"}, True),
    ({"algorithm": "dflash", "head": "none", "confidence_head": False, "sample_from_anchor": False}, False),
], ids=["dspark", "bonus-anchor", "gated", "rnn", "dflash-1+N"])
def test_speculators_reads_every_tensor(tmp_path: Path, drafter: dict[str, Any], anchor: bool) -> None:
    target = save_target(tmp_path / "target")
    export = export_random(target, tmp_path / "run", formats=("deepspec", "speculators"), **drafter)
    report = read(export / "speculators")
    assert report["different"] == [] and report["layers"] == [2, 3, 5] and report["anchor"] is anchor
    assert report["info"]["unexpected_keys"] == [] and report["info"]["mismatched_keys"] == []
    allowed = ("verifier_", "embed_tokens", "lm_head", "t2d", "d2t")
    assert all(name.startswith(allowed) for name in report["info"]["missing_keys"]), report
