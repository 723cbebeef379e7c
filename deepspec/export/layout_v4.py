"""Layout of DeepSeek-V4 style drafters in numbers: ``mtp.*`` as released, unquantised. Needs no torch."""

from typing import Any, Mapping

from deepspec.drafters.v4.names import SHARED, Shapes, in_float32, own_tensors, released_tensors
from deepspec.drafters.v4.shape import ALGORITHM

__all__ = ["ALGORITHM", "REQUIRED", "SHARED", "Shapes", "check_keys", "dtype_of", "own_tensors", "released_tensors"]
ARCHITECTURE = "DeepseekV4ForCausalLM"
REQUIRED = (
    "architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "qk_rope_head_dim", "sliding_window", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "scoring_func", "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps",
    "rope_theta", "vocab_size", "max_position_embeddings", "n_mtp_layers", "dspark_block_size",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank", "sample_from_anchor",
    "enable_confidence_head", "confidence_head_with_markov", "num_target_layers", "target_hidden_size", "block_size",
    "mask_token_id", "markov_rank", "target_layer_ids", "bos_token_id", "eos_token_id", "deepspec_algorithm",
)
_DOUBLED = {"block_size": "dspark_block_size", "mask_token_id": "dspark_noise_token_id",
            "markov_rank": "dspark_markov_rank", "target_layer_ids": "dspark_target_layer_ids"}


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """What contradicts itself in a config.json whose required keys are there."""
    ids, depth = list(config["target_layer_ids"]), config["num_target_layers"]
    last = depth - (1 if str(config["target_model_type"]).startswith("deepseek_v4") else 2)
    problems = []
    if not ids or any(a >= b for a, b in zip(ids, ids[1:])) or ids[0] < 0 or ids[-1] > last:
        problems.append(f"target_layer_ids={ids} must be strictly increasing ids from 0 to {last}")
    problems += [f"{name} is {config[name]!r} but {other} is {config[other]!r}" for name, other in _DOUBLED.items()
                 if config[name] != config[other]]
    if config["sample_from_anchor"] is not True:
        problems.append("sample_from_anchor must be true: blocks of this layout predict on the anchor slot")
    if config["num_key_value_heads"] != 1:
        problems.append(f"num_key_value_heads={config['num_key_value_heads']} must be 1")
    return problems


def dtype_of(name: str, dtype: str) -> str:
    """What tensor ``name`` of a file of ``dtype`` is stored as."""
    return "float32" if name.startswith("mtp.") and in_float32(name) else dtype
