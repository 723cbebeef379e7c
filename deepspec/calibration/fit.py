"""From records to calibration.json: fit on one part of the conversations, measure every form on another."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.calibration import Calibration
from deepspec.calibration.domains import domain_report
from deepspec.calibration.fold import fit_fold
from deepspec.calibration.measure import Values, excess, known_or_none, mean, measure, need
from deepspec.calibration.methods import apply_maps, fit_maps
from deepspec.calibration.metrics import Floats, expected_calibration_error, sigmoid, survival_probability
from deepspec.calibration.records import ConfidenceRecords, split_conversations
from deepspec.calibration.temperatures import TemperatureFit, fit_temperatures, temperature_grid
from deepspec.config.schema import CalibrationConfig
from deepspec.errors import InputRefused

ENGINES = {
    "raw": "every engine without further files",
    "sts": "SGLang and TensorRT-LLM, which read one temperature per position",
    "folded": "every engine: export.fold_calibration=true puts it into the head's weights",
    "folded_sts": "SGLang and TensorRT-LLM with an export of export.fold_calibration=true",
    "platt": "none: only our own scheduler", "beta": "none: only our own scheduler",
    "isotonic": "none: only our own scheduler",
}


def cumulative_ece(records: ConfidenceRecords, temperatures: ArrayLike, num_bins: int = 20) -> list[float]:
    """ECE of the cumulative product at each position [K] over the blocks whose outcome there is known; NaN: none."""
    survival = survival_probability(sigmoid(records.logits / np.asarray(temperatures)))
    return [
        expected_calibration_error(survival[known, k], records.survived[known, k], num_bins)
        for k, known in enumerate(records.known.T)
    ]


def _verdict(before: Values, after: Values, floor: Values, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """One sentence: whether calibration was needed and whether it helped, means over positions on the report split."""
    raw, scaled, noise = mean(before), mean(after), mean(floor)
    numbers = f"mean ECE over positions {raw:.4f} before, {scaled:.4f} after, noise floor {noise:.4f}"
    if wanted["needed"] is False:
        low, high = wanted["excess_ci95"]
        return (f"This run does not need calibration: on {wanted['blocks']} blocks the raw confidence is off by "
                f"{wanted['excess']:.4f} [{low:.4f}, {high:.4f}] more than chance shows, less than the "
                f"{wanted['negligible']:g} that counts ({numbers}).")
    if raw <= 1.5 * noise:
        return f"Calibration was hardly needed: the raw confidence is as good as this many blocks can show ({numbers})."
    if found["removed_ci95"] is not None and found["removed_ci95"][0] <= 0 < found["removed_ci95"][1]:
        return ("The temperatures change little: what they remove cannot be told from chance on these conversations "
                f"({numbers}).")
    if scaled >= raw:
        return f"The temperatures did not help on conversations the fit never saw ({numbers}); use more held-out data."
    if scaled <= 2.0 * noise:
        return f"Calibration was needed and brought the confidence close to the noise floor ({numbers})."
    return f"Calibration was needed and helped, but an error above the noise floor remains ({numbers})."


def _describe(records: ConfidenceRecords) -> dict[str, int]:
    return {"conversations": len(set(records.conversation.tolist())), "blocks": len(records)}


class _Fits:
    """Everything fitted on the fit split, and the confidences [n, K] that each form gives to other records."""

    def __init__(self, records: ConfidenceRecords, config: CalibrationConfig) -> None:
        self.config = config
        self.grid = temperature_grid(config.grid_min, config.grid_max, config.grid_points)
        self.scaling = self._temperatures(records, records.logits, warn=True)
        self.fold = fit_fold(records)
        self.on_fold = self._temperatures(records, self.fold.apply(records.logits), warn=False)
        names = dict.fromkeys([config.method, *config.compare])
        self.maps = {name: fit_maps(name, records, config.min_samples) for name in names if name != "sts"}

    def _temperatures(self, records: ConfidenceRecords, logits: ArrayLike, *, warn: bool) -> TemperatureFit:
        return fit_temperatures(logits, records.accepted, records.drafted, grid=self.grid, warn=warn,
                                num_bins=self.config.num_bins, min_samples=self.config.min_samples,
                                noise_guard=self.config.noise_guard)

    def confidences(self, logits: ArrayLike) -> dict[str, Floats]:
        """Confidences of every form for logits of the head as trained."""
        folded = self.fold.apply(logits)
        forms = {"raw": sigmoid(logits), "sts": sigmoid(np.asarray(logits) / np.asarray(self.scaling.temperatures)),
                 "folded": sigmoid(folded), "folded_sts": sigmoid(folded / np.asarray(self.on_fold.temperatures))}
        return forms | {name: apply_maps(maps, logits) for name, maps in self.maps.items()}


def _plain(value: Any) -> Any:
    """Tuples as lists, as a file read back has them inside a dictionary."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _forms(fits: _Fits, report: ConfidenceRecords, config: CalibrationConfig, seed: int) -> dict[str, Any]:
    """``Calibration.methods``."""
    forms: dict[str, Any] = {}
    for name, confidence in fits.confidences(report.logits).items():
        values = measure(report, confidence, num_bins=config.num_bins, draws=config.bootstrap, seed=seed)
        forms[name] = {**values, "ece_mean": known_or_none(mean(values["ece"])), "engines": ENGINES[name]}
        if name in fits.maps:
            forms[name]["parameters"] = fits.maps[name]
    return forms


