"""RoPE scaling of targets: the drafter's table is the target's own at the served length, and travels with it."""

import json
from typing import Any

import pytest
import torch
from drafter_cases import shape

from deepspec.config.schema import DrafterConfig, TargetConfig
from deepspec.drafters.config import shape_from_config, shape_to_config
from deepspec.drafters.registry import shape_from
from deepspec.drafters.rope import RotaryTable
from deepspec.errors import ConfigError
from deepspec.targets.spec import TargetSpec

LIMIT, ORIGINAL = 512, 128
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
                 "original_max_position_embeddings": ORIGINAL},
}


def scaled(kind: str, **more: Any) -> Any:
    return shape(max_position_embeddings=LIMIT,
                 rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind], **more})


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_table_is_the_targets_own_at_the_length_that_is_served(kind: str) -> None:
    """Hugging Face's rotary embedding of a target with these parameters, asked for all positions up to the limit."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    of = scaled(kind)
    config = Qwen3Config(hidden_size=of.hidden_size, num_attention_heads=of.num_heads, head_dim=of.head_dim,
                         max_position_embeddings=LIMIT, rope_parameters=dict(of.rope_parameters))
    positions = torch.arange(LIMIT)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1, of.head_dim), positions[None])
    found = RotaryTable(of)(positions)
    torch.testing.assert_close(found[0].squeeze(1), cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1].squeeze(1), sin[0], rtol=0, atol=1e-5)
    if kind not in ("default", "dynamic"):  # dynamic changes nothing up to the configured limit
        assert not torch.allclose(found[0], RotaryTable(scaled("default"))(positions)[0], atol=1e-2)


def test_dynamic_scaling_of_a_context_that_was_extended() -> None:
    """With ``max_trained_positions`` the base grows: the formula of engines, which keep one table for all lengths."""
    of, factor = scaled("dynamic", max_trained_positions=ORIGINAL), 2.0
    base = of.rope_theta * (factor * LIMIT / ORIGINAL - (factor - 1)) ** (of.head_dim / (of.head_dim - 2))
    expected = 7 / base ** (torch.arange(0, of.head_dim, 2) / of.head_dim)
    torch.testing.assert_close(RotaryTable(of)(torch.tensor([7]))[1][0, 0, :4], expected.sin())


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_travels_in_the_config(kind: str) -> None:
    """What checkpoints and exports say gives the same table; engines find it under both names."""
    of = scaled(kind)
    config = json.loads(json.dumps(shape_to_config(of, num_anchors=4)))
    again = shape_from_config(config)
    assert again == of and config["max_position_embeddings"] == LIMIT
    assert config["rope_parameters"] == of.rope_parameters
    assert config["rope_scaling"] == (None if kind == "default" else of.rope_parameters)
    positions = torch.arange(0, LIMIT, 17)
    assert torch.equal(RotaryTable(again)(positions)[0], RotaryTable(of)(positions)[0])


@pytest.mark.parametrize("parameters,named", [
    ({"rope_type": "longrope"}, "longrope"), ({"rope_type": "spiral"}, "spiral"),
    ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0, 3.0],
      "original_max_position_embeddings": 8}, "heads of width 8"),
])
def test_rope_that_the_drafter_cannot_reproduce_is_refused(parameters: dict[str, Any], named: str) -> None:
    spec = TargetSpec("llama", 32, 48, 6, 4, 2, 8, 61, 1e-6, 10000.0, parameters, 256)
    target = TargetConfig(name="t", feature_layers=[1, 3], mask_token_id=60)
    with pytest.raises(ConfigError, match=named):
        shape_from(spec, target, DrafterConfig(num_layers=2, block_size=4, markov_rank=6))
