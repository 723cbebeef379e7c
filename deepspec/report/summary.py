"""The result of a run in a few lines of text, for the terminal."""

from pathlib import Path
from typing import Optional

from deepspec.report.columns import columns
from deepspec.report.inputs import RunFiles, Setting, interval, main_setting, read_run_files, speeds
from deepspec.report.svg import number


def _acceptance(trained: Optional[Setting], untrained: Optional[Setting], files: RunFiles) -> list[str]:
    if trained is None:
        return [f"acceptance length: not measured yet. {files.command('evaluate')}"]
    rows = [["domain", "tokens/round", "95 % CI", *(["untrained"] if untrained else [])]]
    for name, values in (trained.group("domains") or trained.group("benchmarks")).items():
        bounds = interval(values)
        row = [name, number(values.get("acceptance_length")), f"{bounds[0]:.2f}-{bounds[1]:.2f}" if bounds else "-"]
        if untrained:
            kind = "domains" if trained.group("domains") else "benchmarks"
            row.append(number(untrained.group(kind).get(name, {}).get("acceptance_length")))
        rows.append(row)
    return ["acceptance length (bonus token included; 1 is no gain)", *columns(rows).splitlines()]


def _confidence(files: RunFiles) -> list[str]:
    calibration = files.calibration
    if calibration is None:
        return ["confidence: not calibrated"]
    rows = [["position", "ECE before", "after", "noise floor"]]
    for k in sorted({0, calibration.block_size // 2, calibration.block_size - 1}):
        values = (calibration.ece_before[k], calibration.ece_after[k], calibration.ece_noise_floor[k])
        rows.append([str(k + 1), *(number(value, 2) for value in values)])
    return [f"calibration of the confidence ({calibration.num_samples:,} blocks the fit never saw)",
            *columns(rows).splitlines()]


def _speed(files: RunFiles) -> list[str]:
    """Also where a way of decoding was left out, and why."""
    found = speeds(files.evaluation)
    if not found:
        return []
    rows = [["setting", "none", "fixed", "scheduled"]]
    rows += [[one.label, number(one.none), number(one.fixed), number(one.scheduled)] for one in found]
    skipped = files.evaluation.get("skipped")
    notes = [f"  {mode}: left out, {why}" for mode, why in (skipped.items() if isinstance(skipped, dict) else ())]
    return ["tokens per second, measured here", *columns(rows).splitlines(), *notes]


def summary_table(run_dir: Path | str) -> str:
    """Acceptance, calibration and speed of a run, and where its export and report lie; a missing part says so."""
    files = read_run_files(Path(run_dir))
    evaluation = files.evaluation
    lines = [f"run {files.name}"]
    lines += _acceptance(main_setting(evaluation), main_setting(evaluation, untrained=True), files)
    lines += _confidence(files) + _speed(files)
    for name, path in (("export", files.directory / "export"), ("report", files.directory / "report.html")):
        lines.append(f"{name}: {path}" if path.exists() else f"{name}: not there yet. {files.command(name)}")
    return "\n".join(lines + list(files.problems))
