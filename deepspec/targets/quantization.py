"""How a target's weights are quantised, in one word that can be compared. Acceptance depends on it: a drafter is best
on the very weights that made its hidden states. Imports no torch."""

import json
from pathlib import Path
from typing import Any, Mapping, Optional


def _compressed_tensors(config: Mapping[str, Any]) -> str:
    """``compressed-tensors-fp8`` or ``-w4a16``: type and bits of the first group's weights and activations."""
    group: Mapping[str, Any] = next(iter((config.get("config_groups") or {}).values()), {})
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if weights.get("type") == "float":
        return f"compressed-tensors-fp{weights.get('num_bits')}"
    return f"compressed-tensors-w{weights.get('num_bits')}a{inputs.get('num_bits') or 16}"


def quantization_name(config: Mapping[str, Any]) -> Optional[str]:
    """Name of ``quantization_config`` in a Hugging Face configuration (its text part's, where it stands there); None
    for weights as they were trained."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    method = str(found.get("quant_method") or "unnamed").lower()
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "bitsandbytes":
        return f"bitsandbytes-{'int4' if found.get('load_in_4bit') else 'int8'}"
    algorithm = found.get("quant_algo")
    if algorithm:
        return f"{method}-{str(algorithm).lower()}"
    bits = found.get("bits")
    return f"{method}-int{bits}" if bits else method


def folder_quantization(folder: Optional[str]) -> Optional[str]:
    """``quantization_name`` of a model's folder; None where there is no such folder on this machine."""
    path = Path(folder or "") / "config.json"
    try:
        return quantization_name(json.loads(path.read_text(encoding="utf-8"))) if folder else None
    except (OSError, ValueError):
        return None


def same_quantization(one: Optional[str], other: Optional[str]) -> bool:
    """Whether two names mean the same weights: engines and people leave out the format or add a kernel's name."""
    if not one or not other:
        return not one and not other
    plain = [name.lower().replace("_", "-").removesuffix("-marlin") for name in (one, other)]
    return plain[0] in plain[1] or plain[1] in plain[0]
