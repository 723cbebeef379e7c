"""The DeepSpec checkpoint layout in numbers: required keys, tensor names and shapes. Needs no torch, so that a plan
can count parameters with the very formulas that later gate an export.
"""

import math
from typing import Any, Mapping

from deepspec.export import layout_gemma4, layout_medusa, layout_recurrent, layout_v4
from deepspec.export.layout_recurrent import EAGLE3, MTP

FORMATS = ("deepspec", "speculators", "specforge", "zlab_dflash")
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.")
SHARED_TENSORS = ("embed_tokens.weight", "lm_head.weight")
DRAFT_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight")  # a row for each token that may be proposed
MAPPING = {"d2t": "int64", "t2d": "bool"}  # dtypes of what maps a reduced draft vocabulary
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
DOUBLED_KEYS = (
    "block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
)
COMMON_KEYS = (
    "architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
    "attention_dropout", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "block_size",
    "num_target_layers", "target_hidden_size", "target_layer_ids", "mask_token_id", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "num_anchors", "dflash_config", "markov_rank",
    "enable_confidence_head", "sample_from_anchor",
)
NULLABLE_KEYS = ("rope_scaling", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` is the 1+N DFlash layout (no Markov and no confidence tensors)."""
    return list(config.get("architectures", [])) == [DFLASH_ARCHITECTURE]


def kind(config: Mapping[str, Any]) -> str:
    """dspark, dspark_v4, dflash (its 1+N layout), eagle3 or mtp: what names and shapes follow from."""
    name = str(config.get("deepspec_algorithm"))
    if name in (EAGLE3, MTP, layout_v4.ALGORITHM, layout_medusa.ALGORITHM):
        return name
    recurrent = layout_recurrent.ARCHITECTURES.get("".join(config.get("architectures") or ()))
    return recurrent or ("dflash" if is_dflash(config) else "dspark")


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` is of an autoregressive drafter."""
    return kind(config) in (EAGLE3, MTP)


def is_v4(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` is of a DeepSeek-V4 style drafter."""
    return kind(config) == layout_v4.ALGORITHM


def shared_names(config: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the copies of the target's embedding and LM head."""
    if is_v4(config):
        return layout_v4.SHARED
    embed, lm_head = layout_recurrent.SHARED.get(kind(config), SHARED_TENSORS)
    return embed, lm_head


def required_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of config.json that some loader reads and that therefore must be there, given the heads."""
    if layout_medusa.is_medusa(config):
        return layout_medusa.REQUIRED
    if is_recurrent(config):
        return layout_recurrent.REQUIRED[kind(config)]
    if is_v4(config):
        return layout_v4.REQUIRED
    keys = COMMON_KEYS + (layout_gemma4.REQUIRED if layout_gemma4.is_gemma4(config) else ())
    if config.get("markov_rank"):
        keys += ("markov_head_type",)
    if config.get("enable_confidence_head"):
        keys += ("confidence_head_with_markov",)
    return keys


def speculative_tokens(config: Mapping[str, Any]) -> int:
    """Draft tokens per round the drafter was trained for: block_size, or one less where slot 0 predicts nothing."""
    return int(config["block_size"]) - (0 if config.get("sample_from_anchor", True) else 1)


def _layer_tensors(config: Mapping[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    if layout_gemma4.is_gemma4(config):
        return layout_gemma4.layer_tensors(config, index)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    prefix = f"layers.{index}."
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.get("attention_bias"):
        tensors |= {f"self_attn.{name}_proj.bias": (size,) for name, size in
                    (("q", queries), ("k", keys), ("v", keys), ("o", hidden))}
    return {prefix + name: shape for name, shape in tensors.items()}


def _head_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config.get("markov_rank") or 0
    tensors: dict[str, tuple[int, ...]] = {}
    if rank:
        tensors |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
        kind = config.get("markov_head_type")
        if kind == "gated":
            tensors |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if kind == "rnn":
            tensors |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                        "markov_head.joint_proj.bias": (3 * rank,)}
    if config.get("enable_confidence_head"):
        width = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        tensors |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return tensors


def trainable_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what training changes, from the keys of config.json."""
    if kind(config) == layout_medusa.ALGORITHM:
        return layout_medusa.medusa_tensors(config)
    if is_recurrent(config):
        return {EAGLE3: layout_recurrent.eagle3_tensors, MTP: layout_recurrent.mtp_tensors}[kind(config)](config)
    if is_v4(config):
        return layout_v4.own_tensors(config)
    hidden = config["hidden_size"]
    taps = len(config["target_layer_ids"])
    width = config.get("target_hidden_size", hidden)
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * width), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        tensors |= _layer_tensors(config, index)
    return tensors | _head_tensors(config)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole export: what training changes, the copies of the target's two matrices, constants."""
    shape = (config["vocab_size"], config["hidden_size"])
    shared = {name: shape for name in shared_names(config)}
    if is_v4(config):
        return shared | layout_v4.released_tensors(config)
    found = shared | layout_gemma4.ones(config) | trainable_tensors(config)
    draft = config.get("draft_vocab_size", config["vocab_size"])
    if draft == config["vocab_size"]:
        return found
    found |= {name: (draft, *found[name][1:]) for name in DRAFT_ROWS if name in found}
    return found | {"d2t": (draft,), "t2d": (config["vocab_size"],)}


def full_attention_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters of the drafter's layers: some layouts keep one dictionary for each kind of layer."""
    parameters = config["rope_parameters"]
    return parameters.get("full_attention", parameters)


def count(tensors: Mapping[str, tuple[int, ...]]) -> int:
    """Number of elements of all ``tensors``."""
    return sum(math.prod(shape) for shape in tensors.values())


def breakdown(config: Mapping[str, Any]) -> dict[str, int]:
    """Parameters by part: fc, layers, norms, head, confidence (trainable) and frozen copies."""
    parts = {"fc": 0, "layers": 0, "norms": 0, "head": 0, "confidence": 0}
    for name, shape in trainable_tensors(config).items():
        part = {"fc": "fc", "main_proj": "fc", "layers": "layers", "model": "layers", "blocks": "layers",
                "markov_head": "head", "confidence_head": "confidence"}.get(name.split(".")[0], "norms")
        parts[part] += math.prod(shape)
    return parts | {"frozen": 2 * config["vocab_size"] * config["hidden_size"]}
