"""The architecture as the rest of the project sees it."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from tiny_targets import FAMILIES, tiny_model, tiny_target
from transformers import Gemma3TextConfig, Phi3Config

from deepspec.config.schema import TargetShape
from deepspec.errors import InputRefused
from deepspec.targets.spec import TargetSpec, check_parameters, check_shape

SHAPE = TargetShape(model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2,
                    head_dim=16, vocab_size=320)


def test_importing_it_needs_no_torch() -> None:
    code = "import sys, deepspec.targets.spec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sizes_are_read_from_the_configuration() -> None:
    spec = TargetSpec.from_hf_config(FAMILIES["qwen3"]())
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 2, 16)
    assert spec.rope_theta == spec.rope_parameters["rope_theta"] and spec.eos_token_ids == (2,)
    assert not spec.tie_word_embeddings and TargetSpec.from_hf_config(FAMILIES["qwen3_tied"]()).tie_word_embeddings
    assert TargetSpec.from_hf_config(FAMILIES["llama"]()).attention_bias


def test_gemma_scales_and_caps() -> None:
    spec = TargetSpec.from_hf_config(FAMILIES["gemma2"]())
    assert spec.final_logit_softcap == 3.0 and spec.embed_scale == math.sqrt(64)
    nested = TargetSpec.from_hf_config(Gemma3TextConfig(num_hidden_layers=6))
    assert nested.rope_theta == 1_000_000.0 and nested.rope_parameters["rope_type"] == "default"


def test_end_tokens_of_all_places_are_merged() -> None:
    spec = TargetSpec.from_hf_config(FAMILIES["qwen3"](), eos_token_ids=[7, 2, 9], vocab_rows=330)
    assert spec.eos_token_ids == (2, 7, 9) and spec.vocab_size == 330


def test_the_promised_shape_is_compared() -> None:
    spec = tiny_target().spec
    check_shape(spec, SHAPE)
    check_shape(spec, TargetShape())  # nothing promised
    with pytest.raises(InputRefused, match=r"num_kv_heads is 2 but target.shape.num_kv_heads says 4.*vocab_size is"):
        check_shape(spec, replace(SHAPE, num_kv_heads=4, vocab_size=300))


def test_the_promised_number_of_parameters_is_compared() -> None:
    model = tiny_model("qwen3_tied")
    real = sum(parameter.numel() for parameter in model.parameters())
    check_parameters(model, TargetShape(parameters=real), "tiny")
    check_parameters(model, TargetShape(), "tiny")
    with pytest.raises(InputRefused, match=rf"tiny has {real:,} parameters.*says {2 * real:,}"):
        check_parameters(model, TargetShape(parameters=2 * real), "tiny")
    model.config.quantization_config = {"quant_method": "fp8"}
    check_parameters(model, TargetShape(parameters=2 * real), "tiny")


@pytest.mark.parametrize("family, kind, expected", [
    ("gemma4_text", "default", 1_000_000.0), ("qwen3_5_text", "default", 10000.0), ("deepseek_v4", "default", 10000.0),
    ("deepseek_v3", "yarn", 10000.0), ("llama", "llama3", 10000.0), ("phi3", "default", 10000.0),
])
def test_a_drafter_gets_rope_that_turns_whole_heads(family: str, kind: str, expected: float) -> None:
    spec = TargetSpec.from_hf_config(FAMILIES[family]())
    assert spec.rope_parameters["rope_type"] == kind and spec.rope_theta == expected
    assert not {"partial_rotary_factor", "mrope_section"} & set(spec.rope_parameters)


def test_longrope_of_whole_heads_reaches_the_drafter() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = Phi3Config(hidden_size=64, num_attention_heads=4, max_position_embeddings=128,
                        original_max_position_embeddings=16, rope_parameters={"rope_type": "longrope"} | factors)
    found = TargetSpec.from_hf_config(config).rope_parameters
    assert found == factors | {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}


def test_sizes_of_experts_and_of_layers_with_their_own() -> None:
    assert TargetSpec.from_hf_config(FAMILIES["deepseek_v4"]()).intermediate_size == 32
    gemma = TargetSpec.from_hf_config(FAMILIES["gemma4_text"]())
    assert (gemma.head_dim, gemma.num_kv_heads, gemma.full_head_dim, gemma.full_kv_heads) == (16, 2, 32, 1)
    assert TargetSpec.from_hf_config(FAMILIES["granite"]()).logit_scale == 0.25
