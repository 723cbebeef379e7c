"""Layout of Gemma4-shaped drafters in numbers (``Gemma4DSparkModel``). Needs no torch."""

from typing import Any, Mapping

from deepspec.drafters.config_gemma4 import ARCHITECTURE, LAYER_SCALAR, is_gemma4

__all__ = ["ARCHITECTURE", "is_gemma4", "layer_tensors", "ones"]
Shapes = dict[str, tuple[int, ...]]
REQUIRED = ("hidden_activation", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v",
            "num_kv_shared_layers", "enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp",
            "target_model_type", "target_text_model_type")


def layer_tensors(config: Mapping[str, Any], index: int) -> Shapes:
    """What training changes of layer ``index``."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["global_head_dim"]
    shared = config["attention_k_eq_v"]
    keys = config["num_global_key_value_heads" if shared else "num_key_value_heads"] * head
    queries = config["num_attention_heads"] * head
    tensors: Shapes = {
        **{f"{name}_layernorm.weight": (hidden,) for name in
           ("input", "post_attention", "pre_feedforward", "post_feedforward")},
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if not shared:
        tensors["self_attn.v_proj.weight"] = (keys, hidden)
    return {f"layers.{index}.{name}": shape for name, shape in tensors.items()}


def ones(config: Mapping[str, Any]) -> Shapes:
    """Tensors of the file that are 1 whatever training does; none for drafters of other layouts."""
    if not is_gemma4(config):
        return {}
    return {f"layers.{index}.{LAYER_SCALAR}": (1,) for index in range(config["num_hidden_layers"])}
