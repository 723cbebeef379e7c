"""A drafter's shape as the ``config.json`` of the published layout, and back. Engines read these keys by name.

A window W is written as other trainers do (speculators, SpecForge, DeepSeek-V4): ``sliding_window`` W,
``use_sliding_window`` true, every entry of ``layer_types`` "sliding_attention"; a block at p sees p - W .. p - 1.
``causal`` false goes with it, since vLLM otherwise makes the blocks of sliding layers causal.
Engines count W from each slot, its own token included: slot k sees k + 1 context tokens fewer than in training.
"""

from typing import Any, Mapping, Optional

from deepspec.config.schema import is_autoregressive
from deepspec.drafters.config_gemma4 import gemma4_keys, is_gemma4, with_plain_names
from deepspec.drafters.config_medusa import ALGORITHM, is_medusa, medusa_config, medusa_shape
from deepspec.drafters.config_recurrent import recurrent_keys, with_absent_keys
from deepspec.drafters.rope import rope_type
from deepspec.drafters.types import GEMMA4, QWEN3, DrafterShape
from deepspec.drafters.v4.config import is_v4_config, v4_from_config, v4_keys
from deepspec.errors import InputRefused

ARCHITECTURE = "Qwen3DSparkModel"
IDS_KEY = "deepspec_draft_ids"  # in checkpoints; exports have d2t instead


def _slot_keys(shape: DrafterShape) -> dict[str, Any]:
    """Keys that engines look for at the top level or inside ``dflash_config``."""
    keys: dict[str, Any] = {
        "block_size": shape.block_size, "target_layer_ids": list(shape.feature_layers),
        "mask_token_id": shape.mask_token_id, "markov_rank": shape.markov_rank,
        "enable_confidence_head": shape.confidence_head,
    }
    if shape.markov_rank:
        keys["markov_head_type"] = shape.head
    if shape.confidence_head:
        keys["confidence_head_with_markov"] = shape.confidence_with_markov
    if shape.sliding_window is not None:
        keys["causal"] = False
    return keys


def _window_keys(shape: DrafterShape) -> dict[str, Any]:
    windowed = shape.sliding_window is not None
    return {
        "sliding_window": shape.sliding_window, "use_sliding_window": windowed,
        # Of the first max_window_layers layers Qwen3's configuration makes full ones when layer_types is missing.
        "max_window_layers": 0 if windowed else shape.num_layers,
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * shape.num_layers,
    }


def _block_keys(shape: DrafterShape, num_anchors: int) -> dict[str, Any]:
    """Keys of a drafter that makes a block in one pass."""
    return {
        **_window_keys(shape), "num_target_layers": shape.num_target_layers,
        "target_hidden_size": shape.target_hidden_size, "target_model_type": shape.target_model_type,
        "num_anchors": num_anchors, "sample_from_anchor": shape.sample_from_anchor,
        **_slot_keys(shape), "dflash_config": _slot_keys(shape), "deepspec_algorithm": shape.algorithm,
    }


def window_of(config: Mapping[str, Any]) -> Optional[int]:
    """Window of a config.json; None where its layers are full or the keys are missing. Raises InputRefused for others.

    ``layer_types`` decides, as in the engines: a checkpoint may name a window that it does not use.
    """
    kinds = set(config.get("layer_types") or ())
    if "sliding_attention" not in kinds:
        return None
    window = config.get("sliding_window")
    if kinds != {"sliding_attention"} or not isinstance(window, int) or window < 1:
        raise InputRefused(
            f"The drafter's config.json has layer_types={sorted(kinds)} and sliding_window={window!r}: this project's "
            "drafters have one window in all layers, or none. Use a drafter with such layers."
        )
    if config.get("causal"):
        raise InputRefused("The drafter's config.json has causal=true: its slots see only those before them, in this "
                           "project's drafters also those behind. Use a drafter whose blocks are not causal.")
    return window


def shape_to_config(
    shape: DrafterShape, *, num_anchors: int, dtype: str = "bfloat16", extra: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """``config.json`` of ``shape``: every key of the published checkpoints and those that only engines read.

    ``num_anchors`` per sample is a training option, but the reference loader asks for it. ``extra`` overrides keys,
    for instance bos_token_id and eos_token_id.
    """
    if shape.algorithm == ALGORITHM:
        return {**medusa_config(shape, dtype), **(extra or {})}
    kind = rope_type(shape.rope_parameters)
    rope = {**shape.rope_parameters, "rope_type": kind, "rope_theta": shape.rope_theta}
    rope.pop("type", None)
    own = recurrent_keys(shape) if shape.autoregressive else _block_keys(shape, num_anchors)
    if shape.v4 is not None:
        own = v4_keys(shape) | {"num_anchors": num_anchors}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": "qwen3", "dtype": dtype, "torch_dtype": dtype,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps, "attention_bias": False, "attention_dropout": 0.0,
        "vocab_size": shape.vocab_size, "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "max_position_embeddings": shape.max_position_embeddings, "rope_theta": shape.rope_theta,
        "rope_scaling": None if kind == "default" else rope, "rope_parameters": rope, **own,
    }
    if shape.v4 is not None:
        del config["rope_parameters"], config["rope_scaling"]  # the target's, with more than one kind of layer
    if shape.final_logit_softcap is not None:
        config["final_logit_softcapping"] = shape.final_logit_softcap
    if shape.logit_scale != 1.0:
        config["logit_scale"] = shape.logit_scale
    if shape.block == GEMMA4:
        config |= gemma4_keys(shape, rope)  # its classes scale embeddings without being told
    elif shape.embed_scale != 1.0:
        config["embed_scale"] = shape.embed_scale
    if shape.draft_ids is not None:
        config |= {"draft_vocab_size": len(shape.draft_ids), IDS_KEY: list(shape.draft_ids)}
    return {**config, **(extra or {})}


