"""Options that do not fit, configurations of checkpoints, and the warm start."""

import dataclasses
from typing import Any

import pytest
import torch
from drafter_cases import SHAPE, drafter, shape, shared_weights

from deepspec.config.schema import DrafterConfig, TargetConfig
from deepspec.drafters.config import shape_from_config, shape_to_config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape
from deepspec.drafters.warm_start import warm_start
from deepspec.errors import ConfigError, InputRefused
from deepspec.export.engines import verdict, verdicts
from deepspec.targets.spec import TargetSpec

SPEC = TargetSpec("llama", 32, 48, 6, 4, 2, 8, 61, 1e-6, 10000.0, {"rope_type": "default"}, 256)


def made(spec: TargetSpec = SPEC, target: dict[str, Any] | None = None, **drafter_options: Any) -> DrafterShape:
    target_config = TargetConfig(name="t", **{"feature_layers": [1, 3], "mask_token_id": 60, **(target or {})})
    options = {"num_layers": 2, "block_size": 4, "markov_rank": 6, **drafter_options}
    return shape_from(spec, target_config, DrafterConfig(**options))


def test_shape_of_a_target() -> None:
    assert made() == SHAPE
    assert made(intermediate_size=80).intermediate_size == 80
    assert made(sliding_window=128) == dataclasses.replace(SHAPE, sliding_window=128)


def test_no_head_is_a_one_line_ablation() -> None:
    found = made(head="none")
    assert (found.markov_rank, found.confidence_with_markov, found.confidence_head) == (0, False, True)


@pytest.mark.parametrize("target,options,named", [
    ({"mask_token_id": 61}, {}, "target.mask_token_id=61"),
    ({"mask_token_id": -1}, {}, "target.mask_token_id=-1"),
    ({"feature_layers": [3, 1]}, {}, "target.feature_layers"),
    ({"feature_layers": [1, 5]}, {}, "target.feature_layers"),
    ({"feature_layers": []}, {}, "target.feature_layers"),
    ({}, {"block_size": 1}, "drafter.block_size=1"),
    ({}, {"num_layers": 0}, "drafter.num_layers=0"),
    ({}, {"markov_rank": 0}, "drafter.markov_rank"),
    ({}, {"head": "lstm"}, "drafter.head='lstm'"),
    ({}, {"algorithm": "eagle"}, "drafter.algorithm='eagle'"),
    ({}, {"algorithm": "dflash"}, "drafter.head=none"),
    ({}, {"algorithm": "dflash", "head": "none"}, "drafter.confidence_head=false"),
])
def test_options_that_do_not_fit_are_named(target: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(target=target, **options)
    assert named in str(caught.value)


def test_weights_of_another_target_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(61, 32\)"):
        build_drafter(SHAPE, shared_weights(shape(vocab_size=62)))


@pytest.mark.parametrize("changes", [
    {}, {"head": "rnn"}, {"head": "none"}, {"sample_from_anchor": False}, {"confidence_head": False,
                                                                           "confidence_with_markov": False},
    {"algorithm": "dflash", "head": "none", "confidence_head": False},
    {"final_logit_softcap": 30.0, "embed_scale": 5.5, "target_model_type": "gemma3_text"},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0}},
    {"sliding_window": 128},
])
def test_config_round_trip(changes: dict[str, Any]) -> None:
    of = shape(**{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **changes})
    config = shape_to_config(of, num_anchors=512, extra={"eos_token_id": 2})
    assert shape_from_config(config) == of
    assert config["eos_token_id"] == 2 and config["num_anchors"] == 512
    assert ("markov_head_type" in config) == (of.head != "none")
    assert ("confidence_head_with_markov" in config) == of.confidence_head


