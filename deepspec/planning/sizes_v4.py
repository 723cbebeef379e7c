"""Sizes of a DeepSeek-V4 style drafter from the options alone. No torch.

n streams, k of E experts per token, I width of an expert.
"""

from typing import Any

from deepspec.config.schema import Config
from deepspec.drafters.v4.options import heads_of, v4_shape
from deepspec.drafters.v4.shape import ALGORITHM, V4Shape


def _of(config: Config) -> V4Shape:
    shape = config.target.shape
    return v4_shape(config.drafter, hidden_size=shape.hidden_size, num_heads=shape.num_heads, head_dim=shape.head_dim)


def v4_keys(config: Config) -> dict[str, Any]:
    """The keys of config.json that decide shapes (drafters/v4/names.py)."""
    target, drafter, of = config.target.shape, config.drafter, _of(config)
    heads, width = heads_of(drafter, target.num_heads, target.head_dim)
    return {
        "hidden_size": target.hidden_size, "target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        "moe_intermediate_size": drafter.intermediate_size or target.intermediate_size,
        "num_attention_heads": heads, "head_dim": width, "q_lora_rank": of.q_lora_rank, "o_groups": of.o_groups,
        "o_lora_rank": of.o_lora_rank, "n_routed_experts": of.num_experts, "hc_mult": of.hc_mult,
        "n_mtp_layers": drafter.num_layers, "dspark_target_layer_ids": list(config.target.feature_layers),
        "dspark_markov_rank": drafter.markov_rank, "enable_confidence_head": drafter.confidence_head,
        "confidence_head_with_markov": drafter.confidence_with_markov, "deepspec_algorithm": ALGORITHM,
    }


def idle_parameters(config: Config) -> int:
    """Elements of the experts that one token does not go through, over all stages."""
    of, drafter = _of(config), config.drafter
    inner = drafter.intermediate_size or config.target.shape.intermediate_size
    return drafter.num_layers * (of.num_experts - of.experts_per_token) * 3 * inner * config.target.shape.hidden_size


def stacked_elements(config: Config) -> int:
    """Elements of one matrix of all experts of a stage, a single parameter."""
    inner = config.drafter.intermediate_size or config.target.shape.intermediate_size
    return _of(config).num_experts * inner * config.target.shape.hidden_size


def kept_per_slot(config: Config, width: int) -> int:
    """Bytes that the backward pass of one stage keeps for one slot, elements of ``width`` bytes.

    Each of the two sites keeps its streams twice in float32 (normalised and mixed) and three times as they are; each
    expert of a token its row, three inner vectors and an output.
    """
    target, of, drafter = config.target.shape, _of(config), config.drafter
    heads, head = heads_of(drafter, target.num_heads, target.head_dim)
    inner = drafter.intermediate_size or target.intermediate_size
    hidden, streams = target.hidden_size, of.hc_mult * target.hidden_size
    sites = 2 * (2 * 4 + 3 * width) * streams
    attention = (4 * heads * head + 2 * of.q_lora_rank + of.o_groups * of.o_lora_rank + 2 * head) * width
    experts = (of.experts_per_token * (2 * hidden + 3 * inner) + 3 * inner + 4 * hidden) * width
    return sites + attention + experts


def kept_per_token(config: Config, width: int) -> int:
    """Bytes of one stage for one context token: its row before and after the norm and the rotation."""
    _, head = heads_of(config.drafter, config.target.shape.num_heads, config.target.shape.head_dim)
    return (config.target.shape.hidden_size + 3 * head) * width


def stream_bytes(config: Config, width: int) -> int:
    """Bytes of one slot's streams between two stages."""
    return _of(config).hc_mult * config.target.shape.hidden_size * width


def attention_flops(config: Config, slots: float) -> float:
    """Forward and backward of the scores and their products: every slot sees a window and its block."""
    heads, head = heads_of(config.drafter, config.target.shape.num_heads, config.target.shape.head_dim)
    seen = (config.drafter.sliding_window or 0) + config.drafter.block_size
    return 12.0 * slots * heads * head * seen * config.drafter.num_layers
