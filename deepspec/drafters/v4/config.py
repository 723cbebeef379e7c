"""A V4-style drafter's shape as ``config.json``: the keys of DeepSeek-V4 with those of its drafter, and back.

Released drafters live inside their target's folder, so sizes stand under the target's names; engines take the stages'
sizes from there. The stage count is no released key: vLLM reads ``n_mtp_layers``, SGLang counts the feature layers.
"""

from typing import Any, Mapping

from deepspec.drafters.types import DrafterShape
from deepspec.drafters.v4.shape import ALGORITHM, V4Shape
from deepspec.errors import InputRefused

ARCHITECTURE = "DeepseekV4ForCausalLM"
STAGES = 3  # of released drafters


def is_v4_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes such a drafter, on its own or inside its target's."""
    return config.get("deepspec_algorithm") == ALGORITHM or "dspark_target_layer_ids" in config


def v4_keys(shape: DrafterShape) -> dict[str, Any]:
    """Keys besides those of every drafter's config.json (the caller has width, vocabulary, RoPE and token ids)."""
    of = shape.v4
    assert of is not None
    depth = shape.num_target_layers
    return {
        "architectures": [ARCHITECTURE], "model_type": "deepseek_v4", "num_hidden_layers": depth,
        "moe_intermediate_size": shape.intermediate_size, "num_key_value_heads": 1, "q_lora_rank": of.q_lora_rank,
        "o_groups": of.o_groups, "o_lora_rank": of.o_lora_rank, "qk_rope_head_dim": of.rope_head_dim,
        "partial_rotary_factor": of.rope_head_dim / shape.head_dim, "hc_mult": of.hc_mult,
        "hc_sinkhorn_iters": of.hc_sinkhorn_iters, "hc_eps": of.hc_eps, "n_routed_experts": of.num_experts,
        "n_shared_experts": 1, "num_experts_per_tok": of.experts_per_token, "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True, "routed_scaling_factor": of.routed_scaling_factor, "swiglu_limit": of.swiglu_limit,
        "sliding_window": shape.sliding_window,
        "compress_ratios": [0] * (depth + shape.num_layers),
        "num_nextn_predict_layers": 1, "n_mtp_layers": shape.num_layers,
        "dspark_block_size": shape.block_size, "dspark_noise_token_id": shape.mask_token_id,
        "dspark_target_layer_ids": list(shape.feature_layers), "dspark_markov_rank": shape.markov_rank,
        "enable_confidence_head": shape.confidence_head, "confidence_head_with_markov": shape.confidence_with_markov,
        "sample_from_anchor": True, "num_target_layers": shape.num_target_layers,
        "target_hidden_size": shape.target_hidden_size, "target_model_type": shape.target_model_type,
        "block_size": shape.block_size, "mask_token_id": shape.mask_token_id, "markov_rank": shape.markov_rank,
        "markov_head_type": shape.head, "target_layer_ids": list(shape.feature_layers),
        "deepspec_algorithm": ALGORITHM,
    }


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the keys that a release leaves to its engines."""
    return {"n_mtp_layers": STAGES, "enable_confidence_head": True, "confidence_head_with_markov": True,
            "swiglu_limit": 10.0, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "hc_mult": 4, "rope_theta": 10000.0,
            "num_target_layers": config.get("num_hidden_layers")} | dict(config)


def v4_from_config(config: Mapping[str, Any]) -> DrafterShape:
    """Shape of an export of this project or of a release. Raises InputRefused on a missing key or another convention.
    """
    values = completed(config)
    if values.get("sample_from_anchor") is False:
        raise InputRefused("The drafter's config.json has sample_from_anchor=false: blocks of this layout always "
                           "predict on the anchor slot here. Use a drafter that was trained so.")
    try:
        width = values["hidden_size"]
        of = V4Shape(
            q_lora_rank=values["q_lora_rank"], o_groups=values["o_groups"], o_lora_rank=values["o_lora_rank"],
            rope_head_dim=values["qk_rope_head_dim"], hc_mult=values["hc_mult"],
            hc_sinkhorn_iters=values["hc_sinkhorn_iters"], hc_eps=float(values["hc_eps"]),
            num_experts=values.get("dspark_n_routed_experts") or values["n_routed_experts"],
            experts_per_token=values.get("dspark_num_experts_per_tok") or values["num_experts_per_tok"],
            routed_scaling_factor=float(values["routed_scaling_factor"]), swiglu_limit=float(values["swiglu_limit"]),
        )
        theta = float(values["rope_theta"])
        return DrafterShape(
            algorithm=ALGORITHM, hidden_size=width, intermediate_size=values["moe_intermediate_size"],
            num_layers=values["n_mtp_layers"], num_heads=values["num_attention_heads"], num_kv_heads=1,
            head_dim=values["head_dim"], vocab_size=values["vocab_size"], rms_norm_eps=float(values["rms_norm_eps"]),
            rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": theta},
            max_position_embeddings=values["max_position_embeddings"], block_size=values["dspark_block_size"],
            sample_from_anchor=True, head="vanilla", markov_rank=values["dspark_markov_rank"],
            confidence_head=bool(values["enable_confidence_head"]),
            confidence_with_markov=bool(values["enable_confidence_head"] and values["confidence_head_with_markov"]),
            mask_token_id=values["dspark_noise_token_id"], feature_layers=tuple(values["dspark_target_layer_ids"]),
            num_target_layers=values["num_target_layers"], target_hidden_size=values.get("target_hidden_size", width),
            target_model_type=str(values.get("target_model_type", values.get("model_type", "deepseek_v4"))),
            final_logit_softcap=values.get("final_logit_softcapping"),
            embed_scale=float(values.get("embed_scale", 1.0)), sliding_window=values["sliding_window"], v4=of,
        )
    except KeyError as missing:
        raise InputRefused(
            f"The drafter's config.json has no key {missing}: it describes no DeepSeek-V4 style drafter. Point at a "
            "folder that this project wrote, or at a release with its own config.json.") from missing
