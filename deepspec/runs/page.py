"""The page of a sweep: the objective against every option that was swept, and the jobs side by side."""

from typing import Any, Optional, Sequence

from deepspec.report.compare import comparison
from deepspec.report.inputs import RunFiles
from deepspec.report.page import Section, figure, figures, page, table
from deepspec.report.repeats import Comparison, Group, grouped
from deepspec.report.svg import Row, Series, line_chart, row_chart
from deepspec.report.sweep_sections import sweep_sections
from deepspec.runs.status import JobStatus

_LABELS = {"acceptance_length": "tokens per round", "speedup": "speed-up", "validation": "tokens per round (analytic)"}


def sweep_page(name: str, objective: str, jobs: Sequence[JobStatus], runs: Sequence[RunFiles],
               found: Sequence[Comparison] = ()) -> str:
    """HTML of a sweep called ``name``; ``jobs`` the best first, ``runs`` the files of those that are complete,
    ``found`` their numbers."""
    own = sweep_sections(sweep_groups(jobs, runs), found, _most_trusted(jobs, runs))
    sections = [_jobs(objective, jobs), *own, *([comparison(runs)] if len(runs) > 1 else [])]
    return page(f"Sweep {name}", f"{len(jobs)} jobs compared by {objective.replace('_', ' ')}.", "", sections,
                "Acceptance lengths include the bonus token. This page needs no network.")


def sweep_groups(jobs: Sequence[JobStatus], runs: Sequence[RunFiles]) -> list[Group]:
    """Runs by their swept options without the seed of training."""
    options = {job.name: dict(text.lstrip("+").partition("=")[::2] for text in job.swept) for job in jobs}
    return grouped([(options[files.directory.name], files) for files in runs if files.directory.name in options])


def _most_trusted(jobs: Sequence[JobStatus], runs: Sequence[RunFiles]) -> Optional[RunFiles]:
    """The best job that has a calibrated confidence."""
    by_name = {files.directory.name: files for files in runs if files.calibration is not None}
    return next((by_name[job.name] for job in jobs if job.name in by_name), None)


def _jobs(objective: str, jobs: Sequence[JobStatus]) -> Section:
    rows = [[job.name, job.status, job.objective,
             "{:.3f} to {:.3f}".format(*job.objective_ci95) if job.objective_ci95 else None, job.seconds]
            for job in jobs]
    label = _LABELS.get(objective, objective)
    charts = [_chart(key, jobs, label) for key in _keys(jobs)]
    body = table(["job", "status", label, "95 % interval", "seconds"], rows) + figures(*charts)
    return Section("jobs", "Jobs", "Every job and its result, the best first. Intervals are over the prompts of one "
                   "training, not over repeated trainings: sweep trainer.seed=0,1,2, too, before believing a small "
                   "difference.", body)


def _keys(jobs: Sequence[JobStatus]) -> list[str]:
    pairs = {tuple(text.lstrip("+").partition("=")[::2]) for job in jobs for text in job.swept}
    return sorted({key for key, _ in pairs if len({value for name, value in pairs if name == key}) > 1})


def _rest(job: JobStatus, key: str) -> tuple[str, ...]:
    return tuple(text for text in job.swept if text.lstrip("+").partition("=")[0] != key)


def _value(job: JobStatus, key: str) -> Any:
    text = next((text.partition("=")[2] for text in job.swept if text.lstrip("+").partition("=")[0] == key), "")
    try:
        return float(text)
    except ValueError:
        return text


def _chart(key: str, jobs: Sequence[JobStatus], label: str) -> str:
    """The objective by the values of ``key``, one line for each setting of the other swept options."""
    lines: dict[tuple[str, ...], list[JobStatus]] = {}
    for job in jobs:
        if job.objective is not None:
            lines.setdefault(_rest(job, key), []).append(job)
    if not lines:
        return ""
    names = [", ".join(rest) or label for rest in lines]
    description = f"{label} by {key}"
    values = list(dict.fromkeys(_value(job, key) for group in lines.values() for job in group))
    if all(isinstance(value, float) for value in values):
        series = []
        for name, group in zip(names, lines.values()):
            group = sorted(group, key=lambda job: _value(job, key))
            bounds = [_bounds(job) or (None, None) for job in group]
            series.append(Series(name, [_value(job, key) for job in group], [job.objective for job in group],
                                 [low for low, _ in bounds], [high for _, high in bounds]))
        chart = line_chart(series, x_label=key, y_label=label, description=description)
        return figure(chart, f"{key}: {label} by its value.")
    found = [{_value(job, key): job for job in group} for group in lines.values()]
    rows = [Row(str(value), [by[value].objective if value in by else None for by in found],
                [_bounds(by.get(value)) for by in found]) for value in values]
    return figure(row_chart(rows, names, x_label=label, bars=False, description=description),
                  f"{key}: {label} by its value.")


def _bounds(job: Optional[JobStatus]) -> Optional[tuple[float, float]]:
    if job is None or not job.objective_ci95:
        return None
    return job.objective_ci95[0], job.objective_ci95[1]