def test_config_of_the_reference_code_is_read() -> None:
    config = shape_to_config(SHAPE, num_anchors=512)
    for key in ("sample_from_anchor", "deepspec_algorithm", "dflash_config", "target_hidden_size", "rope_theta"):
        del config[key]
    found = shape_from_config({**config, "model_type": "qwen3", "target_model_type": "qwen3"})
    assert found == dataclasses.replace(
        SHAPE, target_model_type="qwen3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def test_contradictory_or_incomplete_config_is_refused() -> None:
    config = shape_to_config(SHAPE, num_anchors=512)
    with pytest.raises(InputRefused, match="block_size"):
        shape_from_config({**config, "block_size": 9})
    del config["num_target_layers"]
    with pytest.raises(InputRefused, match="num_target_layers"):
        shape_from_config(config)


def test_window_in_the_config() -> None:
    """A window in every place engines look at; without one the keys are those of the published checkpoints."""
    config = shape_to_config(shape(sliding_window=128), num_anchors=4)
    assert (config["sliding_window"], config["use_sliding_window"]) == (128, True)
    assert config["layer_types"] == ["sliding_attention"] * 2 and config["dflash_config"]["causal"] is False
    full = shape_to_config(SHAPE, num_anchors=4)
    assert (full["sliding_window"], full["use_sliding_window"], full["max_window_layers"]) == (None, False, 2)
    assert full["layer_types"] == ["full_attention"] * 2 and "causal" not in full["dflash_config"]
    for key in ("sliding_window", "use_sliding_window", "layer_types"):  # a checkpoint from before there were windows
        del full[key]
    assert shape_from_config(full).sliding_window is None
    # A window that no layer uses, as in many of Qwen's own files.
    assert shape_from_config({**shape_to_config(SHAPE, num_anchors=4), "sliding_window": 4096}).sliding_window is None


@pytest.mark.parametrize("changes,named", [
    ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"), ({"sliding_window": None}, "None"),
    ({"sliding_window": 0}, "sliding_window=0"), ({"causal": True, "dflash_config": {}}, "causal"),
])
def test_windows_of_others_are_refused(changes: dict[str, Any], named: str) -> None:
    config = shape_to_config(shape(sliding_window=128), num_anchors=4)
    with pytest.raises(InputRefused, match=named):
        shape_from_config({**config, **changes})


def test_engines_and_the_window() -> None:
    loads = {}
    for window in (None, 4, 128):
        config = shape_to_config(shape(sliding_window=window), num_anchors=4)
        loads[window] = {entry.engine for entry in verdicts(config) if entry.loads}
    assert {"vllm", "sglang"} <= loads[None] and loads[4] == set() and loads[128] == {"vllm"}
    assert "fewer than in training" in verdict(config, "vllm").evidence
    assert "drafter.sliding_window=null" in " ".join(verdict(config, "sglang").reasons)


def test_transformers_reads_the_config(tmp_path: Any) -> None:
    import json

    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(shape_to_config(SHAPE, num_anchors=4)))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.model_type == "qwen3" and loaded.block_size == 4 and loaded.target_layer_ids == [1, 3]
    (tmp_path / "config.json").write_text(json.dumps(shape_to_config(shape(sliding_window=9), num_anchors=4)))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.sliding_window == 9 and loaded.layer_types == ["sliding_attention"] * 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_warm_start_copies_the_last_layers(family: str) -> None:
    from transformers import LlamaConfig, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    kind, config_class = (LlamaDecoderLayer, LlamaConfig) if family == "llama" else (Qwen3DecoderLayer, Qwen3Config)
    config = config_class(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8, vocab_size=61)
    layers = [kind(config, index) for index in range(3)]
    model = drafter()
    fresh = build_drafter(SHAPE, shared_weights(SHAPE))
    copied = warm_start(fresh, layers, torch.full((32,), 1.5))
    assert copied == 2 * (9 if family == "llama" else 11)
    for ours, theirs in zip(fresh.layers, layers[1:], strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    features = torch.randn(3, 64)
    assert torch.equal(fresh.fc(features), features[:, 32:])
    assert fresh.norm.weight.unique().tolist() == [1.5]
    assert model.shape == fresh.shape


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_warm_start_takes_fused_projections_apart(kv_heads: int) -> None:
    """Phi-3's; where keys have other heads than the drafter's, what is fused with them stays as it was."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer

    config = Phi3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=kv_heads, vocab_size=61)
    layers = [Phi3DecoderLayer(config, index) for index in range(2)]
    fresh = build_drafter(SHAPE, shared_weights(SHAPE))
    before = fresh.layers[1].self_attn.v_proj.weight.clone()
    fits = kv_heads == SHAPE.num_kv_heads
    assert warm_start(fresh, layers) == 2 * (9 if fits else 6)
    ours, theirs, states = fresh.layers[1], layers[1], torch.randn(3, 32)
    fused = theirs.self_attn.qkv_proj(states)
    found = [getattr(ours.self_attn, name)(states) for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.allclose(torch.cat(found, dim=-1), fused, atol=1e-6) if fits else torch.equal(
        ours.self_attn.v_proj.weight, before)
    assert torch.allclose(ours.mlp(states), theirs.mlp(states), atol=1e-6)
