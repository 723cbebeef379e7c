"""Stage: confidence records to calibration.json."""

import logging

from deepspec import distributed
from deepspec.calibration import Calibration, ConfidenceRecords, calibrate
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config, draft_length
from deepspec.training.checkpoint import drafter_sha256
from deepspec.training.session import chosen_checkpoint

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Fit temperatures (Sec. 3.2.1) on one part of the held-out conversations, measure on another, write the result.

    Raises InputRefused when the records are missing or belong to another drafter, block length or temperature.
    """
    if not config.drafter.confidence_head:
        log.info("this drafter has no confidence head: nothing to calibrate")
        return
    if distributed.rank() != 0:
        return
    directory = run_dir(config)
    records = ConfidenceRecords.load(
        directory / "confidence" / "records.npz", block_length=draft_length(config.drafter),
        drafter_sha256=drafter_sha256(chosen_checkpoint(config), config.export.weights),
        sampling_temperature=config.confidence.temperature,
    )
    refit_fraction = config.confidence.refit_fraction if config.confidence.refit else 0.0
    result = calibrate(records, config.calibration, refit_fraction=refit_fraction, seed=config.run.seed)
    result.save(directory / "calibration.json")
    for line in table(result):
        log.info("%s", line)


def table(result: Calibration) -> list[str]:
    """Lines of text: per position the temperature, ECE before and after, noise floor and AUC, then the verdict."""
    def number(value: float | None) -> str:
        return "     -" if value is None else f"{value:6.4f}"

    lines = ["position  samples       T  ECE before  after   floor     AUC"]
    for k, temperature in enumerate(result.temperatures):
        lines.append(f"{k + 1:8d} {result.samples_per_position[k]:8d} {temperature:7.3f}      "
                     f"{number(result.ece_before[k])} {number(result.ece_after[k])}  "
                     f"{number(result.ece_noise_floor[k])}  {number(result.auc[k])}")
    if result.positions_without_data:
        missing = ", ".join(map(str, result.positions_without_data))
        lines.append(f"positions {missing}: 0 samples, temperature left at 1")
    conversations = result.report_split["conversations"]
    return lines + [f"{result.num_samples} blocks of {conversations} conversations; {result.verdict}"]
