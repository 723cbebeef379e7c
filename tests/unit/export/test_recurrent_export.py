"""EAGLE-3 and MTP leave in the layouts that engines read, load back equal, and start another training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from random_run import SHA, logits_of, make_config
from safetensors.torch import load_file, save_file

from deepspec.artifacts import read_manifest
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.errors import ConfigError, InputRefused
from deepspec.export import checks, engines, gates, layout
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.launch import Origin
from deepspec.export.load import load_exported
from deepspec.targets.load import load_target
from deepspec.training import checkpoint
from deepspec.training.importing import read_drafter

NO_HEADS: dict[str, Any] = {"head": "none", "confidence_head": False}
LAYERS = {"eagle3": [1, 2, 4], "mtp": [5]}
Make = Callable[..., ExportRequest]


@pytest.fixture(scope="module")
def targets(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The random target once for each algorithm's feature layers."""
    config = make_config(target_folder, tmp_path_factory.mktemp("cache"))
    return {name: load_target(replace(config.target, feature_layers=layers), device="cpu",
                              cache_dir=Path(config.run.data_root)) for name, layers in LAYERS.items()}


@pytest.fixture
def request_of(target_folder: Path, targets: dict[str, Any], tmp_path: Path) -> Make:
    def make(algorithm: str, *, dtype: str = "float32", formats: tuple[str, ...] = ("deepspec",),
             documents: Any = (), **changes: Any) -> ExportRequest:
        target, run = targets[algorithm], tmp_path / "run"
        config = make_config(target_folder, run, algorithm=algorithm, **NO_HEADS, **changes)
        config.target.feature_layers = LAYERS[algorithm]
        config.export.dtype, config.export.formats = dtype, list(formats)
        torch.manual_seed(1)
        shared = SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint)
        model = build_drafter(shape_from(target.spec, config.target, config.drafter), shared)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        origin = Origin(str(target_folder), None, target.fingerprint, "float32", SHA, "step-1", str(run / "export"),
                        ("Qwen3ForCausalLM",))
        found = gather(run, SHA, target.fingerprint, model.shape.draft_length, model.shape.confidence_head)
        return ExportRequest(config, target, model.eval().requires_grad_(False), origin, found,
                             run / "profile" / "records.jsonl", documents)

    return make


