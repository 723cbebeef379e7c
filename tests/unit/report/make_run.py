"""A run directory as the stages leave it, small and with known numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.calibration import ConfidenceRecords, RecordsOrigin, calibrate, sigmoid
from deepspec.config.schema import CalibrationConfig

DOMAINS = ("math", "code", "chat")
LENGTH = 4


def _numbers(rate: float, speed: float, domain: str) -> dict[str, Any]:
    rounds = 400
    conditional = [rate - 0.02 * k for k in range(LENGTH)]
    survived = np.cumprod(conditional)
    length = 1 + survived.sum()
    return {"domain": domain, "num_prompts": 20, "rounds": rounds, "drafted": rounds * LENGTH,
            "accepted": int(rounds * survived.sum()), "acceptance_length": float(length),
            "acceptance_length_ci95": [float(length - 0.12), float(length + 0.12)],
            "accepted_per_position": [int(rounds * value) for value in survived],
            "conditional_acceptance": conditional, "tokens_per_second": speed,
            "target_only_tokens_per_second": 40.0, "speedup": speed / 40.0}


def setting(decoding: str, base: float, speed: float, batch_size: int = 8, **extra: Any) -> dict[str, Any]:
    rates = {"math": base, "code": base - 0.04, "chat": base - 0.2}
    return {"temperature": 1.0, "thinking": False, "mode": "sampled", "batch_size": batch_size, "decoding": decoding,
            "benchmarks": {f"{name}_set": _numbers(rate, speed, name) for name, rate in rates.items()},
            "domains": {name: _numbers(rate, speed, name) for name, rate in rates.items()},
            "macro": {"acceptance_length": 2.5, "acceptance_length_ci95": [2.4, 2.6], "tokens_per_second": speed},
            **extra}


def records(blocks: int = 3000, seed: int = 0) -> ConfidenceRecords:
    random = np.random.default_rng(seed)
    logits = random.normal(1.6, 2.4, size=(blocks, LENGTH)).astype(np.float32)
    accepted = np.cumprod(random.random((blocks, LENGTH)) < sigmoid(logits / 2), axis=1).sum(axis=1)
    names = np.array([f"c{i % 40}" for i in range(blocks)])
    domains = np.array([DOMAINS[(i % 40) % 3] for i in range(blocks)])
    return ConfidenceRecords(RecordsOrigin(LENGTH, "d" * 64, 1.0, (1.0,) * LENGTH), logits, accepted,
                             np.full(blocks, LENGTH), np.full((blocks, LENGTH), np.nan, np.float32), names, domains)


def _metrics(steps: int) -> str:
    rows = []
    for step in range(1, steps + 1):
        done = 1 - np.exp(-step / 60)
        row = {"step": step, "epoch": 0, "samples": 8 * step, "loss": 3.0 - 1.8 * done, "loss_ce": 8 - 5 * done,
               "loss_tv": 1.8 - done, "loss_confidence": 0.7 - 0.3 * done, "lr": 6e-4, "grad_norm": 0.5,
               "acceptance_length_proxy": 1.1 + 1.4 * done, "skipped_steps": 0, "seconds": 0.5,
               "tokens_per_second": 900.0, "peak_memory_bytes": 1_300_000_000}
        row |= {f"acceptance_rate@{k + 1}": (0.8 - 0.1 * k) * done for k in range(LENGTH)}
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def _profile(directory: Path) -> None:
    directory.mkdir()
    cells = []
    for requests in (1, 2, 4, 8):
        for verified in (1, 2, 4, 5):
            verify = 18 + 1.6 * requests * verified
            cells.append({"num_reqs": requests, "verify_tokens": verified, "kv_len": 512, "n": 32, "draft_ms": 5.0,
                          "p10_ms": verify, "p50_ms": verify + 2, "p90_ms": verify + 6, "verify_ms": verify,
                          "host_ms": 1.0})
    (directory / "records.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    tokens = [1, 2, 4, 8, 16, 32, 40]
    (directory / "sps.json").write_text(json.dumps({
        "schema_version": 1, "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [1e3 / (18 + 1.6 * n) for n in tokens],
        "max_batch_tokens": 40, "hardware": "2 CPU cores", "engine": "deepspec", "dtype": "float32", "kv_len": 512,
        "fit": {"bias_ms": 18.0, "max_rel_residual": 0.02}}))


def simulation() -> dict[str, Any]:
    """simulation.json of one drafter at three loads and one arrival rate."""
    points = []
    for users in (1, 8, 32):
        for policy, gain in (("none", 1.0), ("fixed", 1.3 - 0.02 * users), ("scheduled", 1.4 - 0.01 * users)):
            points.append({
                "drafter": "" if policy == "none" else "tiny", "policy": policy, "concurrency": users,
                "arrival_rate": None, "tokens_per_second": 40 * gain * users ** 0.7,
                "tokens_per_second_per_user": 40 * gain * users ** -0.3, "extrapolated": users > 8,
                "verify_budget": 1.0 if policy == "none" else 5.0 - 0.1 * users})
    points.append(points[-1] | {"concurrency": None, "arrival_rate": 2.0})
    advice = [{"concurrency": 8, "layers": 2, "settings": {"run": "tiny", "mode": "scheduled"},
               "reason": "tiny, scheduled gives most <b>tokens</b>"}]
    drafters = [{"name": "tiny", "algorithm": "dspark", "layers": 2, "draft_length": LENGTH, "acceptance_length": 2.5,
                 "blocks": 3000}]
    return {"schema_version": 1, "points": points, "recommendations": advice, "drafters": drafters,
            "hardware": "2 CPU cores"}


def make_run(directory: Path, name: str = "tiny", base: float = 0.85, steps: int = 120) -> Path:
    """Everything there is."""
    (directory / "confidence").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(_metrics(steps))
    own = records()
    own.save(directory / "confidence" / "records.npz")
    calibrate(own, CalibrationConfig(bootstrap=20), refit_fraction=0.34).save(directory / "calibration.json")
    columns = {"auc": [0.8] * 4, "brier": [0.2] * 4, "ece": [0.08, None, 0.05, 0.04], "ece_scaled": [0.02] * 4}
    (directory / "confidence" / "summary.json").write_text(json.dumps(
        {"chosen": "refit", "rule": "lower Brier score", "joint": columns, "refit": columns}))
    _profile(directory / "profile")
    (directory / "simulation.json").write_text(json.dumps(simulation()))
    settings = {
        "t1_fixed_b1": setting("fixed", base, 55.0, 1), "t1_scheduled_b1": setting("scheduled", base, 58.0, 1),
        "t1_none_b8": setting("none", base, 120.0), "t1_fixed_b8": setting("fixed", base, 90.0),
        "t1_scheduled_b8": setting("scheduled", base, 130.0),
        "t1_fixed_b8_untrained": setting("fixed", 0.3, 30.0, drafter="untrained"),
    }
    settings["t1_fixed_b8_untrained"]["trained_minus_untrained"] = {
        "effect": 1.5, "ratio": 2.1, "interval": [1.3, 1.7], "p_value": 0.001, "prompts": 60}
    greedy = {"math_set": {"prompts": 2, "identical": 1, "near_ties": 1, "mismatches": 0}}
    (directory / "evaluation.json").write_text(json.dumps(
        {"drafter": "d" * 64, "algorithm": "dspark", "block_size": LENGTH, "settings": settings, "greedy_check": greedy,
         "skipped": {}}))
    config = {"run": {"name": name, "seed": 0}, "target": {"name": "micro", "feature_layers": [1, 4]},
              "drafter": {"algorithm": "dspark", "num_layers": 2, "block_size": LENGTH, "head": "vanilla",
                          "confidence_head": True},
              "responses": {"servers": ["http://user:pass@host:8000/v1?key=abc"], "max_tokens": 64},
              "tracking": {"api_key": "very-secret"}, "optimizer": {"lr": 6e-4}}
    done = {"status": "complete", "seconds": 12.5, "fingerprint": "f" * 64}
    stages = {"train": done, "confidence": done}
    stages["evaluate"] = {"status": "running", "fingerprint": "e" * 64}
    (directory / "manifest.json").write_text(json.dumps(
        {"schema_version": 1, "name": name, "seed": 0, "stages": stages, "config": config, "git_revision": "abc123",
         "packages": {"torch": "2.13.0", "numpy": "2.4.6"}}))
    return directory
