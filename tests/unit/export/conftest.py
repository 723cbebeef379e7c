"""Random drafters of every kind on a random target, and what earlier stages would have measured about them."""

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from random_run import SHA, make_config, save_target

from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.export.evidence import Evidence, gather
from deepspec.export.exporter import ExportRequest
from deepspec.export.launch import Origin
from deepspec.targets.load import load_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = make_config(target_folder, tmp_path_factory.mktemp("cache"))
    return load_target(config.target, device="cpu", cache_dir=Path(config.run.data_root))


@pytest.fixture
def make_request(target_folder: Path, target: Any, tmp_path: Path) -> Callable[..., ExportRequest]:
    """Build a request: ``make_request(head="gated", dtype="bfloat16", formats=[..])``."""
    def make(dtype: str = "float32", formats: tuple[str, ...] = ("deepspec",), evidence: Evidence | None = None,
             documents: Any = (), **drafter: Any) -> ExportRequest:
        config = make_config(target_folder, tmp_path / "run", **drafter)
        config.export.dtype, config.export.formats = dtype, list(formats)
        torch.manual_seed(1)
        shape = shape_from(target.spec, config.target, config.drafter)
        shared = SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint)
        model = build_drafter(shape, shared).eval().requires_grad_(False)
        for parameter in model.parameters():  # heads start at zero: every tensor must matter in a comparison
            parameter.data += 0.05 * torch.randn_like(parameter)
        origin = Origin(str(target_folder), None, target.fingerprint, "float32", SHA, "step-1",
                        str(tmp_path / "run" / "export"), ("Qwen3ForCausalLM",))
        found = evidence or gather(tmp_path / "run", SHA, target.fingerprint, shape.draft_length)
        return ExportRequest(config, target, model, origin, found, tmp_path / "run" / "profile" / "records.jsonl",
                             documents)

    return make


@pytest.fixture
def evidence_files(tmp_path: Path) -> Path:
    """A run directory with calibration, profile and evaluation of the random drafter."""
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    cells = [
        {"num_reqs": r, "verify_tokens": v, "kv_len": 64, "n": 32, "p10_ms": t * 0.9, "p50_ms": t, "p90_ms": t * 1.2,
         "draft_ms": 1.0, "verify_ms": t - 1.5, "host_ms": 0.5}
        for r in (1, 2, 4, 8) for v in (1, 2, 4, 5) for t in [5.0 + 0.2 * r + 0.3 * r * v]
    ]
    (run / "profile" / "records.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    tokens = [1, 2, 4, 8, 16, 40]
    (run / "profile" / "sps.json").write_text(json.dumps({
        "schema_version": 1, "sample_batch_tokens": tokens, "max_batch_tokens": 64,
        "sample_steps_per_sec": [1e3 / (5.5 + 0.35 * b) for b in tokens], "hardware": "test", "engine": "deepspec",
        "dtype": "float32", "kv_len": 64, "drafter_sha256": SHA, "fit": {"bias_ms": 5.0, "max_rel_residual": 0.0}}))
    (run / "calibration.json").write_text(json.dumps({
        "schema_version": 1, "drafter_sha256": SHA, "block_size": 4, "temperatures": [1.1, 1.2, 1.0, 0.9],
        "ece_before": [0.05] * 4, "ece_after": [0.01] * 4, "auc": [0.8, 0.7, 0.6, None], "num_samples": 900,
        "domains": {"math": 900}}))
    benchmark = {"domain": "math", "num_prompts": 10, "rounds": 100, "drafted": 400, "accepted": 150,
                 "acceptance_length": 2.5, "acceptance_length_ci95": [2.3, 2.7],
                 "accepted_per_position": [70, 45, 25, 10], "conditional_acceptance": [0.7, 0.64, 0.56, 0.4],
                 "speedup": 1.3}
    (run / "evaluation.json").write_text(json.dumps({
        "drafter": SHA, "block_size": 4, "macro": {"acceptance_length": 2.5},
        "settings": {"t1": {"temperature": 1.0, "thinking": False, "mode": "sampled", "batch_size": 8,
                            "decoding": "fixed", "benchmarks": {"held_out": benchmark},
                            "domains": {"math": benchmark}}}}))
    return run