@pytest.mark.parametrize("algorithm", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reload_is_equal(request_of: Make, algorithm: str, dtype: str) -> None:
    request = request_of(algorithm, dtype=dtype, unroll=3)
    folder = export_drafter(request)
    loaded, shared = load_exported(folder)
    wanted = request.drafter.shape
    assert replace(loaded.shape, rope_parameters={}) == replace(wanted, rope_parameters={}) and wanted.unroll == 3
    difference = (logits_of(loaded).float() - logits_of(request.drafter)).abs().max()
    assert difference == 0 if dtype == "float32" else difference < 0.3
    facts = read_manifest(folder).facts
    assert facts["reload"]["difference"] <= facts["reload"]["tolerance"]
    assert all(check["passed"] for check in facts["checks"].values()) and len(facts["checks"]) == 9


def test_eagle3_has_what_engines_read(request_of: Make) -> None:
    folder = export_drafter(request_of("eagle3", formats=("deepspec", "speculators")))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["Eagle3Qwen3ForCausalLM"] and values["model_type"] == "qwen3"
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5] and values["target_layer_ids"] == [1, 2, 4]
    assert values["num_aux_hidden_states"] == 3 and values["draft_vocab_size"] == values["vocab_size"]
    assert not any(values[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    assert "dflash_config" not in values and "markov_rank" not in values
    stored = load_file(folder / "model.safetensors")
    assert stored["layers.0.self_attn.q_proj.weight"].shape[1] == 128 and stored["fc.weight"].shape == (64, 192)
    assert {"embed_tokens.weight", "lm_head.weight", "layers.0.hidden_norm.weight", "norm.weight"} <= stored.keys()
    assert not {"d2t", "t2d"} & stored.keys()
    serving = json.loads((folder / "serving" / "vllm_speculative_config.json").read_text())
    assert serving["method"] == "eagle3" and serving["num_speculative_tokens"] == 4
    other = json.loads((folder / "speculators" / "config.json").read_text())
    assert other["speculators_model_type"] == "eagle3" and other["norm_before_residual"] is False
    assert other["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5] and "model_type" not in other
    assert other["transformer_layer_config"]["model_type"] == "qwen3"
    assert load_file(folder / "speculators" / "model.safetensors").keys() == stored.keys()


def test_mtp_has_what_engines_read(request_of: Make) -> None:
    folder = export_drafter(request_of("mtp", block_size=1))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["MiMoForCausalLM"] and values["num_nextn_predict_layers"] == 1
    assert values["qk_norm"] is True and values["target_layer_ids"] == [5]
    stored = load_file(folder / "model.safetensors")
    prefix = "model.mtp_layers.0."
    assert stored[f"{prefix}input_proj.weight"].shape == (64, 128)
    assert {f"{prefix}self_attn.{name}_proj.bias" for name in "qkv"} <= stored.keys()
    assert {"model.embed_tokens.weight", "lm_head.weight", f"{prefix}final_layernorm.weight"} <= stored.keys()
    launch = (folder / "serving" / "launch.md").read_text()
    assert """--hf-overrides '{"num_nextn_predict_layers": 1, "qk_norm": true}'""" in launch
    assert "**1 draft tokens per round**" in (folder / "README.md").read_text()
    assert engines.verdict(values, "vllm").loads
    for change, said in (({"head_dim": 8}, "head size"), ({"target_model_type": "gemma3"}, "only Qwen3 and Llama"),
                         ({"target_model_type": "llama"}, "no norms of queries")):
        assert said in engines.verdict(values | change, "vllm").reasons[0]


@pytest.mark.parametrize("algorithm", LAYERS)
def test_an_export_starts_another_training(request_of: Make, algorithm: str) -> None:
    request = request_of(algorithm)
    folder = export_drafter(request)
    other = "mtp" if algorithm == "eagle3" else "eagle3"
    fresh = build_drafter(request.drafter.shape, request.drafter.shared)
    checkpoint.load_exported(fresh, folder)
    assert torch.equal(logits_of(fresh), logits_of(request.drafter))
    wrong = request_of(other).drafter
    with pytest.raises(InputRefused, match=f"made with algorithm='{algorithm}'"):
        checkpoint.load_exported(wrong, folder)


def as_others_write_it(folder: Path, place: Path, **changes: Any) -> Path:
    """The export's tensors with a config.json of another trainer: without our keys, with ``changes``; None removes."""
    place.mkdir()
    save_file(load_file(folder / "model.safetensors"), place / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    ours = ("deepspec_algorithm", "target_layer_ids", "block_size", "ttt_length", "num_target_layers", "mask_token_id")
    values = {key: value for key, value in values.items() if key not in ours} | changes
    (place / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return place


def test_eagle3_of_other_trainers_is_read(request_of: Make, tmp_path: Path) -> None:
    request = request_of("eagle3", formats=("deepspec", "speculators"))
    folder = export_drafter(request)
    places = {
        "native": (as_others_write_it(folder, tmp_path / "native"), 7), "speculators": (folder / "speculators", 4),
        "deepspec": (as_others_write_it(folder, tmp_path / "deepspec", architectures=["Qwen3Eagle3Model"], ttt_length=6,
                                        target_layer_ids=[1, 2, 4], eagle_aux_hidden_state_layer_ids=None), 6),
    }
    for name, (place, length) in places.items():
        shape, _ = read_drafter(place, 6)
        assert (shape.algorithm, shape.feature_layers, shape.draft_length) == ("eagle3", (1, 2, 4), length), name
        fresh = build_drafter(request.drafter.shape, request.drafter.shared)
        checkpoint.load_exported(fresh, place)
        assert torch.equal(logits_of(fresh), logits_of(request.drafter)), name


@pytest.mark.parametrize("change, said", [
    ({"norm_before_residual": True, "fc_norm": True}, "norm_before_residual, fc_norm"),
    ({"num_hidden_layers": 2}, "2 layers"), ({"draft_vocab_size": 64}, "no draft tokens are named by a d2t tensor"),
    ({"model_type": "llama"}, "'llama'"), ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "layer_ids"),
])
def test_eagle3_that_is_something_else_is_refused(request_of: Make, tmp_path: Path, change: dict[str, Any],
                                                  said: str) -> None:
    folder = export_drafter(request_of("eagle3"))
    with pytest.raises(InputRefused, match=said):
        read_drafter(as_others_write_it(folder, tmp_path / "other", **change), 6)


@pytest.mark.parametrize("change, said", [
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "plus one"), ({"norm_output": True}, "trained with false"),
    ({"target_layer_ids": [1, 2, 5]}, "strictly increasing ids from 0 to 4"),
    ({"fc_norm": None}, "fc_norm=null"),
])
def test_a_config_that_contradicts_itself_is_seen(request_of: Make, change: dict[str, Any], said: str) -> None:
    folder = export_drafter(request_of("eagle3"))
    values = json.loads((folder / "config.json").read_text())
    assert checks.check_keys(values) == []
    assert said in " ".join(checks.check_keys(values | change))


def test_tensors_that_do_not_belong_are_seen(request_of: Make) -> None:
    folder = export_drafter(request_of("mtp"))
    values = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    stored["model.mtp_layers.1.input_proj.weight"] = stored.pop("model.mtp_layers.0.input_proj.weight")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = " ".join(checks.check_tensors(folder, values))
    assert "model.mtp_layers.0.input_proj.weight is missing" in said and "mtp_layers.1" in said


def test_formats_that_cannot_hold_it_are_refused(request_of: Make) -> None:
    for name, said in (("specforge", "anchor slot"), ("zlab_dflash", "only 1\\+N DFlash")):
        with pytest.raises(ConfigError, match=said):
            export_drafter(request_of("eagle3", formats=("deepspec", name)))


@pytest.mark.parametrize("algorithm", LAYERS)
def test_the_layer_gate_knows_shifted_ids(targets: dict[str, Any], algorithm: str) -> None:
    assert gates.layer_id_gate(targets[algorithm], LAYERS[algorithm]) == []
    shifted = [layer - 1 for layer in LAYERS[algorithm]]
    assert "differ from the target's" in gates.layer_id_gate(targets[algorithm], shifted)[0]


@pytest.mark.parametrize("algorithm", LAYERS)
def test_the_shift_gate_runs_over_chains(request_of: Make, algorithm: str) -> None:
    documents = [torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    request = request_of(algorithm)
    result = gates.shift_gate(request.drafter, request.target, documents)
    assert result.blocks == 3 * 16 and set(result.slots) == {-1, 0, 1} and result.verdict != "wrong"
    assert set(result.layers) == ({-1, 0} if algorithm == "mtp" else {-1, 0, 1})


@pytest.mark.parametrize("algorithm", LAYERS)
def test_a_plan_counts_the_parameters_that_are_there(request_of: Make, algorithm: str) -> None:
    model = request_of(algorithm).drafter
    keys = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": model.shape.vocab_size, "num_hidden_layers": 1,
            "target_layer_ids": LAYERS[algorithm], "target_hidden_size": 64, "deepspec_algorithm": algorithm}
    parts = layout.breakdown(keys)
    assert sum(parts.values()) - parts["frozen"] == sum(item.numel() for item in model.parameters())


def test_without_a_confidence_head_no_calibration_is_asked_for(tmp_path: Path) -> None:
    absent = gather(tmp_path, SHA, "t", 4, confidence_head=False).absent
    assert "no confidence head" in absent["calibration"] and "launch/evaluate_drafter.py" in absent["evaluation"]


@pytest.mark.parametrize("name, text", [
    ("calibration.json", "[]"), ("calibration.json", '{"temperatures": [-1, 1, 1, 1]}'), ("profile/sps.json", "{}"),
    ("evaluation.json", "3"),
])
def test_damaged_results_are_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(InputRefused, match=name):
        gather(tmp_path, SHA, "t", 4)
