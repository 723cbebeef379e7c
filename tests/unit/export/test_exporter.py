"""The whole export: every kind of drafter leaves, loads back equal, and a broken one never gets the final name."""

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from random_run import logits_of
from safetensors.torch import load_file, save_file

from deepspec.artifacts import read_manifest
from deepspec.errors import InputRefused
from deepspec.export import exporter, layout, tensors
from deepspec.export.exporter import export_drafter, reverify
from deepspec.export.load import load_exported

KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {}, "gated": {"head": "gated"}, "rnn": {"head": "rnn"},
    "no confidence": {"confidence_head": False}, "confidence without Markov": {"confidence_with_markov": False},
    "bonus anchor": {"sample_from_anchor": False},
    "dspark without head": {"head": "none"},
    "dflash anchor": {"algorithm": "dflash", "head": "none", "confidence_head": False},
    "dflash 1+N": {"algorithm": "dflash", "head": "none", "confidence_head": False, "sample_from_anchor": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reload_is_equal(make_request: Callable[..., Any], kind: str, dtype: str) -> None:
    request = make_request(dtype=dtype, **KINDS[kind])
    folder = export_drafter(request)
    loaded, shared = load_exported(folder)
    assert loaded.shape.draft_length == request.drafter.shape.draft_length
    reference = request.drafter
    difference = (logits_of(loaded).float() - logits_of(reference).float()).abs().max()
    if dtype == "float32":
        assert difference == 0
    else:
        # the weights were rounded to bf16; the manifest's own comparison is in the same dtype and exact
        assert difference < 0.2
        assert read_manifest(folder).facts["reload"]["difference"] <= read_manifest(folder).facts["reload"]["tolerance"]
    assert torch.equal(shared.embed, request.target.embed_weight.to(tensors.DTYPES[dtype]))
    if loaded.shape.confidence_head:
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).to(tensors.DTYPES[dtype])
        ids = torch.arange(5)
        expected = reference.confidence(hidden.float(), ids)
        tolerance = 1e-6 if dtype == "float32" else 0.05
        assert torch.allclose(loaded.confidence(hidden, ids).float(), expected, atol=tolerance)


def test_config_of_anchor_dflash_is_dspark_with_a_zero_head(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request(**KINDS["dflash anchor"]))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"] and values["markov_rank"] == 1
    assert values["sample_from_anchor"] is True and "sample_from_anchor" not in values["dflash_config"]
    stored = load_file(folder / "model.safetensors")
    assert not stored["markov_head.markov_w1.weight"].any() and not stored["markov_head.markov_w2.weight"].any()


def test_config_of_bonus_dflash(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request(formats=("deepspec", "zlab_dflash"), **KINDS["dflash 1+N"]))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    told = json.loads((folder / "serving" / "vllm_speculative_config.json").read_text())
    assert told["method"] == "dflash" and told["num_speculative_tokens"] == 3
    assert set(load_file(folder / "zlab_dflash" / "model.safetensors")) == set(layout.trainable_tensors(values))


def test_every_key_and_both_places(make_request: Callable[..., Any]) -> None:
    values = json.loads((export_drafter(make_request()) / "config.json").read_text())
    assert not [key for key in layout.required_keys(values) if key not in values]
    for key in layout.DOUBLED_KEYS:
        assert values["dflash_config"][key] == values[key]
    assert values["max_position_embeddings"] == 512 and values["deepspec_training_max_length"] == 128
    assert values["num_anchors"] == 16 and values["dtype"] == values["torch_dtype"] == "float32"
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert values["rope_theta"] == 10000.0 and "auto_map" not in values


