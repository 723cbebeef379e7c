"""An autoregressive drafter's shape as ``config.json``: vLLM's EAGLE-3 keys (Qwen3-shaped), or those of MiMo's MTP.

``target_layer_ids`` are ours (id i is the output of layer i); ``eagle_aux_hidden_state_layer_ids`` are what engines
read (the input of layer i), one more. ``block_size`` is the number of draft tokens, ``ttt_length`` the number of steps
that training unrolled.
"""

from typing import Any, Mapping

from deepspec.drafters.types import DrafterShape


def recurrent_keys(shape: DrafterShape) -> dict[str, Any]:
    """Keys that this kind of drafter has besides the sizes, which all drafters share."""
    keys: dict[str, Any] = {
        "sliding_window": None, "use_sliding_window": False, "max_window_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers, "num_target_layers": shape.num_target_layers,
        "target_hidden_size": shape.target_hidden_size, "target_model_type": shape.target_model_type,
        "target_layer_ids": list(shape.feature_layers), "block_size": shape.block_size,
        "ttt_length": shape.trained_length, "mask_token_id": shape.mask_token_id,
        "deepspec_algorithm": shape.algorithm,
    }
    if shape.algorithm == "mtp":
        return keys | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "attention_bias": True,
                       "num_nextn_predict_layers": 1, "qk_norm": True}
    return keys | {
        "architectures": ["Eagle3Qwen3ForCausalLM"], "draft_vocab_size": len(shape.draft_ids or ()) or shape.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.feature_layers],
        "num_aux_hidden_states": len(shape.feature_layers), "norm_before_residual": False, "norm_before_fc": False,
        "fc_norm": False, "norm_output": False,
    }


def with_absent_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` of an autoregressive drafter with the keys that only block drafters write."""
    length, steps = config["block_size"], config.get("ttt_length")
    return {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": True,
            "deepspec_unroll": None if steps == length else steps} | dict(config)
