"""Parameter counts of a drafter from the options alone: no weight, no hub, no torch."""

from dataclasses import dataclass
from typing import Any

from deepspec.config.schema import Config, drafter_layers
from deepspec.export import layout


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

    @property
    def trainable(self) -> int:
        """What the optimizer updates."""
        return self.fc + self.layers + self.norms + self.head + self.confidence


def drafter_keys(config: Config) -> dict[str, Any]:
    """The keys of config.json that decide shapes (export.layout), from the options of a run."""
    target, drafter = config.target.shape, config.drafter
    with_head = drafter.head != "none"
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": drafter.intermediate_size or target.intermediate_size,
        "head_dim": target.head_dim, "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads, "vocab_size": target.vocab_size,
        "num_hidden_layers": drafter_layers(drafter), "target_layer_ids": list(config.target.feature_layers),
        "target_hidden_size": target.hidden_size, "markov_rank": drafter.markov_rank if with_head else 0,
        "markov_head_type": drafter.head, "enable_confidence_head": drafter.confidence_head,
        "confidence_head_with_markov": drafter.confidence_with_markov and with_head,
        "block_size": drafter.block_size, "sample_from_anchor": drafter.sample_from_anchor,
        "deepspec_algorithm": drafter.algorithm,
    }


def target_parameters(config: Config) -> int:
    """Elements of a dense decoder of these sizes (tied or not is unknown here: one matrix more at most)."""
    shape = config.target.shape
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    return shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size + shape.hidden_size


def count_parameters(config: Config) -> ParameterCount:
    """All counts of one configuration."""
    return ParameterCount(**layout.breakdown(drafter_keys(config)), target=target_parameters(config))
