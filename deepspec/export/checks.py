"""Checks of an exported folder (numbers 1-5, 11 and 12 of twelve). Each returns its problems, empty when it passes.

Numbers 8 and 9, which run models, are in ``gates.py``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

from deepspec.drafters.types import SharedWeights
from deepspec.drafters.vocabulary import stored_ids
from deepspec.export import layout, layout_gemma4, layout_medusa, layout_recurrent, layout_v4, tensors


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check."""

    number: int
    name: str
    problems: tuple[str, ...]
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether there were no problems."""
        return not self.problems


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """Check 1: every required key is there and typed; layer ids ascend strictly and leave out the last layer."""
    required = layout.required_keys(config)
    problems = [f"config.json lacks {key}" for key in required if key not in config]
    problems += [f"config.json has {key}=null" for key in required
                 if key not in layout.NULLABLE_KEYS and key in config and config[key] is None]
    if problems:
        return problems
    if layout_medusa.is_medusa(config):
        return layout_medusa.check_keys(config)
    if layout.is_recurrent(config):
        return layout_recurrent.check_keys(config, layout.kind(config))
    if layout.is_v4(config):
        return layout_v4.check_keys(config)
    ids, last = list(config["target_layer_ids"]), config["num_target_layers"] - 1
    if not ids or any(not isinstance(i, int) or i < 0 for i in ids) or any(a >= b for a, b in zip(ids, ids[1:])):
        problems.append(f"target_layer_ids={ids} must be strictly increasing ids of at least 0")
    elif ids[-1] >= last:
        problems.append(f"target_layer_ids={ids} reach the last layer {last}, which engines cannot capture")
    nested = config["dflash_config"]
    problems += [f"{key} is {config.get(key)!r} but {value!r} in dflash_config" for key, value in nested.items()
                 if config.get(key) != value]
    problems += [f"dflash_config lacks {key}" for key in ("block_size", "target_layer_ids", "mask_token_id")
                 if key not in nested]
    if "sample_from_anchor" in nested:
        problems.append("sample_from_anchor stands in dflash_config, where vLLM refuses it")
    if not layout.is_dflash(config) and not config["markov_rank"]:
        problems.append("markov_rank=0 in a DSpark layout: vLLM dies with a floating point exception")
    return problems


def check_tensors(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Check 2: exactly the expected names and shapes, no wrapper prefix, one dtype, all values finite."""
    found, expected = tensors.header(folder), layout.expected_tensors(config)
    problems = [f"tensor {name} is missing" for name in sorted(expected.keys() - found.keys())]
    for name in sorted(found.keys() - expected.keys()):
        wrapped = " (wrapper prefix)" if name.startswith(layout.WRAPPER_PREFIXES) else ""
        problems.append(f"tensor {name} is not expected{wrapped}")
    problems += [f"tensor {name} has shape {found[name][1]}, expected {expected[name]}" for name in sorted(expected)
                 if name in found and found[name][1] != expected[name]]
    problems += [f"tensor {name} has dtype {found[name][0]}, expected {dtype}" for name, dtype in layout.MAPPING.items()
                 if name in found and found[name][0] != dtype]
    dtypes = sorted({config["dtype"] if dtype == layout_v4.dtype_of(name, config["dtype"]) else dtype
                     for name, (dtype, _) in found.items() if name not in layout.MAPPING})
    if dtypes != [config["dtype"]] or config["torch_dtype"] != config["dtype"]:
        problems.append(f"dtypes {dtypes} in the file, config.json says {config['dtype']} and {config['torch_dtype']}")
    for name, tensor in tensors.read(folder).items():
        if not bool(torch.isfinite(tensor).all()):
            problems.append(f"tensor {name} has {int((~torch.isfinite(tensor)).sum())} values that are not finite")
    return problems


def check_shared(folder: Path, shared: SharedWeights, dtype: torch.dtype,
                 names: tuple[str, str] = layout.SHARED_TENSORS) -> tuple[list[str], dict[str, str]]:
    """Check 3: embedding and LM head are byte-equal to the target's (in the export's dtype). Also their SHA-256."""
    stored = tensors.read(folder)
    problems, digests = [], {}
    ids = stored_ids(stored, folder)
    for name, wanted in tensors.shared_tensors(shared, dtype, names).items():
        if ids is not None and name in layout.DRAFT_ROWS:
            wanted = wanted[torch.tensor(ids)]
        digests[name] = tensors.digest(wanted)
        if name in stored and tensors.digest(stored[name]) != digests[name]:
            problems.append(f"{name} differs from the target's")
    return problems, digests


