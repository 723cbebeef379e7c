"""Whether traffic in service still is what the calibration was fitted on, and what to do if not. K draft positions."""

import math
from typing import Any, Optional

import numpy as np

from deepspec.calibration.calibration import Calibration
from deepspec.calibration.measure import known_or_none, mean, mean_ece_draws, measure, pivotal
from deepspec.calibration.metrics import Floats, ece_noise_floor, sigmoid, survival_probability
from deepspec.calibration.records import ConfidenceRecords

MATERIAL_ECE = 0.01  # excess of ECE over its noise floor below which a schedule hardly changes
MATERIAL_TOKENS = 0.05  # relative loss of accepted tokens per block below which another training is not worth it


def _accepted(records: ConfidenceRecords, draws: int, seed: int) -> tuple[float, Floats]:
    """Accepted tokens per block of full drafts, and the same of samples of whole conversations [draws]."""
    whole = records.select(records.drafted >= records.origin.block_length)
    names, group = np.unique(whole.conversation, return_inverse=True)
    if not len(names):
        return float("nan"), np.zeros(0)
    totals = np.bincount(group, weights=whole.accepted.astype(np.float64), minlength=len(names))
    sizes = np.bincount(group, minlength=len(names))
    weights = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    return float(totals.sum() / sizes.sum()), (weights @ totals) / (weights @ sizes)


def _difference(now: tuple[float, Floats], before: Optional[tuple[float, Floats]],
                reference: Optional[float]) -> dict[str, Any]:
    """Accepted tokens per block now and at training time; the interval covers both sides where both were drawn."""
    point, drawn = now
    old = before[0] if before is not None else reference
    if old is None or not math.isfinite(point) or not math.isfinite(old):
        return {"now": known_or_none(point), "reference": old, "change": None, "change_ci95": None}
    shifted = drawn - (before[1] if before is not None and before[1].size == drawn.size else old)
    low_high = np.percentile(shifted, (2.5, 97.5)).tolist() if drawn.size else None
    return {"now": point, "reference": old, "change": point - old, "change_ci95": low_high}


def drift_report(calibration: Calibration, records: ConfidenceRecords, *,
                 reference: Optional[ConfidenceRecords] = None, draws: int = 200, seed: int = 0) -> dict[str, Any]:
    """Compare records of service with what ``calibration`` measured when it was made.

    Args:
        calibration: the one in service.
        records: of the same drafter, logits of the head as trained (``imports.load_records`` sees to both).
        reference: the report split the calibration was measured on; with it the change of acceptance has an interval
            over both sides, else over the new records alone.

    Returns:
        ``positions`` (per position: ECE now and then, noise floor, AUC, observed survival now and then), ``excess`` of
        the ECE over its noise floor now (with its interval) and then, ``accepted_per_block`` now, then and their
        difference, ``domains`` (blocks), and ``verdict``: ``action`` none | recalibrate | train, with the reason.
        95 % intervals draw conversations with replacement.

    The rule: *recalibrate* when the excess is above ``MATERIAL_ECE`` and its interval above 0; *train* when accepted
    tokens per block fell by more than ``MATERIAL_TOKENS`` of what they were and the interval of the change lies below
    0 (temperatures cannot bring tokens back, so it comes first).
    """
    bins, confidence = calibration.num_bins, calibration.apply(records.logits)
    now = measure(records, confidence, num_bins=bins, draws=draws, seed=seed)
    survival = survival_probability(confidence)
    floor = float(np.mean([ece_noise_floor(survival[known, k], bins, seed=seed + k)
                           for k, known in enumerate(records.known.T) if known.any()]))
    point, drawn = mean_ece_draws(records, confidence, num_bins=bins, draws=draws, seed=seed)
    interval = pivotal(point, drawn)
    raw_point, _ = mean_ece_draws(records, sigmoid(records.logits), num_bins=bins, draws=0, seed=seed)
    before = _accepted(reference, draws, seed + 1) if reference is not None else None
    tokens = _difference(_accepted(records, draws, seed), before, calibration.accepted_per_block)
    observed = [float(records.survived[known, k].mean()) if known.any() else None
                for k, known in enumerate(records.known.T)]
    names, counts = np.unique(records.domain, return_counts=True)
    found: dict[str, Any] = {
        "schema_version": 1, "drafter_sha256": calibration.drafter_sha256, "source": records.origin.source,
        "blocks": len(records), "conversations": len(set(records.conversation.tolist())),
        "domains": {str(name): int(count) for name, count in zip(names, counts)},
        "positions": [
            {"position": k + 1, "ece": now["ece"][k], "ece_ci95": now["ece_ci95"][k] and list(now["ece_ci95"][k]),
             "noise_floor": now["noise_floor"][k], "auc": now["auc"][k], "survival": observed[k],
             "ece_reference": calibration.ece_after[k], "auc_reference": calibration.auc[k],
             "survival_reference": calibration.survival[k] if calibration.survival else None}
            for k in range(calibration.block_size)],
        "ece": known_or_none(point), "ece_raw": known_or_none(raw_point),
        "ece_reference": known_or_none(mean(calibration.ece_after)), "noise_floor": floor,
        "excess": point - floor, "excess_reference": calibration.excess.get("after"),
        "excess_ci95": interval and [interval[0] - floor, interval[1] - floor], "accepted_per_block": tokens,
    }
    return found | {"verdict": _verdict(found)}


def _verdict(found: dict[str, Any]) -> dict[str, str]:
    tokens, excess, bounds = found["accepted_per_block"], found["excess"], found["excess_ci95"]
    change, low_high = tokens["change"], tokens["change_ci95"]
    if change is not None and low_high and low_high[1] < 0 and -change > MATERIAL_TOKENS * tokens["reference"]:
        return {"action": "train", "reason": (
            f"accepted tokens per block fell from {tokens['reference']:.3f} to {tokens['now']:.3f} (95 % interval of "
            f"the change {low_high[0]:+.3f} to {low_high[1]:+.3f}): fine-tune the drafter on this traffic, then "
            "calibrate")}
    if excess > MATERIAL_ECE and (bounds is None or bounds[0] > 0):
        span = f" (95 % interval {bounds[0]:.4f} to {bounds[1]:.4f})" if bounds else ""
        before = found["excess_reference"]
        then = f", after {before:.4f} when they were fitted" if before is not None else ""
        return {"action": "recalibrate", "reason": (
            f"the ECE lies {excess:.4f}{span} above its noise floor of {found['noise_floor']:.4f} under the "
            f"temperatures in service{then}: fit them again on these records")}
    return {"action": "none", "reason": (
        f"ECE {found['ece']:.4f} at a noise floor of {found['noise_floor']:.4f}, and acceptance is not clearly lower "
        "than it was")}


def lines(report: dict[str, Any]) -> list[str]:
    """The report as lines of text."""
    def number(value: Optional[float]) -> str:
        return "     -" if value is None else f"{value:6.4f}"

    text = ["position  ECE then    now   floor  AUC then    now  survival then    now"]
    for one in report["positions"]:
        text.append(f"{one['position']:8d}    {number(one['ece_reference'])} {number(one['ece'])}  "
                    f"{number(one['noise_floor'])}    {number(one['auc_reference'])} {number(one['auc'])}         "
                    f"{number(one['survival_reference'])} {number(one['survival'])}")
    verdict = report["verdict"]
    return text + [f"{report['blocks']} blocks of {report['conversations']} conversations: {verdict['action']}: "
                   f"{verdict['reason']}"]
