"""EAGLE-3 checkpoints of other trainers as this project's keys: vLLM's native layout, speculators and DeepSpec.

Tensor names are the same in all of them. What an engine would compute differently from our drafter is refused.
"""

from typing import Any, Mapping, Optional

from deepspec.errors import InputRefused

ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model", "Eagle3DraftModel", "Eagle3Speculator")
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_USUAL_LENGTH = 7  # of the published drafters; a checkpoint need not say for how many steps it was trained


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an EAGLE-3 drafter, whoever wrote it."""
    return config.get("speculators_model_type") == "eagle3" or (config.get("architectures") or [""])[0] in ARCHITECTURES


def _refuse(reason: str) -> InputRefused:
    return InputRefused(f"This EAGLE-3 drafter's config.json {reason}. Only one Qwen3-shaped layer with every norm "
                        "flag false can be read.")


def eagle3_values(config: Mapping[str, Any], target_layers: Optional[int] = None) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter with the keys of our own. ``target_layers``: depth of the target where the file
    does not say. Raises InputRefused naming what our drafter does not have.
    """
    if config.get("deepspec_algorithm") == "eagle3":
        return dict(config)
    values = {**(config.get("transformer_layer_config") or {}), **config}
    if values.get("model_type", "qwen3") != "qwen3" or values.get("attention_bias"):
        raise _refuse(f"has model_type {values.get('model_type')!r} and attention_bias={values.get('attention_bias')}")
    if values.get("num_hidden_layers", 1) != 1:
        raise _refuse(f"has {values['num_hidden_layers']} layers")
    flags = [flag for flag in NORM_FLAGS if values.get(flag)]
    if flags:
        raise _refuse(f"has {', '.join(flags)}")
    aux = values.get("eagle_aux_hidden_state_layer_ids")
    layers = values.get("target_layer_ids") or [layer - 1 for layer in aux or ()]
    if not layers or min(layers) < 0:
        raise _refuse(f"has target_layer_ids={values.get('target_layer_ids')} and "
                      f"eagle_aux_hidden_state_layer_ids={aux}")
    told = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    length = values.get("ttt_length") or told[0].get("speculative_tokens") or _USUAL_LENGTH
    return {"rms_norm_eps": 1e-6, "num_target_layers": target_layers, "mask_token_id": 0, "block_size": length,
            "ttt_length": length, **values, "model_type": "qwen3", "num_hidden_layers": 1,
            "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            "target_layer_ids": list(layers), "deepspec_algorithm": "eagle3", "layer_types": ["full_attention"]}
