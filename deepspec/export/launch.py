"""Where a drafter comes from, and ``launch.md``: the commands that serve it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

from deepspec.export import engines
from deepspec.targets.spec import TargetSpec

_NO_HUB = "TARGET_FOLDER"  # stands for a local target until the command is written


@dataclass(frozen=True)
class Origin:
    """Where the drafter comes from and where it will stand."""

    target: str  # hub id or folder
    revision: Optional[str]
    target_fingerprint: str
    target_dtype: str
    drafter_sha256: str
    checkpoint: str
    folder: str  # final place of the export
    target_architectures: tuple[str, ...] = ()
    seed: int = 0
    thinking: Optional[bool] = None
    target_quantization: Optional[str] = None  # of the weights in the target's files
    features_quantization: Optional[str] = None  # of the weights whose hidden states the drafter learned from

    @property
    def on_hub(self) -> bool:
        """Whether ``target`` is a hub id, which means the same on every machine."""
        return not Path(self.target).is_absolute()

    @property
    def shown(self) -> str:
        """The target's name for readers elsewhere: the hub id, or the last part of a local folder's path."""
        return self.target if self.on_hub else Path(self.target).name


def _pasted(command: str) -> list[str]:
    """``command`` as a block to paste: a target that is only a folder somewhere becomes ``$TARGET``."""
    command = command.replace(_NO_HUB, '"$TARGET"')
    return ["```bash", command, "```", ""]


def _speculative(values: Mapping[str, Any]) -> str:
    """The JSON as shell text in which ``$DRAFTER`` is the drafter's folder."""
    return "'" + json.dumps({**values, "model": "@"}).replace("@", "'\"$DRAFTER\"'") + "'"


def _vllm(config: Mapping[str, Any], spec: TargetSpec, origin: Origin) -> list[str]:
    told = engines.vllm_speculative_config(config, "")
    overrides = engines.vllm_overrides(config)
    target = origin.target if origin.on_hub else _NO_HUB
    lines = _pasted(engines.vllm_command(target, origin.revision, _speculative(told), spec, overrides))
    if config.get("enable_confidence_head"):
        scheduled = _speculative(told | {"enable_adaptive_verification": True})
        lines += ["With confidence-scheduled verification (needs a GPU with full CUDA graphs; vLLM measures its own "
                  "cost table at start-up and reads no calibration file; not run by us):", "",
                  *_pasted(engines.vllm_command(target, origin.revision, scheduled, spec, overrides))]
    return lines


def _sglang(config: Mapping[str, Any], origin: Origin, written: list[str]) -> list[str]:
    cost: list[str] = [name for name in ("sglang_sps_2d.json", "sglang_sps_1d.json") if name in written]
    target = origin.target if origin.on_hub else _NO_HUB
    command = engines.sglang_command(config, target, origin.revision, '"$DRAFTER"', tables=cost,
                                     calibrated="dspark_sts.json" in written)
    return _pasted(command)


def _variables(origin: Origin) -> list[str]:
    lines = ["DRAFTER=$PWD  # run this in the drafter's folder, or write its path"]
    if not origin.on_hub:
        lines.append(f"TARGET=FOLDER  # of {origin.shown}, whose weights are {origin.target_fingerprint[:16]}")
    return ["```bash", *lines, "```", ""]


def launch_text(config: Mapping[str, Any], spec: TargetSpec, origin: Origin, written: list[str]) -> str:
    """launch.md: exact commands, and for each engine what stands against them. ``written``: files in serving/."""
    lines = ["# Serving this drafter", "",
             "`serving/vllm_speculative_config.json` holds the same settings; its `model` is the drafter's folder.", "",
             *_variables(origin)]
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        entry = engines.verdict(config, engine)
        lines += [f"## {title}", "", f"Evidence: {entry.evidence}.", ""]
        if not entry.loads:
            lines += ["**Cannot serve this drafter**: " + "; ".join(entry.reasons) + ".", ""]
        else:
            lines += _vllm(config, spec, origin) if engine == "vllm" else _sglang(config, origin, written)
    lines += ["## Other engines", ""]
    for entry in engines.verdicts(config):
        if entry.engine not in ("vllm", "sglang"):
            says = "expected to load" if entry.loads else "no: " + "; ".join(entry.reasons)
            lines.append(f"* {entry.engine}: {says} ({entry.evidence})")
    lines += ["", "Cost tables belong to the hardware they were measured on (`serving/manifest.json`). On other "
              "hardware leave them out, or measure again with `launch/profile_throughput.py`."]
    return "\n".join(lines) + "\n"
