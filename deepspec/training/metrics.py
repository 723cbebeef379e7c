"""From the sums of one optimizer window to its row in metrics.jsonl. Ratios travel as (sum, count) and are divided
once, after the reduction over ranks, so the logged loss is the objective that was trained on."""

import json
import math
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from deepspec import distributed
from deepspec.artifacts import atomic_write_bytes
from deepspec.config.schema import ObjectiveConfig
from deepspec.errors import InputRefused, UserError

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
SHARES = ("wait", "forward", "backward", "optimizer")  # parts of a step whose share of its seconds is logged


class Sums:
    """Running totals of what packs return; one host transfer and one collective per window."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add one pack's detached float64 sums, scalars or [K]."""
        for name, value in sums.items():
            self._totals[name] = self._totals[name] + value if name in self._totals else value.double()

    def reduce(self, extra: Sequence[float] = ()) -> tuple[dict[str, list[float]], list[float]]:
        """Totals over all ranks as lists, and ``extra`` summed along with them. Every rank must have added."""
        names = sorted(self._totals)
        flat = torch.cat([self._totals[name].reshape(-1) for name in names]).tolist()
        reduced = distributed.all_reduce_sum([*flat, *extra])
        values: dict[str, list[float]] = {}
        start = 0
        for name in names:
            size = self._totals[name].numel()
            values[name] = reduced[start:start + size]
            start += size
        return values, reduced[start:]


def _ratio(numerator: float, count: float) -> float:
    return numerator / count if count > 0 else 0.0


def objective_row(sums: Mapping[str, Sequence[float]], objective: ObjectiveConfig) -> dict[str, float]:
    """loss (Eq. 12), its three terms, acceptance_rate@1..K and acceptance_length_proxy of reduced sums."""
    terms = {name: _ratio(sums[f"loss_{name}"][0], sums[f"weight_{name}"][0]) for name in ("ce", "tv", "confidence")}
    weights = {"ce": objective.ce_weight, "tv": objective.tv_weight, "confidence": objective.confidence_weight}
    row = {"loss": sum(weights[name] * value for name, value in terms.items())}
    row |= {f"loss_{name}": value for name, value in terms.items()}
    rates = zip(sums["acceptance_rate"], sums["acceptance_rate_count"], strict=True)
    row |= {f"acceptance_rate@{k}": _ratio(rate, count) for k, (rate, count) in enumerate(rates, start=1)}
    row["acceptance_length_proxy"] = _ratio(
        sums["acceptance_length_proxy"][0], sums["acceptance_length_proxy_count"][0])
    if "draft_vocab_coverage" in sums:
        row["draft_vocab_coverage"] = _ratio(sums["draft_vocab_coverage"][0], sums["draft_vocab_coverage_count"][0])
    return row


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with null for numbers JSON cannot hold (a skipped step has no loss)."""
    return {key: finite(value) if isinstance(value, Mapping) else
            None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def tracked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same row under the names W&B groups by."""
    perf = {"seconds": "perf/step_seconds", "tokens_per_second": "perf/tokens_per_second"}
    values: dict[str, Any] = {}
    for key, value in row.items():
        if key == "peak_memory_bytes":
            values["perf/peak_memory_gib"] = value / 2**30
        elif key.endswith("_share"):
            values[f"perf/{key}"] = value
        elif key != "step":
            values[perf.get(key, f"train/{key}")] = value
    return values


class MetricsFile:
    """Append-only JSON lines, one per logged step; rank 0 writes, the others do nothing."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def truncate(self, step: int) -> None:
        """Keep rows up to ``step`` (0: none), so that a resume appends where its checkpoint was made."""
        if not distributed.is_main() or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line, self.path) <= step]
        atomic_write_bytes(self.path, "".join(f"{line}\n" for line in kept).encode())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and flush it to the operating system: a killed run keeps what it logged.

        Raises UserError where that is not possible.
        """
        if not distributed.is_main():
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as handle:
                handle.write((json.dumps(finite(row), allow_nan=False) + "\n").encode())
        except OSError as error:
            raise UserError(f"Could not write to {self.path}: {error}. The last checkpoint is intact. Make room (or "
                            "check the file system) and run the same command again.") from None


def _step_of(line: str, path: Path) -> float:
    try:
        return float(json.loads(line)["step"])
    except json.JSONDecodeError:
        return math.inf  # the half-written last line of a killed run
    except (KeyError, TypeError) as error:
        raise InputRefused(f"{path} has a row without a step ({error}): {line[:80]!r}. Move the file away.") from None
