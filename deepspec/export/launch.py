"""Where a drafter comes from, and ``launch.md``: the commands that serve it."""

import shlex
from dataclasses import dataclass
from typing import Any, Mapping, Optional

from deepspec.export import engines
from deepspec.targets.spec import TargetSpec


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


def _vllm(config: Mapping[str, Any], spec: TargetSpec, origin: Origin) -> list[str]:
    file = '"$(cat "$DRAFTER/serving/vllm_speculative_config.json")"'
    by_confidence = f"'{engines.adaptive(config, origin.folder)}'"
    lines = ["```bash", engines.vllm_command(origin.target, origin.revision, file, spec), "```", ""]
    if config["enable_confidence_head"]:
        lines += ["With confidence-scheduled verification (needs a GPU with full CUDA graphs; vLLM measures its own "
                  "cost table at start-up and reads no calibration file; not run by us):", "", "```bash",
                  engines.vllm_command(origin.target, origin.revision, by_confidence, spec), "```", ""]
    return lines


def _sglang(config: Mapping[str, Any], origin: Origin, written: list[str]) -> list[str]:
    cost = [name for name in ("sglang_sps_2d.json", "sglang_sps_1d.json") if name in written]
    command = engines.sglang_command(config, origin.target, origin.revision, '"$DRAFTER"', tables=cost,
                                     calibrated="dspark_sts.json" in written)
    return ["```bash", command, "```", ""]


def launch_text(config: Mapping[str, Any], spec: TargetSpec, origin: Origin, written: list[str]) -> str:
    """launch.md: exact commands, and for each engine what stands against them. ``written``: files in serving/."""
    lines = ["# Serving this drafter", "",
             "Set `DRAFTER` to this folder. `serving/vllm_speculative_config.json` names the same path: correct it "
             "there too when the folder moves.", "", "```bash", f"DRAFTER={shlex.quote(origin.folder)}", "```", ""]
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