def _agreed(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the keys of ``dflash_config`` lifted; both places must say the same."""
    lifted = dict(config)
    for key, value in (config.get("dflash_config") or {}).items():
        if lifted.setdefault(key, value) != value:
            raise InputRefused(
                f"The drafter's config.json contradicts itself: {key} is {lifted[key]!r} at the top level but "
                f"{value!r} in dflash_config. Correct the file: engines read different places."
            )
    return lifted


def _draft_ids(config: Mapping[str, Any], given: Optional[tuple[int, ...]]) -> Optional[tuple[int, ...]]:
    size, ids = config.get("draft_vocab_size"), config.get(IDS_KEY, given)
    if size is None or size == config["vocab_size"]:
        return None
    if ids is None or len(ids) != size:
        raise InputRefused(f"The drafter's config.json has draft_vocab_size={size} of {config['vocab_size']} tokens, "
                           f"but {'no' if ids is None else len(ids)} draft tokens are named by a d2t tensor. Point at "
                           "the folder with all its files.")
    return tuple(ids)


def shape_from_config(config: Mapping[str, Any], draft_ids: Optional[tuple[int, ...]] = None) -> DrafterShape:
    """Shape of a checkpoint or export, also of one made by the reference code; raises InputRefused on a missing key.

    ``draft_ids``: what the file's ``d2t`` stands for, where it reduces the vocabulary and config.json lists no ids.
    """
    if is_v4_config(config):
        return v4_from_config(config)
    if is_medusa(config):
        return medusa_shape(config, DrafterShape)
    keys = with_plain_names(_agreed(config)) if is_gemma4(config) else _agreed(config)
    if is_autoregressive(str(keys.get("deepspec_algorithm"))):
        keys = with_absent_keys(keys)
    rank = int(keys.get("markov_rank") or 0)
    rope = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    theta = rope.get("rope_theta", keys.get("rope_theta", 10000.0))
    try:
        confidence = bool(keys["enable_confidence_head"])
        return DrafterShape(
            algorithm=str(keys.get("deepspec_algorithm") or ("dspark" if rank or confidence else "dflash")),
            hidden_size=keys["hidden_size"], intermediate_size=keys["intermediate_size"],
            num_layers=keys["num_hidden_layers"], num_heads=keys["num_attention_heads"],
            num_kv_heads=keys["num_key_value_heads"], head_dim=keys["head_dim"], vocab_size=keys["vocab_size"],
            rms_norm_eps=float(keys["rms_norm_eps"]), rope_theta=float(theta), rope_parameters=rope,
            max_position_embeddings=keys["max_position_embeddings"], block_size=keys["block_size"],
            sample_from_anchor=bool(keys.get("sample_from_anchor", True)),
            head=str(keys["markov_head_type"]) if rank else "none", markov_rank=rank, confidence_head=confidence,
            confidence_with_markov=confidence and bool(keys["confidence_head_with_markov"]),
            mask_token_id=keys["mask_token_id"], feature_layers=tuple(keys["target_layer_ids"]),
            num_target_layers=keys["num_target_layers"],
            target_hidden_size=keys.get("target_hidden_size", keys["hidden_size"]),
            target_model_type=str(keys.get("target_model_type", keys["model_type"])),
            final_logit_softcap=keys.get("final_logit_softcapping"), embed_scale=float(keys.get("embed_scale", 1.0)),
            logit_scale=float(keys.get("logit_scale", 1.0)),
            sliding_window=window_of(keys), unroll=keys.get("deepspec_unroll"),
            block=GEMMA4 if is_gemma4(config) else QWEN3, keys_are_values=bool(keys.get("attention_k_eq_v", False)),
            draft_ids=_draft_ids(keys, draft_ids),
        )
    except KeyError as missing:
        raise InputRefused(
            f"The drafter's config.json has no key {missing}: it is not a checkpoint in DeepSpec's layout. "
            "Point at a folder that this project or DeepSpec wrote."
        ) from missing
