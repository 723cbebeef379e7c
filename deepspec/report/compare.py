"""Several runs side by side."""

from pathlib import Path
from typing import Optional, Sequence

from deepspec.errors import InputRefused
from deepspec.report.inputs import RunFiles, interval, main_setting, read_run_files, speeds
from deepspec.report.page import Section, figure, figures, table
from deepspec.report.pairs import pair_table, pairs
from deepspec.report.running import curve
from deepspec.report.svg import Row, Series, line_chart, row_chart


def find_runs(names: Sequence[str], runs_root: Path) -> list[RunFiles]:
    """Runs by directory, or by name beside this one. Raises InputRefused naming those that are not there."""
    found = []
    for name in names:
        directory = next((path for path in (Path(name), runs_root / name) if path.is_dir()), None)
        files = read_run_files(directory) if directory is not None else None
        if files is None or files.empty:
            known = sorted(path.name for path in runs_root.glob("*") if path.is_dir()) if runs_root.is_dir() else []
            raise InputRefused(f"runs: {name!r} is not the directory or name of a run with results (looked in "
                               f"{runs_root}, which has: {', '.join(known) or 'nothing'}). Correct the name.")
        found.append(files)
    return found


def pooled_length(files: RunFiles) -> Optional[float]:
    """Acceptance length of the whole run: the evaluation's macro mean, else the mean over benchmarks."""
    setting = main_setting(files.evaluation)
    if setting is None:
        return None
    if setting.macro.get("acceptance_length") is not None:
        return float(setting.macro["acceptance_length"])
    values = [one["acceptance_length"] for one in setting.group("benchmarks").values() if one.get("acceptance_length")]
    return sum(values) / len(values) if values else None


def _mean(values: Sequence[Optional[float]]) -> Optional[float]:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _table(runs: Sequence[RunFiles]) -> str:
    rows = []
    for files in runs:
        calibration = files.calibration
        rates = [value for one in speeds(files.evaluation) for value in (one.fixed, one.scheduled) if value]
        rows.append([
            files.name, str(files.option("drafter", "algorithm") or files.evaluation.get("algorithm") or "unknown"),
            files.option("drafter", "num_layers"),
            files.option("drafter", "block_size") or files.evaluation.get("block_size"),
            str(files.option("drafter", "head") or "unknown"), pooled_length(files),
            _mean(calibration.ece_before) if calibration else None,
            _mean(calibration.ece_after) if calibration else None,
            max(rates) if rates else None,
        ])
    header = ["run", "algorithm", "layers", "block", "head", "tokens / round", "ECE before", "after", "best tokens / s"]
    return table(header, rows, "Tokens per round: mean over benchmarks, bonus token included.")


def comparison(runs: Sequence[RunFiles]) -> Section:
    """Table of all runs and their acceptance drawn over each other."""
    lead = ("The runs side by side. Compare acceptance only between runs that were evaluated on the same prompts with "
            "the same temperature, and take a difference seriously only where the 95 % intervals hardly overlap, or "
            "where the paired interval of the difference leaves out zero.")
    names = [files.name for files in runs]
    main = [main_setting(files.evaluation) for files in runs]
    groups = list(dict.fromkeys(name for setting in main if setting for name in setting.group("domains")))
    rows = []
    for group in groups:
        values = [setting.group("domains").get(group, {}) if setting else {} for setting in main]
        rows.append(Row(group, [one.get("acceptance_length") for one in values], [interval(one) for one in values]))
    positions = []
    for files, setting in zip(runs, main):
        domains = setting.group("domains") if setting else {}
        curves = [one.get("conditional_acceptance") or [] for one in domains.values()]
        length = max(map(len, curves), default=0)
        mean = [_mean([one[k] for one in curves if k < len(one)]) for k in range(length)]
        positions.append(Series(files.name, range(1, length + 1), mean))
    steps = [curve(files.metrics, "acceptance_length_proxy", files.name) for files in runs]
    charts = figures(
        figure(row_chart(rows, names, x_label="tokens per round", bars=False, start=1.0,
                         description="Acceptance length per domain, all runs"), "Acceptance length per domain."),
        figure(line_chart(positions, x_label="draft position", y_label="accepted", y_limits=(0.0, 1.0),
                          description="Conditional acceptance by position, all runs"),
               "Conditional acceptance by position, mean over domains."),
        figure(line_chart(steps, x_label="step", y_label="tokens per round",
                          description="Expected acceptance length by step, all runs"),
               "Expected acceptance length while training (teacher forced)."),
    )
    return Section("comparison", "Comparison of runs", lead, _table(runs) + pair_table(pairs(runs)) + charts)
