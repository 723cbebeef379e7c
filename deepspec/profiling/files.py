"""profile/records.jsonl and profile/sps.json: raw cells, and the table engines read. R requests, B tokens of a step."""

import json
import logging
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import torch

from deepspec.artifacts import SCHEMA_VERSION, atomic_write_bytes, atomic_write_json
from deepspec.decoding.cost import ProfileCell
from deepspec.profiling.additive import fit_additive, identifiable
from deepspec.profiling.extras import IN_PROCESS
from deepspec.profiling.measure import Measurement

log = logging.getLogger(__name__)
RECORDS_FILE, SPS_FILE = "records.jsonl", "sps.json"
_FORBIDDEN = "bias_seconds"  # SGLang takes any file with this text for a 2-D table


def hardware() -> str:
    """What the times belong to: the accelerator, or processor model and threads of this rank."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        log.debug("no /proc/cpuinfo; the processor is called %s", model)
    return f"{model}, {torch.get_num_threads()} threads"


def conditions(target: Any) -> dict[str, Any]:
    """Header fields that must agree where the table is used."""
    return {"hardware": hardware(), "engine": f"{IN_PROCESS}, torch {torch.__version__}",
            "target_sha256": target.fingerprint, "dtype": str(target.dtype).removeprefix("torch.")}


def sps_samples(cells: Sequence[ProfileCell]) -> tuple[list[int], list[float]]:
    """Probes of the 1-D table: B and steps per second of whole rounds (draft + verify + host).

    Cells with the same B and different R are averaged (median); cost is clamped to its running maximum, so that noise
    never rewards a larger step. The raw cells stay in records.jsonl.
    """
    groups: dict[int, list[float]] = {}
    for cell in cells:
        groups.setdefault(cell.batch_tokens, []).append(cell.p50_ms)
    tokens = sorted(groups)
    cost = np.maximum.accumulate([float(np.median(groups[size])) for size in tokens])
    return tokens, [float(1e3 / value) for value in cost]


def additive_fit(cells: Sequence[ProfileCell]) -> dict[str, Any]:
    """Bias (ms), worst relative residual and its cell of ``fit_additive``; None, with ``reason``, where the grid
    cannot tell the price of a request from that of a token."""
    reason = identifiable(cells)
    if reason is not None:
        return {"bias_ms": None, "max_rel_residual": None, "worst_cell": None, "reason": reason}
    fit = fit_additive(cells)
    errors = [abs(1e3 * fit.seconds(cell.num_reqs, cell.batch_tokens) / cell.p50_ms - 1.0) for cell in cells]
    worst = cells[int(np.argmax(errors))]
    return {"bias_ms": 1e3 * fit.bias, "max_rel_residual": fit.max_rel_residual,
            "worst_cell": {"num_reqs": worst.num_reqs, "verify_tokens": worst.verify_tokens}, "reason": None}


def write_profile(directory: Path, measured: Measurement, *, header: dict[str, Any], drafter_sha256: str,
                  parallel: int, max_batch_tokens: int, extras: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Write both files and return the table. The table is of the shallowest context; all depths are in the records.

    ``header`` holds the conditions, ``extras`` what ``measure_extras`` gives; neither may override the rest.
    """
    depth = min(cell.kv_len for cell in measured.cells)
    cells = [cell for cell in measured.cells if cell.kv_len == depth]
    tokens, rates = sps_samples(cells)
    table = {
        "schema_version": SCHEMA_VERSION, "sample_batch_tokens": tokens, "sample_steps_per_sec": rates,
        "max_batch_tokens": tokens[-1] if measured.partial else max(max_batch_tokens, tokens[-1]),
        "drafter_sha256": drafter_sha256, "parallel": {"data": parallel, "tensor": 1}, "kv_len": depth,
        "fit": additive_fit(cells), "partial": measured.partial,
        "interpolation": "cost linear between probes and never falling (running maximum; raw cells in records.jsonl), "
                         "constant below the first, with the last slope beyond the last, none beyond max_batch_tokens",
        "unit": "batch tokens of one rank and step, anchors included; a step is a whole round: draft, verify, host",
    } | header | (extras or {})
    text = json.dumps(table)
    assert _FORBIDDEN not in text, f"{SPS_FILE} must not contain {_FORBIDDEN}"
    lines = [json.dumps(asdict(cell)) for cell in measured.cells]
    atomic_write_bytes(directory / RECORDS_FILE, ("\n".join(lines) + "\n").encode())
    atomic_write_json(directory / SPS_FILE, table)
    spread = rates[0] / rates[-1] - 1.0
    if spread < 0.05:
        log.warning("profile: step times differ by only %.1f %% from %d to %d tokens; a scheduler will refuse this",
                    100 * spread, tokens[0], tokens[-1])
    return table
