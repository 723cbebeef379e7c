"""Whether one list of temperatures is right for every domain. K draft positions."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.measure import mean, measure
from deepspec.calibration.metrics import Floats, sigmoid
from deepspec.calibration.records import ConfidenceRecords
from deepspec.calibration.temperatures import fit_temperatures


def domain_report(fit: ConfidenceRecords, report: ConfidenceRecords, temperatures: ArrayLike, *, grid: Floats,
                  num_bins: int, min_samples: int, draws: int, seed: int, own: bool,
                  noise_guard: bool = False) -> dict[str, Any]:
    """Per domain, on its part of the report split: ``ece_before``, ``ece_pooled`` (the temperatures of all domains),
    ``ece_noise_floor``, ``ece_pooled_ci95``, ``blocks``; with ``own`` also temperatures fitted on the domain alone.

    A domain with fewer than ``min_samples`` blocks in the fit split gets no ``temperatures`` of its own, and a position
    that fewer of its blocks reached keeps the pooled one; both are said (``note``, ``positions_without_data``).
    """
    pooled = np.asarray(temperatures, dtype=np.float64)
    result: dict[str, Any] = {}
    for name in sorted(set(report.domain.tolist())):
        part, own_fit = report.select(report.domain == name), fit.select(fit.domain == name)
        options = {"num_bins": num_bins, "draws": draws, "seed": seed}
        raw = measure(part, sigmoid(part.logits), **options)
        scaled = measure(part, sigmoid(part.logits / pooled), **options)
        entry: dict[str, Any] = {
            "blocks": len(part), "fit_blocks": len(own_fit), "ece_before": list(raw["ece"]),
            "ece_pooled": list(scaled["ece"]), "ece_noise_floor": list(scaled["noise_floor"]),
            "ece_pooled_ci95": [value and list(value) for value in scaled["ece_ci95"]],
        }
        result[name] = entry
        if not own:
            continue
        if len(own_fit) < max(1, min_samples):
            entry["note"] = (f"{len(own_fit)} blocks in the fit split, {min_samples} are wanted: no temperatures of "
                             "its own")
            continue
        scaling = fit_temperatures(own_fit.logits, own_fit.accepted, own_fit.drafted, grid=grid, num_bins=num_bins,
                                   min_samples=min_samples, fallback=pooled, noise_guard=noise_guard, warn=False)
        mine = measure(part, sigmoid(part.logits / np.asarray(scaling.temperatures)), **options)
        entry |= {"temperatures": list(scaling.temperatures), "ece_own": list(mine["ece"]),
                  "positions_without_data": list(scaling.positions_without_data),
                  "note": _note(mean(scaled["ece"]), mean(mine["ece"]), mean(scaled["noise_floor"]))}
    return result


def _note(pooled: float, own: float, floor: float) -> str:
    """Whether temperatures of its own are worth having for a domain: they must take away half of what is left."""
    left = pooled - floor
    numbers = f"mean ECE {pooled:.4f} with the pooled temperatures, {own:.4f} with its own, noise floor {floor:.4f}"
    if left <= 0.5 * floor:
        return f"the pooled temperatures are right for it ({numbers})"
    return f"its own temperatures are {'better' if pooled - own >= 0.5 * left else 'hardly better'} ({numbers})"
