"""Checkpoints of other trainers' layouts as this project's keys: speculators, SpecForge and z-lab's DFlash.

All of them keep the published tensor names; what differs is where config.json has its keys, how layers are counted, and
whether copies of the target's two matrices are in the file.
"""

from typing import Any, Mapping, Optional

from deepspec.drafters.layouts_eagle3 import eagle3_values, is_eagle3
from deepspec.errors import InputRefused

DEEPSPEC, SPECULATORS, SPECFORGE, ZLAB_DFLASH = "deepspec", "speculators", "specforge", "zlab_dflash"
SHARED_NAMES = ("embed_tokens.weight", "lm_head.weight")
_DFLASH_ARCHITECTURE, _SPECFORGE_ARCHITECTURE = "DFlashDraftModel", "DSparkDraftModel"
# What z-lab, SpecForge and speculators leave to the target's or the class's defaults.
_ABSENT = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False}


def layout_of(config: Mapping[str, Any]) -> str:
    """Name of the layout of a drafter's config.json."""
    architecture = (config.get("architectures") or [""])[0]
    nested = config.get("dflash_config") or {}
    if "speculators_model_type" in config:
        return SPECULATORS
    if architecture == _SPECFORGE_ARCHITECTURE or str(nested.get("projector_type", "")) == "dspark":
        return SPECFORGE
    if architecture == _DFLASH_ARCHITECTURE:
        return ZLAB_DFLASH
    return DEEPSPEC


def _refuse(layout: str, reason: str, way_out: str) -> InputRefused:
    return InputRefused(f"This drafter's config.json ({layout} layout) {reason}. {way_out}")


def _from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        raise _refuse(SPECULATORS, f"is of type {kind!r}", "Only dspark and dflash drafters can be read from it.")
    layer = config.get("transformer_layer_config") or {}
    if layer.get("model_type") != "qwen3":
        raise _refuse(SPECULATORS, f"has layers of model_type {layer.get('model_type')!r}",
                      "Only Qwen3-shaped drafters (per-head norms of queries and keys) can be read from it.")
    ids = list(config.get("aux_hidden_state_layer_ids") or ())
    if not ids or any(not isinstance(layer_id, int) or layer_id < 1 for layer_id in ids):
        raise _refuse(SPECULATORS, f"has aux_hidden_state_layer_ids={ids}",
                      "Ids there count from 1, the output of the first layer; 0 is the embedding, which has no place "
                      "here.")
    return {**layer, **{key: config[key] for key in (
        "block_size", "mask_token_id", "target_hidden_size", "markov_rank", "markov_head_type",
        "confidence_head_with_markov", "dtype", "deepspec_algorithm", "draft_vocab_size") if key in config},
        "architectures": list(config.get("architectures") or ()), "target_layer_ids": [item - 1 for item in ids],
        "enable_confidence_head": bool(config.get("enable_confidence_head", False)),
        # Without the key the package itself takes these values.
        "sample_from_anchor": bool(config.get("sample_from_anchor", kind == "dspark"))}


def _from_nested(config: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Keys of ``dflash_config`` lifted; those of both places must agree."""
    values = dict(config)
    for key, value in (config.get("dflash_config") or {}).items():
        if values.setdefault(key, value) != value:
            raise _refuse(layout, f"contradicts itself: {key} is {values[key]!r} at the top level, {value!r} in "
                          "dflash_config", "Correct the file: engines read different places.")
    values["sample_from_anchor"] = layout == SPECFORGE
    if bool(config.get("sample_from_anchor", values["sample_from_anchor"])) != values["sample_from_anchor"]:
        raise _refuse(layout, f"has sample_from_anchor={config['sample_from_anchor']}", "Drafters of this layout "
                      f"{'always' if layout == SPECFORGE else 'never'} predict on the anchor slot.")
    values["enable_confidence_head"] = bool(values.get("enable_confidence_head", False))
    if layout == ZLAB_DFLASH and (values.get("markov_rank") or values["enable_confidence_head"]):
        raise _refuse(layout, "has a Markov or a confidence head", "DFlash drafters have neither: is it a DSpark "
                      "drafter under the wrong architecture?")
    return values


def deepspec_values(config: Mapping[str, Any], *, target_layers: Optional[int] = None) -> dict[str, Any]:
    """config.json of any of the four layouts as the keys of DeepSpec's.

    ``target_layers``: depth of the target, for layouts that do not say. Raises InputRefused naming what cannot be
    read.
    """
    layout = layout_of(config)
    if not is_eagle3(config) and layout == DEEPSPEC:
        return dict(config)
    try:
        if is_eagle3(config):
            return eagle3_values(config, target_layers)
        values = _from_speculators(config) if layout == SPECULATORS else _from_nested(config, layout)
        for key, default in _ABSENT.items():
            values.setdefault(key, default)
        if "head_dim" not in values:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        if "num_target_layers" not in values and target_layers is not None:
            values["num_target_layers"] = target_layers
    except KeyError as missing:
        raise _refuse(layout, f"has no key {missing}", "Give the folder that the other trainer wrote, unchanged."
                      ) from None
    if values["attention_bias"]:
        raise _refuse(layout, "has attention_bias=true", "This project's drafters have no biases there.")
    values.setdefault("model_type", "qwen3")
    return values
