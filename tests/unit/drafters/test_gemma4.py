"""The Gemma4-shaped drafter: golden values of its published layout, training and drafting alike, and its files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import DOCUMENTS, drafter, loss_and_grads, pack, shape
from gemma4_reference import block_logits

from deepspec.config.schema import DrafterConfig, TargetConfig
from deepspec.drafters.config import shape_from_config, shape_to_config
from deepspec.drafters.registry import shape_from
from deepspec.drafters.types import DrafterShape
from deepspec.errors import ConfigError, InputRefused
from deepspec.export import gates, layout, tensors
from deepspec.export.engines import verdicts
from deepspec.export.load import load_exported
from deepspec.targets.spec import TargetSpec
from deepspec.training.importing import own_tensors, read_drafter

ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}


def gemma(**changes: Any) -> DrafterShape:
    return shape(**{"block": "gemma4", "head_dim": 16, "num_kv_heads": 1, "keys_are_values": True, "rope_theta": 1e4,
                    "rope_parameters": ROPE, "embed_scale": math.sqrt(32), "final_logit_softcap": 5.0,
                    "target_model_type": "gemma4", **changes})


def exported(model: Any, folder: Path) -> dict[str, Any]:
    """The drafter as files of the published layout; config.json is returned."""
    config = shape_to_config(model.shape, num_anchors=4, dtype="float32")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors.write(folder, tensors.collect(model, model.shape, model.shared, torch.float32))
    return config


@pytest.mark.parametrize("shared_values", [True, False])
def test_equals_the_published_layout_block_by_block(tmp_path: Path, shared_values: bool) -> None:
    """Training's packed pass, drafting's cached pass and plain operators on the exported tensors agree."""
    of = gemma(keys_are_values=shared_values, num_kv_heads=1 if shared_values else 2)
    model = drafter(of)
    config = exported(model, tmp_path / "export")
    stored = tensors.read(tmp_path / "export")
    batch = pack(of, [(19, (3, 0, 11))])
    hidden = model(batch).hidden
    drafted = gates.block_logits(model, batch.features, batch.input_ids, batch.blocks.anchor_rows)
    for place, anchor in enumerate((3, 0, 11)):
        expected = block_logits(stored, config, batch.features, batch.input_ids, anchor)
        torch.testing.assert_close(drafted[place], expected, rtol=1e-4, atol=1e-4)
        bias = model.sequential.bias(model.sequential.transitions(
            batch.input_ids[None, anchor:anchor + 4], hidden[place:place + 1]))[0]
        torch.testing.assert_close(model.base_logits(hidden[place]) + bias, expected, rtol=1e-4, atol=1e-4)
    for name in ("layers.1.post_feedforward_layernorm.weight", "layers.0.self_attn.k_norm.weight"):  # nothing is idle
        other = {**stored, name: stored[name] * 1.5}
        assert not torch.allclose(block_logits(other, config, batch.features, batch.input_ids, 11),
                                  drafted[2], atol=1e-3)


def test_trains_and_packs_like_the_other_layers() -> None:
    """Every parameter gets a gradient; documents of a pack do not see each other."""
    of = gemma()
    model = drafter(of).double()
    batch = pack(of, DOCUMENTS, dtype=torch.float64)
    loss, grads = loss_and_grads(model, batch, batch)
    assert all(bool(grad.abs().sum() > 0) for grad in grads)
    parts = [loss_and_grads(model, pack(of, [document], dtype=torch.float64), batch) for document in DOCUMENTS]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    for index, grad in enumerate(grads):
        torch.testing.assert_close(sum(part[1][index] for part in parts), grad)


def test_files_have_the_published_names_and_come_back(tmp_path: Path) -> None:
    model = drafter(gemma())
    config = exported(model, tmp_path / "export")
    stored = tensors.read(tmp_path / "export")
    assert {name: tuple(value.shape) for name, value in stored.items()} == layout.expected_tensors(config)
    assert "layers.0.layer_scalar" in stored and "layers.0.self_attn.v_proj.weight" not in stored
    assert config["architectures"] == ["Gemma4DSparkModel"] and config["global_head_dim"] == 16
    assert shape_from_config(config) == model.shape
    assert not [key for key in layout.required_keys(config) if key not in config]
    again, _ = load_exported(tmp_path / "export")
    for name, value in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], value), name
    found, read = read_drafter(tmp_path / "export")
    assert found == model.shape and own_tensors(read).keys() == dict(model.named_parameters()).keys()


def test_a_layer_scalar_that_was_trained_is_refused(tmp_path: Path) -> None:
    model = drafter(gemma())
    exported(model, tmp_path / "export")
    stored = {name: value.clone() for name, value in tensors.read(tmp_path / "export").items()}
    stored["layers.1.layer_scalar"] *= 0.5
    tensors.write(tmp_path / "export", stored)
    for read in (load_exported, read_drafter):
        with pytest.raises(InputRefused, match=r"layers.1.layer_scalar is \[0.5\]"):
            read(tmp_path / "export")


def spec(**changes: Any) -> TargetSpec:
    base = TargetSpec("gemma4", 32, 48, 6, 4, 2, 8, 61, 1e-6, 1e4, {"rope_type": "default"}, 256,
                      final_logit_softcap=5.0, embed_scale=math.sqrt(32), full_head_dim=16, full_kv_heads=1,
                      keys_are_values=True, full_rope_parameters=ROPE)
    return replace(base, **changes)


def test_shape_follows_the_full_attention_layers_of_the_target() -> None:
    target = TargetConfig(name="t", feature_layers=[1, 3], mask_token_id=60)
    options = DrafterConfig(num_layers=2, block_size=4, markov_rank=6, block="gemma4")
    assert shape_from(spec(), target, options) == gemma()
    qwen = shape_from(spec(), target, replace(options, block="qwen3"))
    assert (qwen.head_dim, qwen.num_kv_heads, qwen.rope_parameters) == (8, 2, {"rope_type": "default"})
    with pytest.raises(ConfigError, match="drafter.block=gemma4"):
        shape_from(spec(full_rope_parameters=None), target, options)
    with pytest.raises(ConfigError, match="without a window"):
        shape_from(spec(), target, replace(options, sliding_window=8))


def test_engines_that_were_not_looked_into_are_named() -> None:
    config = shape_to_config(gemma(), num_anchors=4)
    loads = {entry.engine for entry in verdicts(config) if entry.loads}
    assert loads == {"vllm", "llama_cpp"}
    separate = shape_to_config(gemma(keys_are_values=False), num_anchors=4)
    assert "vllm" not in {entry.engine for entry in verdicts(separate) if entry.loads}