def check_mask_token(config: Mapping[str, Any], tokenizer: Optional[Any], embed: Tensor) -> tuple[list[str], float]:
    """Check 4: the mask token is a row of the embedding that no text can turn into. Also the norm of its row.

    An autoregressive drafter has none: nothing to check, norm 0.
    """
    if layout.is_recurrent(config) or layout_medusa.is_medusa(config):
        return [], 0.0
    mask = config["mask_token_id"]
    if not 0 <= mask < config["vocab_size"]:
        return [f"mask_token_id={mask} is not below vocab_size={config['vocab_size']}"], float("nan")
    problems = []
    eos = config["eos_token_id"]
    reserved = {config["bos_token_id"], *(eos if isinstance(eos, list) else [eos])}
    if mask in reserved:
        problems.append(f"mask_token_id={mask} is the target's bos or eos token, which text contains")
    if tokenizer is not None and mask not in reserved:
        text = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else None
        special = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        if text is not None and mask not in special:
            problems.append(f"mask_token_id={mask} is the ordinary token {text!r}, which text can contain")
    return problems, float(embed[mask].float().norm())


def check_auto_config(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Check 5: transformers' AutoConfig reads the file, and the RoPE parameters survive a round trip."""
    if layout_medusa.is_medusa(config):
        return []  # transformers has no such class; engines bring their own
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        return [f"AutoConfig cannot read config.json: {error}"]
    again = json.loads(loaded.to_json_string(use_diff=False))
    problems = [f"{key} is {again.get(key)!r} after a round trip, not {config[key]!r}"
                for key in ("hidden_size", "num_hidden_layers", "block_size", "target_layer_ids", "sample_from_anchor",
                            "max_position_embeddings", "vocab_size") if again.get(key) != config.get(key)]
    if layout.is_v4(config):
        return problems  # its layers are plain: rope_theta is all there is
    parameters = again.get("rope_parameters") or {}
    problems += [f"rope_parameters.{key} is {parameters.get(key)!r} after a round trip, not {value!r}"
                 for key, value in config["rope_parameters"].items() if parameters.get(key) != value]
    if config["rope_theta"] != layout.full_attention_rope(config)["rope_theta"]:
        problems.append(f"rope_theta={config['rope_theta']} contradicts rope_parameters")
    return problems


def check_speculative_tokens(folder: Path, config: Mapping[str, Any], draft_length: int) -> list[str]:
    """Check 11: block_size, sample_from_anchor and the number of tokens engines are told to draft agree."""
    problems = []
    tokens = layout.speculative_tokens(config)
    if tokens != draft_length:
        problems.append(f"block_size={config['block_size']} with sample_from_anchor={config.get('sample_from_anchor')} "
                        f"makes {tokens} draft tokens, the drafter was trained for {draft_length}")
    path = folder / "serving" / "vllm_speculative_config.json"
    if path.is_file():
        told = json.loads(path.read_text(encoding="utf-8"))["num_speculative_tokens"]
        if told != tokens:
            problems.append(f"{path.name} says num_speculative_tokens={told}, the drafter makes {tokens}")
    if layout.is_dflash(config) and config.get("sample_from_anchor"):
        problems.append("sample_from_anchor=true in a DFlash layout: engines ignore or refuse it")
    return problems


def check_architecture(folder: Path, config: Mapping[str, Any], allowed: Sequence[str] = (
        layout.DSPARK_ARCHITECTURE, layout.DFLASH_ARCHITECTURE, layout_gemma4.ARCHITECTURE, layout_v4.ARCHITECTURE,
        layout_medusa.ARCHITECTURE, *layout_recurrent.ARCHITECTURES)) -> list[str]:
    """Check 12: no auto_map and no Python file (nothing to trust), and an architecture string of the format."""
    problems = [f"config.json has {key}" for key in ("auto_map",) if key in config]
    problems += [f"{path.name} would be remote code" for path in sorted(folder.glob("*.py"))]
    if len(config.get("architectures") or []) != 1 or config["architectures"][0] not in allowed:
        problems.append(f"architectures={config.get('architectures')!r}, expected one of {list(allowed)}")
    return problems
