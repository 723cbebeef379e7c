"""How far calibration brings the confidence of a run's drafter towards its noise floor, on conversations no fit saw.

    PYTHONPATH=. python benchmarks/calibration.py run=runs/tiny [name=value ...]

Names: run (directory with confidence/records.npz), records (another file of them), refit (share of conversations left
out because the head was refitted on them; default: what calibration.json says), bootstrap, svg (file to draw the
reliability diagrams of the first, second and middle position into).

Prints one JSON line: per form of the confidence the mean ECE over positions and its noise floor, the excess over the
floor before and after temperatures with 95 % intervals over conversations, and the share removed. Enough blocks for it
(10,000 in the report split) take more prompts than a demonstration holds out; no answers are needed:

    python launch/fit_confidence.py run.dir=runs/tiny confidence.prompts=prompts.jsonl confidence.max_blocks=45000
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.calibration import Calibration, ConfidenceRecords, calibrate
from deepspec.config.schema import CalibrationConfig
from deepspec.report.confidence import reliability_chart, report_split
from deepspec.report.svg import standalone

DEFAULTS: dict[str, Any] = {"run": "runs/tiny", "records": "", "refit": -1.0, "bootstrap": 1000, "svg": ""}


def draw(path: Path, records: ConfidenceRecords, result: Calibration) -> None:
    """Reliability diagrams (Fig. 6) as one SVG file."""
    report, last = report_split(records, result), result.block_size - 1
    charts = []
    for k in sorted({0, min(1, last), last // 2}):
        title = (f"through position {k + 1}: ECE {result.ece_before[k]:.3f} before, {result.ece_after[k]:.3f} after, "
                 f"floor {result.ece_noise_floor[k]:.3f}")
        charts.append((title, reliability_chart(report, result, k)))
    path.write_text(standalone(charts, ["before", "after"]), encoding="utf-8")


def main(arguments: list[str]) -> None:
    options = dict(DEFAULTS)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in DEFAULTS:
            sys.exit(f"unknown name {name!r}; there are {', '.join(DEFAULTS)}")
        options[name] = type(DEFAULTS[name])(value)
    run = Path(options["run"])
    records = ConfidenceRecords.load(options["records"] or run / "confidence" / "records.npz")
    refit = options["refit"] if options["refit"] >= 0 else Calibration.load(run / "calibration.json").refit_fraction
    config = CalibrationConfig(bootstrap=options["bootstrap"], compare=["platt", "beta", "isotonic"])
    result = calibrate(records, config, refit_fraction=refit)
    if options["svg"]:
        draw(Path(options["svg"]), records, result)
    forms = {name: {"ece": round(values["ece_mean"], 5), "noise_floor": round(
        float(np.mean([one for one in values["noise_floor"] if one is not None])), 5)}
        for name, values in result.methods.items()}
    print(json.dumps({
        "benchmark": "calibration", "run": run.name, "head": records.origin.confidence_head,
        "sampling_temperature": records.origin.sampling_temperature, "report": result.report_split,
        "fit": result.fit_split, "temperatures": [round(one, 3) for one in result.temperatures], "forms": forms,
        "excess": result.excess, "auc": result.auc, "auc_after": result.methods["sts"]["auc"],
        "verdict": result.verdict, "machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    main(sys.argv[1:])
