"""Every layout an export can have is read back as the drafter it was made of, and what cannot be read is refused."""

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.drafters.layouts import deepspec_values, layout_of
from deepspec.drafters.registry import build_drafter
from deepspec.errors import InputRefused
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.gates import block_logits, fixed_tokens
from deepspec.training.checkpoint import load_exported
from deepspec.training.importing import check_shared, own_tensors, read_drafter

DFLASH = {"algorithm": "dflash", "head": "none", "confidence_head": False}
CASES = [
    ("deepspec", {}), ("deepspec", DFLASH), ("deepspec", {"head": "rnn"}), ("deepspec", {"sample_from_anchor": False}),
    ("speculators", {}), ("speculators", {"sample_from_anchor": False}), ("speculators", {"head": "gated"}),
    ("speculators", DFLASH), ("speculators", DFLASH | {"sample_from_anchor": False}), ("specforge", {}),
    ("specforge", DFLASH), ("zlab_dflash", DFLASH | {"sample_from_anchor": False}),
]
Make = Callable[..., ExportRequest]


def exported(make_request: Make, layout: str, drafter: dict[str, Any]) -> tuple[ExportRequest, Path]:
    request = make_request(formats=("deepspec",) if layout == "deepspec" else ("deepspec", layout), **drafter)
    folder = export_drafter(request)
    return request, folder if layout == "deepspec" else folder / layout


@pytest.mark.parametrize("layout, drafter", CASES, ids=[
    "-".join(map(str, (name, *options.values()))) for name, options in CASES])
def test_round_trip(make_request: Make, layout: str, drafter: dict[str, Any]) -> None:
    request, folder = exported(make_request, layout, drafter)
    shape, tensors = read_drafter(folder, request.target.spec.num_layers)
    original = request.drafter
    for name in ("feature_layers", "mask_token_id", "sample_from_anchor", "head", "markov_rank", "block_size",
                 "draft_length", "confidence_head", "rope_theta", "num_layers", "algorithm"):
        assert getattr(shape, name) == getattr(original.shape, name), name
    check_shared(tensors, original.shared, folder)
    torch.manual_seed(9)
    again = build_drafter(shape, original.shared).eval()
    load_exported(again, folder)
    ids = fixed_tokens(200)
    features = torch.randn(len(ids), len(shape.feature_layers) * shape.target_hidden_size)
    anchors = torch.arange(3, len(ids) - shape.block_size - 1, 7)
    assert torch.equal(block_logits(again, features, ids, anchors), block_logits(original, features, ids, anchors))
    assert {name for name, _ in again.named_parameters()} == own_tensors(tensors).keys()


def rewritten(folder: Path, place: Path, **changes: Any) -> Path:
    place.mkdir()
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.update({key: value})
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return place


@pytest.mark.parametrize("layout, changes, says", [
    ("speculators", {"speculators_model_type": "mtp"}, "type 'mtp'"),
    ("speculators", {"draft_vocab_size": 64}, "no draft tokens are named by a d2t tensor"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 3]}, "count from 1"),
    ("speculators", {"mask_token_id": None}, "no key 'mask_token_id'"),
    ("specforge", {"sample_from_anchor": False}, "always predict on the anchor slot"),
    ("specforge", {"mask_token_id": 3}, "contradicts itself: mask_token_id"),
    ("deepspec", {"num_hidden_layers": None}, "no key 'num_hidden_layers'"),
])
def test_what_cannot_be_read_is_refused(make_request: Make, tmp_path: Path, layout: str, changes: dict[str, Any],
                                        says: str) -> None:
    _, folder = exported(make_request, layout, {})
    with pytest.raises(InputRefused, match=says) as caught:
        read_drafter(rewritten(folder, tmp_path / "other", **changes), 6)
    assert str(tmp_path / "other") in str(caught.value)


def test_layouts_are_told_apart(make_request: Make) -> None:
    for layout, drafter in (("deepspec", {}), ("speculators", {}), ("specforge", {}),
                            ("zlab_dflash", DFLASH | {"sample_from_anchor": False})):
        _, folder = exported(make_request, layout, drafter)
        assert layout_of(json.loads((folder / "config.json").read_text())) == layout


def test_a_speculators_folder_without_the_slot_key_means_what_the_package_means(make_request: Make) -> None:
    _, folder = exported(make_request, "speculators", {})
    config = json.loads((folder / "config.json").read_text())
    config.pop("sample_from_anchor")
    assert deepspec_values(config, target_layers=6)["sample_from_anchor"] is True
    config["speculators_model_type"] = "dflash"
    assert deepspec_values(config, target_layers=6)["sample_from_anchor"] is False


def test_another_targets_matrices_and_other_options_are_refused(make_request: Make, tmp_path: Path) -> None:
    request, folder = exported(make_request, "deepspec", {})
    other = rewritten(folder, tmp_path / "other")
    stored = load_file(other / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].flip(0).contiguous()
    save_file(stored, other / "model.safetensors")
    _, tensors = read_drafter(other)
    with pytest.raises(InputRefused, match="lm_head.weight is not this target's"):
        check_shared(tensors, request.drafter.shared, other)
    with pytest.raises(InputRefused, match="made with sample_from_anchor=True, this run has False"):
        load_exported(make_request(sample_from_anchor=False).drafter, folder)
    (other / "model.safetensors").unlink()
    with pytest.raises(InputRefused, match="no .safetensors file"):
        read_drafter(other)
