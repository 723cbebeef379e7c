"""The served folder against the run that trained the drafter: every field of config.json, and the tensors."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Mapping, Optional

import torch

from deepspec.doctor.findings import FAULT, NOTE, Finding
from deepspec.drafters.config import shape_from_config
from deepspec.drafters.layouts import deepspec_values, layout_of
from deepspec.drafters.types import DrafterShape
from deepspec.errors import InputRefused
from deepspec.export import layout, tensors
from deepspec.export.load import read_config

# Field of a drafter's shape -> (cause, keys of config.json, what a wrong value does)
_FIELDS = {
    "feature_layers": ("layers", "target_layer_ids", "the drafter reads other layers of the target"),
    "sample_from_anchor": ("slots", "sample_from_anchor", "every draft token is one slot off"),
    "mask_token_id": ("mask_token", "mask_token_id", "empty slots hold another token"),
    "block_size": ("block_size", "block_size", "engines draft another number of tokens by default"),
    "rope_theta": ("rope", "rope_theta", "positions are encoded differently"),
    "rope_parameters": ("rope", "rope_parameters", "positions are encoded differently"),
    "max_position_embeddings": ("length", "max_position_embeddings", "long contexts are cut or refused"),
    "head": ("sequential_head", "markov_head_type", "draft tokens do not see the one before"),
    "markov_rank": ("sequential_head", "markov_rank", "the sequential head is not loaded"),
    "sliding_window": ("window", "sliding_window", "the drafter sees another part of the context"),
    "vocab_size": ("lm_head", "vocab_size", "draft ids mean other tokens"),
    "num_target_layers": ("target", "num_target_layers", "it was made for a target of another depth"),
    "target_hidden_size": ("target", "target_hidden_size", "it was made for a target of another width"),
    "final_logit_softcap": ("lm_head", "final_logit_softcapping", "logits are capped differently"),
    "logit_scale": ("lm_head", "logit_scale", "logits are scaled differently"),
    "embed_scale": ("embedding", "embed_scale", "embeddings are scaled differently"),
    "rms_norm_eps": ("norm", "rms_norm_eps", "norms differ"),
    "confidence_head": ("confidence_head", "enable_confidence_head", "confidences are missing"),
    "confidence_with_markov": ("confidence_head", "confidence_head_with_markov", "confidences are wrong"),
}
_HARMLESS = ("confidence_head",)  # do not change what is drafted
_FIX = "Restore the folder (export again: launch/export_drafter.py) and restart the server."


def _plain(name: str, value: Any) -> Any:
    if name == "rope_parameters":
        value = {key: item for key, item in value.items() if key != "type"}
        return {"rope_type": "default", **value}
    return value


def compare_shapes(found: DrafterShape, wanted: DrafterShape, folder: Path) -> list[Finding]:
    """One finding per field of ``found`` (the served folder's) that is not as trained."""
    findings = []
    for field in fields(DrafterShape):
        if field.name not in _FIELDS:
            continue
        theirs, ours = (_plain(field.name, getattr(shape, field.name)) for shape in (found, wanted))
        if field.name == "rope_parameters":
            theirs, ours = ({**item, "rope_theta": shape.rope_theta} for item, shape in
                            ((theirs, found), (ours, wanted)))
        if theirs != ours:
            cause, key, effect = _FIELDS[field.name]
            findings.append(Finding(
                cause, f"{folder}/config.json gives {key}={_show(theirs)}, the drafter was trained with "
                f"{_show(ours)}: {effect}", f"Write {key}={_show(ours)}. " + _FIX,
                kind=NOTE if cause in _HARMLESS else FAULT))
    return findings


def _show(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def check_config(config: Mapping[str, Any], wanted: DrafterShape, folder: Path) -> list[Finding]:
    """Findings of config.json. ``wanted``: the shape under which an export serves this drafter."""
    kind = layout_of(config)
    try:
        found = shape_from_config(deepspec_values(config, target_layers=wanted.num_target_layers),
                                  wanted.draft_ids)
    except InputRefused as error:
        return [Finding("config", str(error), _FIX)]
    findings = compare_shapes(found, wanted, folder)
    blocks = not wanted.autoregressive  # chains have no slots
    if blocks and "sample_from_anchor" not in config and kind in (layout.FORMATS[0], layout.FORMATS[1]):
        anchor = str(wanted.sample_from_anchor).lower()
        findings.append(Finding("slots", f"{folder}/config.json has no sample_from_anchor, and engines default to "
                                "different values", f"Write sample_from_anchor={anchor} at the top level. {_FIX}",
                                kind=NOTE))
    if "sample_from_anchor" in (config.get("dflash_config") or {}):
        findings.append(Finding("slots", f"{folder}/config.json has sample_from_anchor inside dflash_config, where "
                                "vLLM refuses it", "Move it to the top level. " + _FIX))
    both = sorted({"aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"} & config.keys())
    if kind != "speculators" and both and "target_layer_ids" in config:
        listed = list(config[both[0]])
        if listed != [layer + 1 for layer in wanted.feature_layers]:
            findings.append(Finding("layers", f"{folder}/config.json gives {both[0]}={listed}, which engines prefer; "
                                    f"the trained layers are {[layer + 1 for layer in wanted.feature_layers]} there",
                                    f"Remove {both[0]} or correct it. " + _FIX))
    return findings


def check_weights(folder: Path, weights: Mapping[str, torch.Tensor], *, kind: str) -> list[Finding]:
    """Findings of the tensors: ``weights`` are what an export of the run would hold, in the folder's dtype."""
    stored = tensors.read(folder)
    groups = {"embed_tokens": "embedding", "lm_head": "lm_head", "markov_head": "sequential_head",
              "confidence_head": "confidence_head"}
    wrong: dict[str, list[str]] = {}
    for name in sorted(weights.keys() | stored.keys()):
        cause = groups.get(name.removeprefix("model.").split(".")[0], "weights")
        absent = name not in stored
        if absent and (name.endswith(layout.SHARED_TENSORS) or kind != "deepspec" and cause == "confidence_head"):
            continue  # engines then take them from the target
        if name not in weights:
            wrong.setdefault(cause, []).append(f"{name} does not belong to this drafter")
        elif absent:
            wrong.setdefault(cause, []).append(f"{name} is missing")
        elif stored[name].shape != weights[name].shape:
            wrong.setdefault(cause, []).append(f"{name} has shape {tuple(stored[name].shape)}")
        elif not torch.equal(stored[name].float(), weights[name].to(stored[name].dtype).float()):
            wrong.setdefault(cause, []).append(f"{name} differs")
    return [Finding(cause, f"{folder}: {len(names)} tensors are not the run's ({', '.join(names[:3])})", _FIX,
                    kind=NOTE if cause in _HARMLESS else FAULT) for cause, names in wrong.items()]


def folder_values(folder: Path) -> tuple[dict[str, Any], Optional[str]]:
    """config.json of the served folder and the dtype of its tensors (None without a file)."""
    config = read_config(folder)
    found = {dtype for dtype, _ in tensors.header(folder).values()}
    return config, found.pop() if len(found) == 1 else None
