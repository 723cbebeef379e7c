"""What ``drafter=dspark_v4`` may be combined with, and what its plan counts."""

from dataclasses import replace
from typing import Any

import pytest

from deepspec.config.compose import compose_config
from deepspec.drafters.registry import shape_from
from deepspec.errors import ConfigError
from deepspec.planning.memory import activation_bytes
from deepspec.planning.sizes import active_layers, count_parameters
from deepspec.planning.validate import validate
from deepspec.planning.work import expected_length, train_flops_per_sample
from deepspec.targets.spec import TargetSpec

SMALL = ("drafter.v4.num_experts=8", "drafter.v4.experts_per_token=2", "drafter.intermediate_size=64")


def config_of(*overrides: str) -> Any:
    return compose_config(["+experiment=tiny", "drafter=dspark_v4", *SMALL, *overrides])


def spec(**changes: Any) -> TargetSpec:
    values = dict(model_type="qwen3", hidden_size=128, intermediate_size=384, num_layers=8, num_heads=4,
                  num_kv_heads=2, head_dim=32, vocab_size=2112, rms_norm_eps=1e-6, rope_theta=1e6,
                  rope_parameters={"rope_type": "yarn", "factor": 4.0})
    return TargetSpec(**(values | changes))


@pytest.mark.parametrize("name", ["dspark_v4", "dspark_v4_flash", "dspark_v4_pro"])
def test_its_files_are_valid(name: str) -> None:
    validate(compose_config(["+experiment=tiny", f"drafter={name}"]))


@pytest.mark.parametrize("override, said", [
    ("drafter.head=rnn", "drafter.head"), ("drafter.head=none", "drafter.head"),
    ("drafter.sample_from_anchor=false", "drafter.sample_from_anchor"),
    ("drafter.sliding_window=null", "drafter.sliding_window"), ("drafter.v4.num_experts=0", "drafter.v4.num_experts"),
    ("drafter.v4.experts_per_token=9", "at most drafter.v4.num_experts=8"),
    ("drafter.v4.o_groups=3", "a divisor of the 4 heads"), ("drafter.v4.rope_head_dim=33", "rope_head_dim"),
    ("drafter.v4.rope_head_dim=64", "at most the head width of 32"), ("drafter.v4.hc_eps=0", "drafter.v4.hc_eps"),
    ("drafter.v4.swiglu_limit=-1", "swiglu_limit"), ("drafter.v4.router_bias_rate=1", "router_bias_rate"),
    ("drafter.v4.hc_mult=0", "hc_mult"), ("trainer.compile=true", "trainer.compile"),
    ("trainer.attention=chunked", "trainer.attention"), ("export.formats=[deepspec,speculators]", "export.formats"),
    ("export.fold_calibration=true", "export.fold_calibration"), ("drafter.block=gemma4", "drafter.block"),
    ("target.feature_layers=[1,4,7]", "without the last layer"),
])
def test_what_does_not_fit_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_of(override))
    assert said in str(caught.value)


def test_its_options_do_nothing_elsewhere() -> None:
    with pytest.raises(ConfigError, match="drafter.v4.num_experts"):
        validate(compose_config(["+experiment=tiny", "drafter=dspark", "drafter.v4.num_experts=8"]))


def test_the_last_layer_is_taken_of_v4_targets_alone() -> None:
    config = config_of("target.shape.model_type=deepseek_v4", "target.feature_layers=[5,6,7]")
    validate(config)
    assert shape_from(spec(model_type="deepseek_v4"), config.target, config.drafter).feature_layers == (5, 6, 7)
    with pytest.raises(ConfigError, match="between 0 and 6"):
        shape_from(spec(), config.target, config.drafter)


def test_shape_for_any_target() -> None:
    """RoPE is the drafter's own, plain, whatever scaling the target has; open sizes follow from the target's."""
    config = config_of()
    shape = shape_from(spec(), config.target, config.drafter)
    assert shape.v4 is not None and shape.rope_theta == 10000.0 and shape.rope_parameters["rope_type"] == "default"
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 1, 32, 64)
    assert (shape.v4.q_lora_rank, shape.v4.o_groups, shape.v4.o_lora_rank, shape.v4.rope_head_dim) == (32, 1, 32, 32)
    wide = replace(config.drafter, v4=replace(config.drafter.v4, num_heads=16, head_dim=128, o_groups=4))
    shape = shape_from(spec(), config.target, wide)
    assert (shape.num_heads, shape.head_dim) == (16, 128) and shape.v4 is not None and shape.v4.rope_head_dim == 64


def test_a_plan_knows_that_most_experts_rest() -> None:
    few, many = config_of(), config_of("drafter.v4.num_experts=64")
    counts = [count_parameters(config) for config in (few, many)]
    expert, stages = 3 * 64 * 128, few.drafter.num_layers
    router = 128 + 1  # of every expert: a row and a bias
    assert counts[1].trainable - counts[0].trainable == stages * 56 * (expert + router)
    active = [active_layers(config, count) for config, count in zip((few, many), counts)]
    assert active[0] == counts[0].layers - stages * 6 * expert and active[1] - active[0] == stages * 56 * router
    flops = [train_flops_per_sample(config, count, expected_length(config))
             for config, count in zip((few, many), counts)]
    assert flops[1] < 1.1 * flops[0]
    assert activation_bytes(few, 100, 500, 4) == activation_bytes(many, 100, 500, 4)
    spared = config_of("trainer.activation_checkpointing=true")
    assert activation_bytes(spared, 100, 500, 4) < activation_bytes(few, 100, 500, 4)
