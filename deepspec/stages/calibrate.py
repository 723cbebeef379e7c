"""Stage: confidence records to calibration.json; records of an engine in service also to a drift report."""

import logging
from pathlib import Path
from typing import Any, Optional

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.calibration import Calibration, ConfidenceRecords, calibrate
from deepspec.calibration.drift import drift_report, lines
from deepspec.calibration.fit import split
from deepspec.calibration.head import head_in_use
from deepspec.calibration.imports import load_records
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config, draft_length
from deepspec.errors import InputRefused
from deepspec.training.checkpoint import drafter_sha256
from deepspec.training.session import chosen_checkpoint

log = logging.getLogger(__name__)
CALIBRATION_FILE, DRIFT_FILE = "calibration.json", "drift.json"


def run(config: Config) -> None:
    """Fit temperatures (Sec. 3.2.1) on one part of the held-out conversations, measure on another, write the result.

    With ``calibration.records`` these take the place of the run's own: they are first compared with what the
    calibration in place measured (``drift.json``), then fitted, unless ``calibration.recalibrate=false``.

    Raises InputRefused when the records are missing, would bias the fit, or belong to another drafter, confidence head,
    block length, thinking mode or temperature.
    """
    if not config.drafter.confidence_head:
        log.info("this drafter has no confidence head: nothing to calibrate")
        return
    if distributed.rank() != 0:
        return
    directory = run_dir(config)
    sha256 = drafter_sha256(chosen_checkpoint(config), config.export.weights)
    expected: dict[str, Any] = {
        "block_length": draft_length(config.drafter), "drafter_sha256": sha256,
        "confidence_head": head_in_use(directory, sha256), "thinking": config.target.thinking,
        "sampling_temperature": config.confidence.temperature,
    }
    own = directory / "confidence" / "records.npz"
    if config.calibration.records is None:
        records = ConfidenceRecords.load(own, **expected)
        refit_fraction = config.confidence.refit_fraction if config.confidence.refit else 0.0
    else:
        records, refit_fraction = load_records(Path(config.calibration.records).expanduser(), expected), 0.0
        _drift(config, records, expected, own)  # before the fit replaces what is in place
        if not config.calibration.recalibrate:
            return
    result = calibrate(records, config.calibration, refit_fraction=refit_fraction, seed=config.run.seed)
    result.save(directory / CALIBRATION_FILE)
    for line in table(result):
        log.info("%s", line)


def _drift(config: Config, records: ConfidenceRecords, expected: dict[str, Any], own: Path) -> None:
    """Write drift.json, if there is a calibration to compare with."""
    directory = run_dir(config)
    path = directory / CALIBRATION_FILE
    if not path.is_file():
        log.warning("no drift report: %s is not there yet, so there is nothing to compare these records with", path)
        return
    before = Calibration.load(path, block_size=expected["block_length"], drafter_sha256=expected["drafter_sha256"])
    if before.sampling_temperature != records.origin.sampling_temperature:
        _not_comparable(config, before.sampling_temperature, records.origin.sampling_temperature)
        return
    report = drift_report(before, records, reference=_reference(own, before, config, expected),
                          draws=config.calibration.bootstrap, seed=config.run.seed)
    atomic_write_json(directory / DRIFT_FILE, report)
    for line in lines(report):
        log.info("%s", line)


def _not_comparable(config: Config, then: float, now: float) -> None:
    """Acceptance and confidence of two sampling temperatures differ by themselves: their difference is no drift.

    Raises InputRefused where the comparison is all that was asked for.
    """
    text = (f"{CALIBRATION_FILE} was measured at sampling temperature {then:g}, and these records are of {now:g}: they "
            "cannot be compared.")
    if not config.calibration.recalibrate:
        again = f"run.dir={config.run.dir} confidence.temperature={now:g}"
        raise InputRefused(f"{text} Make a calibration of {now:g} first: python launch/fit_confidence.py {again} and "
                           f"python launch/calibrate.py {again}")
    log.warning("no drift report: %s What is fitted now is for sampling temperature %g", text, now)


def _reference(own: Path, before: Calibration, config: Config, expected: dict[str, Any]) -> Optional[ConfidenceRecords]:
    """The report split of training time, where the run still has its records and the calibration was made of them."""
    if before.source != "deepspec":
        return None
    try:
        records = ConfidenceRecords.load(own, **expected)
        return split(records, config.calibration, before.refit_fraction)[1]
    except InputRefused:
        return None


def table(result: Calibration) -> list[str]:
    """Lines of text: per position the temperature, ECE before and after, noise floor and AUC, then the verdict."""
    def number(value: float | None) -> str:
        return "     -" if value is None else f"{value:6.4f}"

    text = ["position  samples       T  ECE before  after   floor     AUC"]
    for k, temperature in enumerate(result.temperatures):
        text.append(f"{k + 1:8d} {result.samples_per_position[k]:8d} {temperature:7.3f}      "
                    f"{number(result.ece_before[k])} {number(result.ece_after[k])}  "
                    f"{number(result.ece_noise_floor[k])}  {number(result.auc[k])}")
    if result.positions_without_data:
        missing = ", ".join(f"{k} ({result.samples_per_position[k - 1]})" for k in result.positions_without_data)
        text.append(f"positions {missing}: fewer than calibration.min_samples={result.min_samples} samples, "
                    "temperature left at 1")
    if result.positions_right_already:
        kept = ", ".join(map(str, result.positions_right_already))
        text.append(f"positions {kept}: the error is what a right confidence shows on as many blocks, temperature left "
                    "at 1 (calibration.noise_guard)")
    fold = result.fold
    text.append(f"folded into the head: temperature {fold['temperature']:.3f}, shift {fold['shift']:+.3f}; mean ECE "
                + ", ".join(f"{name} {values['ece_mean']:.4f}" for name, values in result.methods.items()
                            if values["ece_mean"] is not None))
    for name, one in result.per_domain.items():
        if "note" in one:
            text.append(f"domain {name}: {one['note']}")
    return text + [_excess(result.excess), f"{result.num_samples} blocks of {result.report_split['conversations']} "
                   f"conversations; {result.verdict}"]


def _excess(values: dict[str, Any]) -> str:
    def span(interval: Optional[list[float]]) -> str:
        return f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""

    share = "within what so many blocks can show"
    if values["reduction"] is not None and (values["before_ci95"] or [values["before"]])[0] > 0:
        share = f"{values['reduction']:.0%} removed"
    return (f"excess over the noise floor, mean over positions: {values['before']:.4f}{span(values['before_ci95'])} "
            f"before, {values['after']:.4f}{span(values['after_ci95'])} after: {share}")
