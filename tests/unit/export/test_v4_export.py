"""The V4-style drafter leaves as ``mtp.*``, loads back equal, starts another training, and is what engines look for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from random_run import SHA, logits_of, make_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV4Config

from deepspec.artifacts import read_manifest
from deepspec.config.schema_v4 import V4Config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.errors import InputRefused
from deepspec.export import engines, gates, layout
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.launch import Origin
from deepspec.export.layout_v4 import dtype_of
from deepspec.export.load import load_exported
from deepspec.targets.frozen import FrozenTarget
from deepspec.training import checkpoint
from deepspec.training.importing import read_drafter

Make = Callable[..., ExportRequest]
OPTIONS: dict[str, Any] = {
    "algorithm": "dspark_v4", "num_layers": 3, "sliding_window": 8, "intermediate_size": 16,
    "v4": V4Config(num_experts=4, experts_per_token=2, rope_head_dim=8),
}


@pytest.fixture
def request_of(make_request: Make) -> Make:
    def make(**options: Any) -> ExportRequest:
        request = make_request(**OPTIONS, **options)
        drafter: Any = request.drafter
        for index, gate in enumerate(drafter.gates):
            gate.bias.copy_(torch.linspace(-0.1, 0.3, 4) + index * 1e-4)  # not representable in half precision
        return request

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reload_is_equal(request_of: Make, dtype: str) -> None:
    request = request_of(dtype=dtype)
    folder = export_drafter(request)
    values, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in stored.items()} == layout.expected_tensors(values)
    assert all(str(value.dtype) == f"torch.{dtype_of(name, dtype)}" for name, value in stored.items())
    assert {"mtp.0.main_proj.weight", "mtp.2.confidence_head.proj.weight", "mtp.1.ffn.experts.3.w2.weight",
            "embed.weight", "head.weight"} <= stored.keys()
    assert not any(name.endswith("proj.bias") for name in stored)
    loaded, _ = load_exported(folder)
    wanted: Any = request.drafter
    assert loaded.shape == wanted.shape
    for mine, theirs in zip(loaded.gates, wanted.gates, strict=True):
        assert torch.equal(mine.bias, theirs.bias)
    difference = (logits_of(loaded).float() - logits_of(wanted)).abs().max()
    assert difference == 0 if dtype == "float32" else difference < 0.3
    facts = read_manifest(folder).facts
    assert facts["reload"]["difference"] <= facts["reload"]["tolerance"]
    assert all(check["passed"] for check in facts["checks"].values()) and len(facts["checks"]) == 9


def test_a_changed_bias_is_another_file(request_of: Make) -> None:
    """What is no parameter is checked like everything else: a router's bias that was lost shows in the gate."""
    request = request_of()
    folder = export_drafter(request)
    stored = load_file(folder / "model.safetensors")
    stored["mtp.1.ffn.gate.bias"] = torch.tensor([9.0, -9.0, 0.0, 0.0])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert gates.reload_parity(folder, request.drafter, torch.float32).difference > 1e-3


def test_what_engines_read(request_of: Make) -> None:
    folder = export_drafter(request_of())
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["DeepseekV4ForCausalLM"] and values["model_type"] == "deepseek_v4"
    assert (values["dspark_block_size"], values["dspark_noise_token_id"], values["dspark_markov_rank"]) == (4, 300, 8)
    assert values["dspark_target_layer_ids"] == [1, 2, 4] and values["n_mtp_layers"] == 3
    assert len(values["compress_ratios"]) == values["num_hidden_layers"] + 3 and "rope_parameters" not in values
    told = json.loads((folder / "serving" / "vllm_speculative_config.json").read_text())
    assert told["method"] == "dspark" and told["num_speculative_tokens"] == 4
    assert "* 3 layers, width 64" in (folder / "README.md").read_text()
    refused = engines.verdict(values, "vllm")
    assert not refused.loads and "model_type qwen3" in refused.reasons[0]
    inside = values | {"target_model_type": "deepseek_v4"}
    assert engines.verdict(inside, "vllm").loads and engines.verdict(inside, "sglang").loads
    assert not engines.verdict(inside | {"n_mtp_layers": 2}, "sglang").loads
    assert not engines.verdict(inside, "llama_cpp").loads
    assert "Cannot serve" in (folder / "serving" / "launch.md").read_text()


def test_an_export_starts_another_training(request_of: Make, make_request: Make) -> None:
    request = request_of()
    folder = export_drafter(request)
    wanted: Any = request.drafter
    fresh: Any = build_drafter(wanted.shape, wanted.shared)
    checkpoint.load_exported(fresh, folder)
    assert torch.equal(logits_of(fresh), logits_of(wanted))
    assert torch.equal(fresh.gates[2].bias, wanted.gates[2].bias)
    with pytest.raises(InputRefused, match="algorithm"):
        checkpoint.load_exported(make_request().drafter, folder)


