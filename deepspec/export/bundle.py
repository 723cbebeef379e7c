"""The ``serving/`` folder: tables in each engine's own format, and a manifest that says where every number comes from.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Mapping

from deepspec.artifacts import atomic_write_bytes, atomic_write_json, environment
from deepspec.export import engines, layout, tables
from deepspec.export.acceptance import acceptance, mean_survival
from deepspec.export.evidence import Evidence
from deepspec.export.launch import Origin, launch_text
from deepspec.targets.spec import TargetSpec

SERVING = "serving"
MAX_REQUESTS = 256  # vLLM's default number of sequences


def cost_files(folder: Path, evidence: Evidence, config: Mapping[str, Any],
               model: str) -> tuple[list[str], dict[str, str]]:
    """Write every table that the profile supports. Returns their names and, for those left out, the reason."""
    written: list[str] = []
    left_out: dict[str, str] = {}
    if evidence.sps is None:
        reason = evidence.absent.get("profile", "no profile")
        return [], {name: reason for name in ("sglang_sps_1d.json", "sglang_sps_2d.json", "trtllm_cost.json")}
    sps = evidence.sps
    table = tables.sps_1d(sps["sample_batch_tokens"], sps["sample_steps_per_sec"],
                          sps.get("max_batch_tokens") or sps["sample_batch_tokens"][-1])
    provenance = {key: sps[key] for key in ("hardware", "engine", "dtype", "kv_len", "target_sha256", "drafter_sha256")
                  if key in sps}
    # SGLang takes any file with the text "bias_seconds" for a 2-D table, so the fit is never described in this one.
    atomic_write_json(folder / "sglang_sps_1d.json", table | {"_meta": provenance | {"lookup": "floor"}})
    written.append("sglang_sps_1d.json")
    cells = tables.at_one_depth(evidence.cells, sps.get("kv_len") if isinstance(sps.get("kv_len"), int) else None)
    unfit = tables.identifiable(cells) if cells else "no raw cells (profile/records.jsonl)"
    if unfit is not None:
        left_out |= {name: unfit for name in ("sglang_sps_2d.json", "trtllm_cost.json", "vllm_by_load.json")}
        return written, left_out
    fit = tables.fit_additive(cells)
    if fit.max_rel_residual > tables.MAX_RESIDUAL:
        reason = (f"the additive model misses a cell by {fit.max_rel_residual:.0%} (limit {tables.MAX_RESIDUAL:.0%}): "
                  "this hardware's cost is not a sum of requests and tokens")
        left_out |= {name: reason for name in ("sglang_sps_2d.json", "trtllm_cost.json", "vllm_by_load.json")}
        return written, left_out
    meta = {"_meta": provenance | {"max_rel_residual": fit.max_rel_residual}}
    atomic_write_json(folder / "sglang_sps_2d.json", tables.sps_2d(fit) | meta)
    atomic_write_json(folder / "trtllm_cost.json", tables.trtllm_cost(fit, cells))
    written += ["sglang_sps_2d.json", "trtllm_cost.json"]
    survival = mean_survival(evidence.evaluation, layout.speculative_tokens(config))
    if survival is None:
        return written, left_out | {"vllm_by_load.json": "no evaluation with full drafts"}
    ranges = tables.vllm_ranges(fit, survival, MAX_REQUESTS)
    atomic_write_json(folder / "vllm_by_load.json", engines.vllm_speculative_config(config, model) | {
        "num_speculative_tokens_per_batch_size": ranges})
    return written + ["vllm_by_load.json"], left_out


def sts_values(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The temperatures file that SGLang and TensorRT-LLM read."""
    keys = ("num_samples", "ece_before", "ece_after", "ece_noise_floor", "num_bins", "drafter_sha256")
    temperatures = [float(value) for value in calibration["temperatures"]]
    domains = calibration.get("domains") or {}
    # The readers' lists hold numbers only: one with an undefined position is left out rather than refused there.
    extra = {key: calibration[key] for key in keys if calibration.get(key) is not None
             and not (isinstance(calibration[key], list) and None in calibration[key])}
    folded = calibration.get("folded")
    # These temperatures are for the head of this very export: as trained, or with the fold that is named here.
    fold = {} if folded is None else {"confidence_fold": {name: folded[name] for name in ("temperature", "shift")}}
    return {"temperatures": temperatures, "sts_temperatures": temperatures,
            "dataset": ", ".join(sorted(domains))} | extra | fold