def _outcome(report: ConfidenceRecords) -> dict[str, Any]:
    """Observed survival per position and accepted tokens per block, which later traffic is compared with."""
    known = [report.survived[report.known[:, k], k] for k in range(report.origin.block_length)]
    whole = report.accepted[report.drafted >= report.origin.block_length]
    return {"survival": tuple(float(one.mean()) if len(one) else None for one in known),
            "accepted_per_block": float(whole.mean()) if len(whole) else None}


def split(records: ConfidenceRecords, config: CalibrationConfig,
          refit_fraction: float) -> tuple[ConfidenceRecords, ConfidenceRecords]:
    """The fit and the report part. Raises InputRefused where one is empty."""
    part = split_conversations(records.conversation, records.domain, refit_fraction=refit_fraction,
                               fit_fraction=config.fit_fraction)
    fit, report = records.select(part == "fit"), records.select(part == "report")
    if not len(fit) or not len(report):
        raise InputRefused(f"calibration needs at least 2 held-out conversations besides the refit's, the records hold "
                           f"{len(set(records.conversation.tolist()))}. Raise data.min_held_out or "
                           "confidence.max_prompts and run launch/fit_confidence.py again.")
    return fit, report


def calibrate(records: ConfidenceRecords, config: CalibrationConfig, *, refit_fraction: float, seed: int = 0,
              fingerprint: str = "") -> Calibration:
    """Fit temperatures on the fit conversations and measure them on the report conversations.

    Args:
        records: blocks made with identity temperatures.
        refit_fraction: share of conversations left out because the confidence head was refitted on them; 0 if none.

    Raises:
        InputRefused: fewer than two conversations are left, so that nothing can be measured on unseen ones.
    """
    fit, report = split(records, config, refit_fraction)
    fits = _Fits(fit, config)
    forms = _forms(fits, report, config, seed)
    raw, sts = forms["raw"], forms["sts"]
    scaling, ones = fits.scaling, (1.0,) * records.origin.block_length
    names, counts = np.unique(report.domain, return_counts=True)
    chosen = fits.confidences(report.logits)
    found = excess(report, chosen["raw"], chosen["sts"], num_bins=config.num_bins, draws=config.bootstrap, seed=seed)
    wanted = need(found, len(report))
    return Calibration(
        drafter_sha256=records.origin.drafter_sha256, block_size=records.origin.block_length,
        temperatures=scaling.temperatures, num_samples=len(report), num_bins=config.num_bins,
        ece_before=raw["ece"], ece_after=sts["ece"], ece_noise_floor=sts["noise_floor"], auc=raw["auc"],
        brier_before=raw["brier"], brier_after=sts["brier"], ece_before_ci95=raw["ece_ci95"],
        ece_after_ci95=sts["ece_ci95"],
        domains={str(name): int(count) for name, count in zip(names, counts)},
        fit_split=_describe(fit), report_split=_describe(report),
        ece_fit_before=tuple(map(known_or_none, cumulative_ece(fit, ones, config.num_bins))),
        ece_fit_after=tuple(map(known_or_none, cumulative_ece(fit, scaling.temperatures, config.num_bins))),
        samples_per_position=scaling.samples, positions_without_data=scaling.positions_without_data,
        positions_right_already=scaling.positions_right_already,
        positions_at_grid_edge=scaling.positions_at_grid_edge, confidence_head=records.origin.confidence_head,
        sampling_temperature=records.origin.sampling_temperature, fingerprint=fingerprint,
        refit_fraction=refit_fraction, fit_fraction=config.fit_fraction, min_samples=config.min_samples,
        method=config.method, methods=_plain(forms), source=records.origin.source,
        fold={"temperature": fits.fold.temperature, "shift": fits.fold.shift,
              "temperatures": list(fits.on_fold.temperatures), "samples": int(fit.reached.sum())},
        excess=_plain(found), need=_plain(wanted),
        per_domain=domain_report(fit, report, scaling.temperatures, grid=fits.grid, num_bins=config.num_bins,
                                 min_samples=config.min_samples, draws=config.bootstrap, seed=seed,
                                 own=config.per_domain, noise_guard=config.noise_guard),
        verdict=_verdict(raw["ece"], sts["ece"], sts["noise_floor"], found, wanted), **_outcome(report),
    )
