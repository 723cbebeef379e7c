"""Calibration inside the weights: what ``export.fold_calibration`` changes in the drafter, its tables and its card.

Two consistent states exist and nothing between them: the head as trained with ``temperatures``, or the folded head with
the temperatures that were fitted on top of it. The checkpoint of the run is never changed.
"""

import logging
from dataclasses import replace
from typing import Any, Mapping

import torch

from deepspec.calibration import Fold
from deepspec.errors import InputRefused
from deepspec.export.evidence import Evidence

logger = logging.getLogger(__name__)
KEY = "deepspec_confidence_fold"  # in config.json: {"temperature": T, "shift": s} of what is in the weights


def fold_of(calibration: Mapping[str, Any]) -> Fold:
    """Temperature and shift of a calibration.json. Raises InputRefused for one that has none."""
    fold = calibration.get("fold") or {}
    if not {"temperature", "shift", "temperatures"} <= set(fold):
        raise InputRefused("export.fold_calibration=true, but this calibration.json has no fold: an earlier version "
                           "made it. Make it again with launch/calibrate.py.")
    return Fold(float(fold["temperature"]), float(fold["shift"]))


def fold_head(drafter: Any, fold: Fold) -> None:
    """Put ``w / T`` and ``b / T + s`` into the confidence head of ``drafter``, computed in float64."""
    projection = drafter.confidence_head.proj
    with torch.no_grad():
        projection.weight.copy_(projection.weight.double() / fold.temperature)
        projection.bias.copy_(projection.bias.double() / fold.temperature + fold.shift)


def folded_evidence(evidence: Evidence) -> Evidence:
    """``evidence`` as it holds for the folded head: its temperatures, and ECE before and after them.

    Raises InputRefused where there is no calibration to fold.
    """
    if evidence.calibration is None:
        raise InputRefused(f"export.fold_calibration=true needs a calibration: {evidence.absent.get('calibration')}.")
    values = dict(evidence.calibration)
    fold = fold_of(values)
    folded, scaled = (values["methods"][name] for name in ("folded", "folded_sts"))
    if (folded["ece_mean"] or 0.0) >= (values["methods"]["raw"]["ece_mean"] or 0.0):
        logger.warning("export.fold_calibration=true does not lower the error: mean ECE %.4f as trained, %.4f folded. "
                       "Leave it out unless you know why.", values["methods"]["raw"]["ece_mean"] or 0.0,
                       folded["ece_mean"] or 0.0)
    values |= {
        "temperatures": list(values["fold"]["temperatures"]), "ece_before": folded["ece"], "ece_after": scaled["ece"],
        "ece_noise_floor": scaled["noise_floor"], "brier_before": folded["brier"], "brier_after": scaled["brier"],
        "ece_before_ci95": folded["ece_ci95"], "ece_after_ci95": scaled["ece_ci95"],
        "folded": {"temperature": fold.temperature, "shift": fold.shift, "ece_raw": values["methods"]["raw"]["ece"]},
    }
    values["sts_temperatures"] = values["temperatures"]
    return replace(evidence, calibration=values)


def config_entry(evidence: Evidence) -> dict[str, Any]:
    """What config.json says of a folded head; nothing where nothing was folded."""
    folded = (evidence.calibration or {}).get("folded")
    return {} if folded is None else {KEY: {name: folded[name] for name in ("temperature", "shift")}}