def manifest_values(config: Mapping[str, Any], spec: TargetSpec, origin: Origin, evidence: Evidence,
                    left_out: Mapping[str, str]) -> dict[str, Any]:
    """Provenance of the bundle: only what is known is written, ``absent`` names the rest."""
    sps = evidence.sps or {}
    made = environment()
    return {
        "schema_version": 1,
        "target": {"repo": origin.target, "revision": origin.revision, "sha256": origin.target_fingerprint,
                   "dtype": origin.target_dtype, "quantization": origin.target_quantization,
                   "features_quantization": origin.features_quantization, "num_layers": spec.num_layers,
                   "vocab": spec.vocab_size},
        "draft": {"sha256": origin.drafter_sha256, "checkpoint": origin.checkpoint, "git_commit": made["git_revision"],
                  "gamma": layout.speculative_tokens(config), "markov_rank": config.get("markov_rank", 0),
                  "head_type": config.get("markov_head_type", "none"),
                  "confidence": bool(config.get("enable_confidence_head"))},
        "engine": sps.get("engine"), "hardware": sps.get("hardware"), "parallel": sps.get("parallel"),
        "kv": {"context_len": sps.get("kv_len"), "dtype": sps.get("dtype")},
        "unit": {"batch_tokens": "target tokens per step and rank, anchors included"},
        "protocol": sps.get("protocol"), "packages": made["packages"],
        "cells": [asdict(cell) for cell in evidence.cells], "fit": sps.get("fit"),
        "calibration": evidence.calibration and {
            key: evidence.calibration.get(key) for key in ("ece_before", "ece_after", "auc", "num_samples", "domains")},
        "acceptance": evidence.evaluation and evidence.evaluation.get("macro"), "seed": origin.seed,
        "engines": {entry.engine: {"loads": entry.loads, "reasons": list(entry.reasons), "evidence": entry.evidence}
                    for entry in engines.verdicts(config)},
        "absent": dict(evidence.absent), "left_out": dict(left_out),
        "caveats": ["cost tables hold for the hardware and the engine they were measured with: see hardware and engine",
                    "trtllm_cost.json follows the schema of an open pull request"],
    }


def write_bundle(export: Path, config: Mapping[str, Any], spec: TargetSpec, origin: Origin, evidence: Evidence,
                 records: Path) -> list[str]:
    """Write ``export/serving``. ``records``: the profile's raw cells, copied as they are. Returns relative names."""
    folder = export / SERVING
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    if evidence.cells and records.is_file():
        shutil.copyfile(records, folder / "records.jsonl")
        written.append("records.jsonl")
    if evidence.evaluation is not None:
        measured = acceptance(evidence.evaluation, layout.speculative_tokens(config))
        atomic_write_json(folder / "acceptance.json", measured)
        written.append("acceptance.json")
    if evidence.calibration is not None and config.get("enable_confidence_head"):
        atomic_write_json(folder / "dspark_sts.json", sts_values(evidence.calibration))
        written.append("dspark_sts.json")
    atomic_write_json(folder / "vllm_speculative_config.json", engines.vllm_speculative_config(config, "."))
    costs, left_out = cost_files(folder, evidence, config, ".")
    written += ["vllm_speculative_config.json", *costs]
    atomic_write_bytes(folder / "launch.md", launch_text(config, spec, origin, written).encode())
    atomic_write_json(folder / "manifest.json", manifest_values(config, spec, origin, evidence, left_out))
    return [f"{SERVING}/{name}" for name in (*written, "launch.md", "manifest.json")]
