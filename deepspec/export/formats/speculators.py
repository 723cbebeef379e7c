"""The layout of the ``speculators`` package 0.9.0: nested Qwen3 keys, layer ids in vLLM's counting (ours plus one)."""

from typing import Any, Mapping

from torch import Tensor

from deepspec.export import layout
from deepspec.export.formats import Converted, FormatContext, speculators_eagle3, without_shared

VERSION = "0.9.0"
_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout", "vocab_size", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "use_cache",
)


def convert(values: Mapping[str, Any], tensors: Mapping[str, Tensor], context: FormatContext) -> Converted:
    """Names of tensors stay. ``sample_from_anchor`` is always written: readers default to different values."""
    if layout.kind(values) == "eagle3":
        return speculators_eagle3.convert(values, tensors, context, version=VERSION, layer_keys=_LAYER_KEYS)
    dflash = layout.is_dflash(values)
    kind = "dflash" if dflash else "dspark"
    proposal = {"proposal_type": "greedy", "speculative_tokens": layout.speculative_tokens(values),
                "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config: dict[str, Any] = {
        "speculators_model_type": kind, "speculators_version": VERSION,
        "architectures": ["DFlashDraftModel" if dflash else "DSparkDraftModel"],
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [proposal], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": context.target, "architectures": list(context.target_architectures)},
        },
        "transformer_layer_config": {"model_type": "qwen3"} | {key: values[key] for key in _LAYER_KEYS},
        "draft_vocab_size": values.get("draft_vocab_size", values["vocab_size"]), "block_size": values["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in values["target_layer_ids"]],
        "mask_token_id": values["mask_token_id"], "target_hidden_size": values["target_hidden_size"],
        "sliding_window_non_causal": values["sliding_window"] is not None,
        "sample_from_anchor": bool(values["sample_from_anchor"]),
        "tie_word_embeddings": False, "dtype": values["dtype"],
    }
    if not dflash:
        config |= {key: values[key] for key in ("markov_rank", "markov_head_type", "enable_confidence_head")}
        config["confidence_head_with_markov"] = bool(values.get("confidence_head_with_markov"))
    return config, without_shared(tensors)
