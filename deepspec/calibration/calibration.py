"""calibration.json: the temperatures, and on conversations the fit never saw what they change. K draft positions."""

import json
import math
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import ArrayLike

from deepspec.artifacts import atomic_write_json
from deepspec.calibration.metrics import (
    Floats, auc, bootstrap_ece, brier, ece_noise_floor, expected_calibration_error, sigmoid, survival_probability,
)
from deepspec.calibration.records import ConfidenceRecords, split_conversations
from deepspec.calibration.temperatures import TemperatureFit, fit_temperatures, temperature_grid
from deepspec.config.schema import CalibrationConfig
from deepspec.errors import InputRefused

SCHEMA_VERSION = 1
Values = tuple[Optional[float], ...]  # one per position; None where undefined
Intervals = tuple[Optional[tuple[float, float]], ...]


@dataclass(frozen=True)
class Calibration:
    """Content of calibration.json; per-position tuples have ``block_size`` entries.

    ``ece_*`` and ``brier_*`` are of the cumulative product ``a_k = prod_{i<=k} sigmoid(logit_i / T_i)`` against "the
    block survived through k" over the blocks of the report split whose draft reached k (before: all T = 1).
    ``ece_noise_floor`` is what exactly right predictions equal to the calibrated ones would show on as many blocks.
    ``auc[k]`` ranks the confidence of position k among blocks that survived to k; None where one outcome is missing.
    """

    drafter_sha256: str
    block_size: int  # draft tokens per block, the number of confidences
    temperatures: tuple[float, ...]
    ece_before: Values
    ece_after: Values
    ece_noise_floor: Values
    auc: Values
    brier_before: Values
    brier_after: Values
    num_samples: int  # blocks of the report split
    num_bins: int
    domains: dict[str, int]  # blocks of the report split per domain
    fit_split: dict[str, int]  # conversations and blocks the temperatures were fitted on
    report_split: dict[str, int]  # conversations and blocks everything here is measured on
    ece_before_ci95: Intervals = ()
    ece_after_ci95: Intervals = ()
    ece_fit_before: Values = ()  # the same on the fit split, to tell over-fitting from a shift
    ece_fit_after: Values = ()
    samples_per_position: tuple[int, ...] = ()  # blocks of the fit split that reached the position
    positions_without_data: tuple[int, ...] = ()  # 1-based; their temperature stayed 1
    positions_at_grid_edge: tuple[int, ...] = ()
    refit_fraction: float = 0.0  # with ``fit_fraction``, what ``split_conversations`` cut the records by
    fit_fraction: float = 0.5
    confidence_head: str = "joint"  # joint | refit
    sampling_temperature: float = 1.0
    verdict: str = ""
    fingerprint: str = ""  # of everything that decided this file
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def identity(cls, block_size: int, drafter_sha256: str = "") -> "Calibration":
        """Temperatures of 1, nothing measured."""
        none = (None,) * block_size
        return cls(drafter_sha256, block_size, (1.0,) * block_size, none, none, none, none, none, none, 0, 20, {},
                   {"conversations": 0, "blocks": 0}, {"conversations": 0, "blocks": 0})

    def apply(self, logits: ArrayLike) -> Floats:
        """Calibrated confidences ``sigmoid(logit_k / T_k)``, float64; [..., k] with k up to ``block_size``."""
        logits = np.asarray(logits, dtype=np.float64)
        if logits.shape[-1] > self.block_size:
            raise ValueError(f"logits have {logits.shape[-1]} positions, this calibration has {self.block_size}")
        return sigmoid(logits / np.asarray(self.temperatures[:logits.shape[-1]]))

    def save(self, path: str | PathLike[str]) -> None:
        """Write calibration.json atomically; ``sts_temperatures`` repeats ``temperatures`` for engines."""
        atomic_write_json(path, asdict(self) | {"sts_temperatures": list(self.temperatures)})

    @classmethod
    def load(cls, path: str | PathLike[str], *, block_size: Optional[int] = None,
             drafter_sha256: Optional[str] = None) -> "Calibration":
        """Read calibration.json. Raises InputRefused if it is missing, unreadable, or not of this drafter."""
        again = "Make it again with launch/calibrate.py."
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            values = {field.name: values[field.name] for field in fields(cls) if field.name in values}
            loaded = cls(**{name: _frozen(value) for name, value in values.items()})
        except FileNotFoundError:
            raise InputRefused(f"no calibration at {path}. {again}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise InputRefused(f"{path} is not a calibration ({error}). {again}") from None
        if len(loaded.temperatures) != loaded.block_size or not all(0 < t < math.inf for t in loaded.temperatures):
            raise InputRefused(f"{path}: temperatures {loaded.temperatures} must be {loaded.block_size} positive "
                               f"numbers. {again}")
        for name, expected in (("block_size", block_size), ("drafter_sha256", drafter_sha256)):
            found = getattr(loaded, name)
            if expected is not None and found != expected:
                raise InputRefused(f"{path}: {name} is {found!r}, this drafter has {expected!r}. {again}")
        return loaded


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _known(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None


def cumulative_ece(records: ConfidenceRecords, temperatures: ArrayLike, num_bins: int = 20) -> list[float]:
    """ECE of the cumulative product at each position [K] over the blocks whose outcome there is known; NaN: none."""
    survival = survival_probability(sigmoid(records.logits / np.asarray(temperatures)))
    return [
        expected_calibration_error(survival[known, k], records.survived[known, k], num_bins)
        for k, known in enumerate(records.known.T)
    ]


def _measure(records: ConfidenceRecords, fit: TemperatureFit, config: CalibrationConfig, seed: int) -> dict[str, Any]:
    """Per-position values of ``Calibration`` on the report split."""
    raw = survival_probability(sigmoid(records.logits))
    scaled = survival_probability(sigmoid(records.logits / np.asarray(fit.temperatures)))
    columns: dict[str, list[Any]] = {}

    def add(name: str, value: float) -> None:
        columns.setdefault(name, []).append(_known(value))

    for k in range(records.origin.block_length):
        known, reached = records.known[:, k], records.reached[:, k]
        label, groups = records.survived[known, k], records.conversation[known]
        for name, survival in (("before", raw[known, k]), ("after", scaled[known, k])):
            add(f"ece_{name}", expected_calibration_error(survival, label, config.num_bins))
            add(f"brier_{name}", brier(survival, label))
            low, high = bootstrap_ece(survival, label, groups, config.num_bins, draws=config.bootstrap, seed=seed + k)
            columns.setdefault(f"ece_{name}_ci95", []).append((low, high) if math.isfinite(low) else None)
        add("ece_noise_floor", ece_noise_floor(scaled[known, k], config.num_bins, seed=seed + k))
        add("auc", auc(records.logits[reached, k], records.survived[reached, k]))
    return {name: tuple(values) for name, values in columns.items()}


def _mean(values: Values) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else float("nan")


def _verdict(before: Values, after: Values, floor: Values) -> str:
    """One sentence: whether calibration was needed and whether it helped, means over positions on the report split."""
    raw, scaled, noise = _mean(before), _mean(after), _mean(floor)
    numbers = f"mean ECE over positions {raw:.4f} before, {scaled:.4f} after, noise floor {noise:.4f}"
    if raw <= 1.5 * noise:
        return f"Calibration was hardly needed: the raw confidence is as good as this many blocks can show ({numbers})."
    if scaled >= raw:
        return f"The temperatures did not help on conversations the fit never saw ({numbers}); use more held-out data."
    if scaled <= 2.0 * noise:
        return f"Calibration was needed and brought the confidence close to the noise floor ({numbers})."
    return f"Calibration was needed and helped, but an error above the noise floor remains ({numbers})."


def _describe(records: ConfidenceRecords) -> dict[str, int]:
    return {"conversations": len(set(records.conversation.tolist())), "blocks": len(records)}


def calibrate(records: ConfidenceRecords, config: CalibrationConfig, *, refit_fraction: float, seed: int = 0,
              fingerprint: str = "") -> Calibration:
    """Fit temperatures on the fit conversations and measure them on the report conversations.

    Args:
        records: blocks made with identity temperatures.
        refit_fraction: share of conversations left out because the confidence head was refitted on them; 0 if none.

    Raises:
        InputRefused: fewer than two conversations are left, so that nothing can be measured on unseen ones.
    """
    part = split_conversations(records.conversation, records.domain, refit_fraction=refit_fraction,
                               fit_fraction=config.fit_fraction)
    fit_records, report = records.select(part == "fit"), records.select(part == "report")
    if not len(fit_records) or not len(report):
        raise InputRefused(f"calibration needs at least 2 held-out conversations besides the refit's, the records hold "
                           f"{len(set(records.conversation.tolist()))}. Raise data.min_held_out or "
                           "confidence.max_prompts and run launch/fit_confidence.py again.")
    grid = temperature_grid(config.grid_min, config.grid_max, config.grid_points)
    fit = fit_temperatures(fit_records.logits, fit_records.accepted, fit_records.drafted, grid=grid,
                           num_bins=config.num_bins)
    measured = _measure(report, fit, config, seed)
    ones = (1.0,) * records.origin.block_length
    names, counts = np.unique(report.domain, return_counts=True)
    return Calibration(
        drafter_sha256=records.origin.drafter_sha256, block_size=records.origin.block_length,
        temperatures=fit.temperatures, num_samples=len(report), num_bins=config.num_bins,
        domains={str(name): int(count) for name, count in zip(names, counts)},
        fit_split=_describe(fit_records), report_split=_describe(report),
        ece_fit_before=tuple(map(_known, cumulative_ece(fit_records, ones, config.num_bins))),
        ece_fit_after=tuple(map(_known, cumulative_ece(fit_records, fit.temperatures, config.num_bins))),
        samples_per_position=fit.samples, positions_without_data=fit.positions_without_data,
        positions_at_grid_edge=fit.positions_at_grid_edge, confidence_head=records.origin.confidence_head,
        sampling_temperature=records.origin.sampling_temperature, fingerprint=fingerprint,
        refit_fraction=refit_fraction, fit_fraction=config.fit_fraction,
        verdict=_verdict(measured["ece_before"], measured["ece_after"], measured["ece_noise_floor"]), **measured,
    )