def test_shards_and_index(make_request: Callable[..., Any]) -> None:
    from dataclasses import replace

    folder = export_drafter(replace(make_request(), shard_bytes=100_000))
    index = json.loads((folder / tensors.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1 and not (folder / tensors.SINGLE).exists()
    load_exported(folder)
    (folder / sorted(index["weight_map"].values())[0]).unlink()
    with pytest.raises(InputRefused, match="not there"):
        load_exported(folder)


def test_a_failing_check_leaves_the_older_export(make_request: Callable[..., Any],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request()
    folder = export_drafter(request)
    before = (folder / "manifest.json").read_bytes()
    monkeypatch.setattr(exporter.tensors, "collect", lambda *a: {
        name: (value * float("nan") if name == "norm.weight" else value)
        for name, value in load_file(folder / "model.safetensors").items()})
    with pytest.raises(InputRefused, match="norm.weight has 64 values that are not finite"):
        export_drafter(request)
    assert (folder / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["export"]


def test_export_replaces_the_older_one(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request())
    (folder / "left_behind.txt").write_text("x")
    export_drafter(make_request(head="gated"))
    assert not (folder / "left_behind.txt").exists()
    assert json.loads((folder / "config.json").read_text())["markov_head_type"] == "gated"


def test_reverify_sees_a_changed_file(make_request: Callable[..., Any]) -> None:
    request = make_request()
    folder = export_drafter(request)
    reverify(folder, request.target, request.drafter)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"target_layer_ids": [2, 3, 4]}))
    with pytest.raises(InputRefused, match="config.json"):
        reverify(folder, request.target, request.drafter)


def test_a_missing_tensor_is_named(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request())
    stored = load_file(folder / "model.safetensors")
    stored.pop("fc.weight")
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(InputRefused, match="fc.weight is missing"):
        load_exported(folder)


def test_partitioned_parameters_are_refused(make_request: Callable[..., Any]) -> None:
    request = make_request()
    request.drafter.fc.weight.data = torch.empty(0)
    with pytest.raises(InputRefused, match="partitioned"):
        export_drafter(request)


def test_missing_evidence_is_said(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request())
    manifest = json.loads((folder / "serving" / "manifest.json").read_text())
    assert set(manifest["absent"]) == {"calibration", "evaluation", "profile"}
    card = (folder / "README.md").read_text()
    assert "Not measured" in card and "No calibration" in card
    assert {path.name for path in (folder / "serving").iterdir()} == {
        "manifest.json", "vllm_speculative_config.json", "launch.md"}


def test_full_bundle(evidence_files: Path, make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request())
    serving = folder / "serving"
    names = {path.name for path in serving.iterdir()}
    assert names == {
        "records.jsonl", "acceptance.json", "dspark_sts.json", "sglang_sps_1d.json", "sglang_sps_2d.json",
        "trtllm_cost.json", "vllm_speculative_config.json", "vllm_by_load.json", "launch.md", "manifest.json"}
    assert (serving / "records.jsonl").read_bytes() == (evidence_files / "profile" / "records.jsonl").read_bytes()
    assert "bias_seconds" not in (serving / "sglang_sps_1d.json").read_text()
    sts = json.loads((serving / "dspark_sts.json").read_text())
    assert sts["temperatures"] == sts["sts_temperatures"] == [1.1, 1.2, 1.0, 0.9]
    held_out = json.loads((serving / "acceptance.json").read_text())["settings"]["t1"]["benchmarks"]["held_out"]
    assert held_out["acceptance_histogram"] == [30, 25, 20, 15, 10]
    assert held_out["draft_acceptance_rate"] == 0.375 and held_out["mean_acceptance_length"] == 2.5
    card = (folder / "README.md").read_text()
    assert "2.50" in card and "temperature 1.0" in card and "thinking **off**" in card or "**thinking off**" in card


def test_evidence_of_another_drafter_is_left_out(evidence_files: Path, make_request: Callable[..., Any]) -> None:
    values = json.loads((evidence_files / "calibration.json").read_text())
    (evidence_files / "calibration.json").write_text(json.dumps(values | {"drafter_sha256": "b" * 64}))
    folder = export_drafter(make_request())
    assert not (folder / "serving" / "dspark_sts.json").exists()
    assert "another drafter" in json.loads((folder / "serving" / "manifest.json").read_text())["absent"]["calibration"]


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_that_engines_lack_are_said(make_request: Callable[..., Any], head: str) -> None:
    folder = export_drafter(make_request(head=head))
    manifest = json.loads((folder / "serving" / "manifest.json").read_text())
    assert not manifest["engines"]["vllm"]["loads"] and manifest["engines"]["sglang"]["loads"]
    assert "Cannot serve" in (folder / "serving" / "launch.md").read_text()
    assert f"vllm cannot load it: the {head}" in (folder / "README.md").read_text()


def test_the_card_names_no_place_of_this_machine_and_repeats_no_row(make_request: Callable[..., Any],
                                                                    evidence_files: Path) -> None:
    folder = export_drafter(make_request())
    card, launch = (folder / "README.md").read_text(), (folder / "serving" / "launch.md").read_text()
    for text in (card, launch, (folder / "serving" / "vllm_speculative_config.json").read_text()):
        assert str(folder.parents[1]) not in text and "/tmp" not in text
    assert "DRAFTER=$PWD" in launch and 'vllm serve "$TARGET"' in launch
    rows = [line for line in card.splitlines() if "0.70 0.64 0.56 0.40" in line]
    assert len(rows) == 1 and rows[0].startswith("| held_out | math | 10 | 2.50 | 2.30 to 2.70 |")
