"""Layouts of autoregressive drafters in numbers: vLLM's EAGLE-3 (Qwen3-shaped) and MiMo's MTP. Needs no torch."""

from typing import Any, Mapping

Shapes = dict[str, tuple[int, ...]]
EAGLE3, MTP = "eagle3", "mtp"
ARCHITECTURES = {"Eagle3Qwen3ForCausalLM": EAGLE3, "MiMoForCausalLM": MTP}
MTP_PREFIX = "model.mtp_layers.0."
SHARED = {EAGLE3: ("embed_tokens.weight", "lm_head.weight"), MTP: ("model.embed_tokens.weight", "lm_head.weight")}
_KEYS = (
    "architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
    "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "block_size", "num_target_layers", "target_hidden_size", "target_layer_ids", "bos_token_id", "eos_token_id",
    "deepspec_algorithm",
)
REQUIRED = {
    EAGLE3: (*_KEYS, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
             "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    MTP: (*_KEYS, "num_nextn_predict_layers", "qk_norm"),
}
NULLABLE = ("rope_scaling", "bos_token_id", "eos_token_id")


def _block(config: Mapping[str, Any], input_size: int, bias: bool) -> Shapes:
    """Attention, feed-forward and the two norms that every layer has."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: Shapes = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        tensors[f"self_attn.{name}_proj.weight"] = (size, input_size)
        if bias:
            tensors[f"self_attn.{name}_proj.bias"] = (size,)
    return tensors


def eagle3_tensors(config: Mapping[str, Any]) -> Shapes:
    """What training changes of EAGLE-3: the fusing matrix, a layer whose attention reads twice the width, a norm."""
    hidden = config["hidden_size"]
    width = len(config["target_layer_ids"]) * config.get("target_hidden_size", hidden)
    layer = _block(config, 2 * hidden, bias=False) | {"hidden_norm.weight": (hidden,)}
    return {"fc.weight": (hidden, width), "norm.weight": (hidden,)} | {
        f"layers.0.{name}": shape for name, shape in layer.items()}


def mtp_tensors(config: Mapping[str, Any]) -> Shapes:
    """What training changes of MTP: one module."""
    hidden = config["hidden_size"]
    layer = _block(config, hidden, bias=True) | {
        "token_layernorm.weight": (hidden,), "hidden_layernorm.weight": (hidden,), "final_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
    }
    return {MTP_PREFIX + name: shape for name, shape in layer.items()}


def check_keys(config: Mapping[str, Any], kind: str) -> list[str]:
    """What contradicts itself in a config.json whose required keys are there."""
    ids, last = list(config["target_layer_ids"]), config["num_target_layers"] - 1
    if kind == MTP:
        problems = [] if ids == [last] else [f"target_layer_ids={ids} must be [{last}], the target's last hidden state"]
        if config["num_nextn_predict_layers"] != 1 or config["qk_norm"] is not True:
            problems.append("num_nextn_predict_layers must be 1 and qk_norm true: the file has one module with norms")
        return problems
    taps = list(config["eagle_aux_hidden_state_layer_ids"])
    problems = []
    if not ids or any(a >= b for a, b in zip(ids, ids[1:])) or ids[0] < 0 or ids[-1] >= last:
        problems.append(f"target_layer_ids={ids} must be strictly increasing ids from 0 to {last - 1}")
    if taps != [layer + 1 for layer in ids] or config["num_aux_hidden_states"] != len(ids):
        problems.append(f"eagle_aux_hidden_state_layer_ids={taps} must be target_layer_ids={ids} plus one (engines "
                        "count layer inputs), and num_aux_hidden_states their number")
    problems += [f"{flag}={config[flag]!r}, but the drafter was trained with false"
                 for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if config[flag]]
    return problems
