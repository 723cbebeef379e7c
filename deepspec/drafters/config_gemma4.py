"""A Gemma4-shaped drafter as ``config.json``: the keys of Hugging Face's ``gemma4_text``, all layers full attention.

Classes that read it multiply embeddings by the root of the width, cap logits as ``final_logit_softcapping`` says, and
take ``global_head_dim`` and, where values are made of the keys, ``num_global_key_value_heads``.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from deepspec.errors import InputRefused

if TYPE_CHECKING:  # plans read this file, and need no torch
    from deepspec.drafters.types import DrafterShape

ARCHITECTURE = "Gemma4DSparkModel"
LAYER_SCALAR = "layer_scalar"  # the buffer that ends a layer: 1 whatever training does
_NO_WINDOW = 512  # its configuration wants a number, which no layer of type full_attention reads
_ABSENT = {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "attention_bias": False}


def is_gemma4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a Gemma4-shaped drafter."""
    return list(config.get("architectures") or ()) == [ARCHITECTURE]


def gemma4_keys(shape: "DrafterShape", rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that differ from those of a Qwen3-shaped drafter. ``rope``: parameters of the full-attention layers."""
    # Both names: transformers takes the older one, where it is null, for an order to forget the other.
    kinds = {"full_attention": dict(rope), "sliding_attention": dict(rope)}
    return {
        "architectures": [ARCHITECTURE], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "global_head_dim": shape.head_dim,
        "num_global_key_value_heads": shape.num_kv_heads, "attention_k_eq_v": shape.keys_are_values,
        "sliding_window": _NO_WINDOW, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, **_ABSENT,
        "target_text_model_type": "gemma4_text", "rope_scaling": kinds, "rope_parameters": kinds,
    }


def without_scalars(tensors: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """``tensors`` without the layers' scalars. Raises InputRefused where one is not 1: our layers have no such factor.
    """
    scalars = [name for name in tensors if name.endswith(f".{LAYER_SCALAR}")]
    for name in scalars:
        if tensors[name].float().tolist() != [1.0]:
            raise InputRefused(f"{where}: {name} is {tensors[name].tolist()}, not [1.0]. This project's layers have no "
                               "such factor: use a drafter whose trainer left it alone.")
    return {name: value for name, value in tensors.items() if name not in scalars}


def with_plain_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with head width and number, RoPE and embedding factor under the names of other drafters.

    Raises InputRefused for layers that this project's drafters do not have, and naming a key that is missing.
    """
    odd = {key: config[key] for key, plain in _ABSENT.items() if config.get(key, plain) != plain}
    if odd:
        raise InputRefused(f"The Gemma4-shaped drafter's config.json has {odd}: this project's drafters have dense "
                           "layers without biases and per-layer inputs. Use such a drafter.")
    try:
        rope = dict(config["rope_parameters"]["full_attention"])
        heads = "num_global_key_value_heads" if config["attention_k_eq_v"] else "num_key_value_heads"
        return dict(config) | {
            "head_dim": config["global_head_dim"], "num_key_value_heads": config[heads], "rope_parameters": rope,
            "rope_theta": rope["rope_theta"], "embed_scale": math.sqrt(config["hidden_size"]),
        }
    except (KeyError, TypeError) as error:
        raise InputRefused(f"The Gemma4-shaped drafter's config.json lacks a key ({error}). Point at a folder that "
                           "this project or DeepSpec wrote.") from None
