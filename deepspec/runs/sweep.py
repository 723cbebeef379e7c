"""A sweep: jobs one after the other (or wherever Hydra's launcher puts them), and the table at the end.

Nothing here knows Hydra: launch/sweep.py hands over plain overrides.
"""

import logging
import time
from pathlib import Path
from typing import Optional, Sequence

from deepspec.artifacts import atomic_write_bytes, atomic_write_json
from deepspec.config.schema_sweep import SweepConfig
from deepspec.errors import UserError
from deepspec.report.columns import columns
from deepspec.report.compare import find_runs
from deepspec.report.repeats import compare_groups
from deepspec.report.sweep_sections import comparison_lines
from deepspec.runs.child import LOG, Child, command, last_lines
from deepspec.runs.names import job_name
from deepspec.runs.objective import read_objective
from deepspec.runs.page import sweep_groups, sweep_page
from deepspec.runs.status import COMPLETE, FAILED, RUNNING, SKIPPED, STOPPED, JobStatus, read_status, read_sweep

log = logging.getLogger(__name__)
COMPARISON = "comparison.json"


class JobFailed(UserError):
    """A job of a sweep ended without a result; its status file has the reason."""


def run_job(directory: Path, overrides: Sequence[str], swept: Sequence[str], options: SweepConfig,
            group: str) -> JobStatus:
    """Run the job of ``overrides`` in ``directory``/NAME and return its status, which is also written there.

    A job that is complete with the same overrides is not run again, one that was cut continues: its run directory
    follows from its options. A failure is a status, not an error.
    """
    name = job_name(swept)
    run = directory / name
    known = read_status(run)
    if known is not None and known.status == COMPLETE and known.overrides == list(overrides):
        log.info("%s: complete before, %s %s", name, options.objective, _number(known.objective))
        return known
    status = JobStatus(name, RUNNING, list(overrides), list(swept))
    if options.stop_on_failure and any(one.status == FAILED and one.name != name for one in read_sweep(directory)):
        log.warning("%s: skipped, because a job before it failed (sweep.stop_on_failure)", name)
        return _save(JobStatus(name, SKIPPED, list(overrides), list(swept)), run)
    _save(status, run)
    log.info("%s: starts; log: %s", name, run / LOG)
    arguments = command([*overrides, f"run.name={name}", f"run.dir={run}", f"tracking.group={group}"],
                        options.launcher)
    started = time.perf_counter()
    with Child() as child:
        code = child.run(arguments, run / LOG)
    status = _result(status, run, code, child.stopped, options.objective, time.perf_counter() - started)
    if status.status == FAILED:
        log.error("%s: failed with exit code %s after %.0f s; the end of %s:\n%s", name, code, status.seconds,
                  run / LOG, "\n".join(f"    {line}" for line in status.error[-12:]))
    else:
        log.info("%s: %s in %.0f s, %s %s", name, status.status, status.seconds, options.objective,
                 _number(status.objective))
    return _save(status, run)


def _save(status: JobStatus, run: Path) -> JobStatus:
    status.save(run)
    return status


def _result(status: JobStatus, run: Path, code: int, stopped: bool, objective: str, seconds: float) -> JobStatus:
    values = status.__dict__ | {"seconds": round(seconds, 1), "exit_code": code}
    if stopped:
        return JobStatus(**values | {"status": STOPPED})
    if code:
        return JobStatus(**values | {"status": FAILED, "error": last_lines(run / LOG)})
    try:
        found = read_objective(run, objective)
    except UserError as error:
        return JobStatus(**values | {"status": FAILED, "error": [str(error)]})
    return JobStatus(**values | {"status": COMPLETE, "objective": found.value,
                                 "objective_ci95": list(found.ci95) if found.ci95 else None})


def finish(directory: Path, objective: str) -> int:
    """Log the table of all jobs, write ``report.html`` and ``comparison.json`` over those that have results, and return
    the exit code.

    0 when every job is complete, 1 when one failed, was stopped or was skipped.
    """
    jobs = read_sweep(directory)
    log.info("sweep %s:\n%s", directory, table(jobs, objective))
    complete = [job for job in jobs if job.status == COMPLETE]
    if complete:
        runs = find_runs([str(directory / job.name) for job in complete], directory)
        found = compare_groups(sweep_groups(jobs, runs))
        for line in comparison_lines(found):
            log.info("%s", line)
        atomic_write_json(directory / COMPARISON, {"schema_version": 1, "sweep": directory.name,
                                                   "jobs": [job.name for job in complete],
                                                   "compared": [one.to_json() for one in found]})
        path = directory / "report.html"
        atomic_write_bytes(path, sweep_page(directory.name, objective, jobs, runs, found).encode())
        log.info("report: %s", path)
    return 0 if len(complete) == len(jobs) and jobs else 1


def table(jobs: Sequence[JobStatus], objective: str) -> str:
    """One line a job, the best first."""
    rows = [("job", "status", objective, "95 % CI", "seconds")]
    for job in jobs:
        bounds = job.objective_ci95
        rows.append((job.name, job.status if job.exit_code in (0, None) else f"{job.status} ({job.exit_code})",
                     _number(job.objective), f"{bounds[0]:.3f}-{bounds[1]:.3f}" if bounds else "",
                     f"{job.seconds:.0f}"))
    return columns(rows, left=2)


def _number(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.4f}"
