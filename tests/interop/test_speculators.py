"""The speculators layout read by that package. Needs it importable, or DEEPSPEC_SPECULATORS_PYTHON (and _PATH)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_export import export_random, save_target

from deepspec.export.gates import block_logits, fixed_tokens
from deepspec.export.load import load_exported

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


RUNNER = """
import sys
import torch
from speculators import SpeculatorModel
folder, place = sys.argv[1:]
model = SpeculatorModel.from_pretrained(folder).float().eval()
given = torch.load(f"{place}/given.pt")
ids, anchors = given["ids"][None], given["anchors"]
mask = torch.zeros(ids.shape)
mask[0, anchors] = 1
block, width = model.block_size, model.config.transformer_layer_config.hidden_size
with torch.no_grad():
    hidden, logits, *_ = model._backbone_forward(
        given["features"][None], ids, mask, torch.zeros(1, ids.shape[1], width), torch.zeros_like(ids),
        max_anchors=len(anchors))
    hidden, logits = hidden.view(len(anchors), block, -1), logits.view(len(anchors), block, -1)
    if getattr(model, "markov_head", None) is not None:
        tokens = ids[0, anchors[:, None] + torch.arange(block)]
        previous = tokens if model.config.sample_from_anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        embedded = model.markov_head.prev_embeddings(previous)
        logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden, prev_emb=embedded)
torch.save({"logits": logits}, f"{place}/found.pt")
"""


@pytest.mark.parametrize("drafter", [
    {}, {"sample_from_anchor": False}, {"head": "gated"}, {"head": "rnn"},
    {"algorithm": "dflash", "head": "none", "confidence_head": False, "sample_from_anchor": False},
], ids=["dspark", "bonus-anchor", "gated", "rnn", "dflash-1+N"])
def test_speculators_computes_the_same_logits(tmp_path: Path, drafter: dict[str, Any]) -> None:
    """Equal features, tokens and anchors through that package's own forward and through ours, in float32."""
    target = save_target(tmp_path / "target")
    export = export_random(target, tmp_path / "run", formats=("deepspec", "speculators"), **drafter)
    ours, _ = load_exported(export)
    ids = fixed_tokens(900)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(len(ids), 3 * ours.shape.target_hidden_size, generator=generator)
    anchors = torch.arange(2, len(ids) - 6, 5)
    torch.save({"ids": ids, "features": features, "anchors": anchors}, tmp_path / "given.pt")
    environment = os.environ | ({"PYTHONPATH": PATH} if PATH else {}) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, "-c", RUNNER, str(export / "speculators"), str(tmp_path)], capture_output=True,
                          text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt")
    slots = slice(0 if ours.shape.sample_from_anchor else 1, None)
    expected = block_logits(ours, features, ids, anchors)
    difference = float((found["logits"][:, slots] - expected).abs().max())
    print(f"largest difference of logits {difference:.3g}, of their size {float(expected.abs().max()):.3g}")
    assert difference <= 1e-5 * float(expected.abs().max())
