"""A Gemma4-shaped drafter on a random Gemma 4 target: shape, export with every check, and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_run import MASK, ROWS, SHA, make_config, save_target

from deepspec.config.schema import TargetShape
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.launch import Origin
from deepspec.targets.load import load_target
from deepspec.training.importing import check_shared, own_tensors, read_drafter


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the other random target, and six thin Gemma 4 layers of which two see everything."""
    from transformers import AutoModelForCausalLM
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    folder = save_target(tmp_path_factory.mktemp("gemma"))
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(
        vocab_size=ROWS, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, layer_types=kinds, sliding_window=8, final_logit_softcapping=30.0,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=251, pad_token_id=252)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


def test_every_check_passes_and_it_comes_back(gemma_folder: Path, tmp_path: Path) -> None:
    config = make_config(gemma_folder, tmp_path / "run", block="gemma4")
    config.target.shape = TargetShape("gemma4_text", 64, 96, 6, 4, 2, 16, ROWS, full_head_dim=32, full_kv_heads=1,
                                      keys_are_values=True)
    target: Any = load_target(config.target, device="cpu", cache_dir=tmp_path / "data")
    shape = shape_from(target.spec, config.target, config.drafter)
    assert (shape.head_dim, shape.num_kv_heads, shape.keys_are_values, shape.embed_scale) == (32, 1, True, 8.0)
    assert shape.rope_parameters["rope_type"] == "proportional" and shape.mask_token_id == MASK
    torch.manual_seed(1)
    drafter = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    drafter = drafter.eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    origin = Origin(str(gemma_folder), None, target.fingerprint, "float32", SHA, "step-1", str(tmp_path / "run/export"),
                    ("Gemma4ForCausalLM",))
    evidence = gather(tmp_path / "run", SHA, target.fingerprint, shape.draft_length)
    folder = export_drafter(ExportRequest(config, target, drafter, origin, evidence, tmp_path / "none.jsonl"))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["Gemma4DSparkModel"] and values["final_logit_softcapping"] == 30.0
    assert values["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    found, tensors = read_drafter(folder)
    assert replace(found, target_model_type=shape.target_model_type) == shape
    check_shared(tensors, drafter.shared, folder)
    for name, value in own_tensors(tensors).items():
        assert torch.equal(value, dict(drafter.named_parameters())[name]), name
    assert "no drafter of this layout was served" in (folder / "serving" / "launch.md").read_text()