def test_stages_inside_a_targets_folder(request_of: Make, tmp_path: Path) -> None:
    """As in a release: the target's tensors around them, its config.json with the drafter's keys, more than one file.
    """
    request = request_of()
    folder, place = export_drafter(request), tmp_path / "release"
    place.mkdir()
    stored = load_file(folder / "model.safetensors")
    stages = {name: value for name, value in stored.items() if name.startswith("mtp.")}
    save_file({name: value for name, value in stages.items() if name < "mtp.1"}, place / "a.safetensors")
    rest = {name: value for name, value in stages.items() if name >= "mtp.1"}
    save_file(rest | {"layers.0.attn.wkv.weight": torch.zeros(3)}, place / "b.safetensors")
    values = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in values.items() if not name.startswith(("deepspec_", "n_mtp", "target_"))
            and name not in ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "num_target_layers")}
    (place / "config.json").write_text(json.dumps(kept))
    shape, tensors = read_drafter(place)
    wanted: Any = request.drafter
    assert replace(shape, target_model_type="qwen3") == wanted.shape
    assert tensors.keys() == wanted.tensors().keys()
    assert all(torch.equal(tensors[name], value) for name, value in wanted.tensors().items())
    (place / "b.safetensors").unlink()
    with pytest.raises(InputRefused, match="mtp.1.attn.wq_a.weight is missing"):
        read_drafter(place)


@pytest.fixture(scope="module")
def v4_target(target_folder: Path) -> FrozenTarget:
    """A random DeepSeek-V4 of six layers, compressed ones among them, whose last three are the features."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=320, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6,
        layer_types=["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        mlp_layer_types=["moe"] * 6, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
        partial_rotary_factor=0.25, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, sliding_window=16, index_n_heads=4, index_head_dim=16, index_topk=512,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        max_position_embeddings=512, bos_token_id=None, eos_token_id=251)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    return FrozenTarget(model, AutoTokenizer.from_pretrained(target_folder), feature_layers=[3, 4, 5],
                        mask_token_id=300, name="v4")


def test_beside_a_v4_target(v4_target: FrozenTarget, target_folder: Path, tmp_path: Path) -> None:
    """The last layer is a feature, its streams averaged before the model weighs them: every gate agrees, and engines
    that know these stages load them."""
    config = make_config(target_folder, tmp_path / "run", **OPTIONS)
    config.target.feature_layers = [3, 4, 5]
    shared = SharedWeights(v4_target.embed_weight, v4_target.lm_head_weight, v4_target.fingerprint)
    model = build_drafter(shape_from(v4_target.spec, config.target, config.drafter), shared)
    origin = Origin(str(target_folder), None, v4_target.fingerprint, "float32", SHA, "step-1",
                    str(tmp_path / "run" / "export"), ("DeepseekV4ForCausalLM",))
    documents = [torch.arange(40) * 7 % 250]
    request = ExportRequest(config, v4_target, model.eval().requires_grad_(False), origin,
                            gather(tmp_path / "run", SHA, v4_target.fingerprint, 4), tmp_path / "records.jsonl",
                            documents)
    folder = export_drafter(request)
    facts = read_manifest(folder).facts
    assert all(check["passed"] for check in facts["checks"].values()) and set(facts["shift"]["layers"]) == {"-1", "0"}
    values = json.loads((folder / "config.json").read_text())
    assert engines.verdict(values, "vllm").loads and engines.verdict(values, "sglang").loads
    states, last = gates.layer_outputs(v4_target, documents[0])
    encoded = v4_target.encode(documents[0], [40])
    torch.testing.assert_close(torch.cat(states[4:], dim=-1), encoded.features, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, encoded.last_hidden, rtol=1e-4, atol=1e-5)


def test_keys_that_contradict(request_of: Make) -> None:
    from deepspec.export import checks

    folder = export_drafter(request_of())
    values = json.loads((folder / "config.json").read_text())
    assert checks.check_keys(values) == []
    for change, said in (({"target_layer_ids": [1, 2, 5]}, "dspark_target_layer_ids"),
                         ({"target_layer_ids": [1, 2, 5], "dspark_target_layer_ids": [1, 2, 5]}, "from 0 to 4"),
                         ({"sample_from_anchor": False}, "sample_from_anchor"),
                         ({"num_key_value_heads": 2}, "must be 1")):
        assert any(said in problem for problem in checks.check_keys(values | change)), change
    last = {"target_layer_ids": [1, 2, 5], "dspark_target_layer_ids": [1, 2, 5], "target_model_type": "deepseek_v4"}
    assert checks.check_keys(values | last) == []


def test_make_config_is_what_this_file_assumes(target_folder: Path, tmp_path: Path) -> None:
    assert make_config(target_folder, tmp_path, **OPTIONS).target.feature_layers == [1, 2, 4]
