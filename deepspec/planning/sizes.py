"""Parameter counts of a drafter from the options alone: no weight, no hub, no torch."""

from dataclasses import dataclass
from typing import Any

from deepspec.config.schema import Config, drafter_layers
from deepspec.drafters.v4.options import is_v4
from deepspec.export import layout, layout_gemma4
from deepspec.planning.sizes_v4 import idle_parameters, v4_keys


@dataclass(frozen=True)
class ParameterCount:
    """Elements by part; ``frozen`` are the copies of the target's embedding and LM head."""

    fc: int
    layers: int
    norms: int
    head: int
    confidence: int
    frozen: int
    target: int  # the frozen target itself, from its sizes
    target_active: int  # of these, what one token is multiplied with

    @property
    def trainable(self) -> int:
        """What the optimizer updates."""
        return self.fc + self.layers + self.norms + self.head + self.confidence


def drafter_head_dim(config: Config) -> int:
    """Head width of the drafter."""
    if is_v4(config.drafter.algorithm) and config.drafter.v4.head_dim is not None:
        return config.drafter.v4.head_dim
    wide = config.target.shape.full_head_dim if config.drafter.block == "gemma4" else None
    return config.target.shape.head_dim if wide is None else wide


def drafter_kv_heads(config: Config) -> int:
    """Key heads of the drafter."""
    if is_v4(config.drafter.algorithm):
        return 1
    wide = config.target.shape.full_kv_heads if config.drafter.block == "gemma4" else None
    return config.target.shape.num_kv_heads if wide is None else wide


def drafter_keys(config: Config) -> dict[str, Any]:
    """The keys of config.json that decide shapes (export.layout), from the options of a run."""
    if is_v4(config.drafter.algorithm):
        return v4_keys(config)
    target, drafter = config.target.shape, config.drafter
    with_head = drafter.head != "none"
    wide = drafter.block == "gemma4"
    own = {"architectures": [layout_gemma4.ARCHITECTURE], "attention_k_eq_v": bool(target.keys_are_values),
           "global_head_dim": drafter_head_dim(config), "num_global_key_value_heads": drafter_kv_heads(config)}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": drafter.intermediate_size or target.intermediate_size,
        "head_dim": drafter_head_dim(config), "num_attention_heads": target.num_heads,
        "num_key_value_heads": drafter_kv_heads(config), "vocab_size": target.vocab_size,
        "num_hidden_layers": drafter_layers(drafter), "target_layer_ids": list(config.target.feature_layers),
        "target_hidden_size": target.hidden_size, "markov_rank": drafter.markov_rank if with_head else 0,
        "markov_head_type": drafter.head, "enable_confidence_head": drafter.confidence_head,
        "confidence_head_with_markov": drafter.confidence_with_markov and with_head,
        "block_size": drafter.block_size, "sample_from_anchor": drafter.sample_from_anchor,
        "deepspec_algorithm": drafter.algorithm, **(own if wide else {}),
    }


def active_layers(config: Config, parameters: ParameterCount) -> int:
    """Elements of the drafter's layers that one token is multiplied with: all, or without the experts it skips."""
    return parameters.layers - (idle_parameters(config) if is_v4(config.drafter.algorithm) else 0)


def target_parameters(config: Config) -> int:
    """Elements of the target: as told, else of a dense decoder of these sizes.

    Tied or not is unknown there: one matrix more at most.
    """
    shape = config.target.shape
    if shape.parameters is not None:
        return shape.parameters
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    return shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size + shape.hidden_size


def count_parameters(config: Config) -> ParameterCount:
    """All counts of one configuration."""
    target = target_parameters(config)
    active = config.target.shape.active_parameters or target
    return ParameterCount(**layout.breakdown(drafter_keys(config)), target=target, target_active=active)
