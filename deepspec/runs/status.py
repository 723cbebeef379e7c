"""What became of a sweep's job: one small file in its run directory, written as soon as it is known."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

from deepspec.artifacts import atomic_write_json
from deepspec.errors import InputRefused

STATUS = "status.json"
RUNNING, COMPLETE, FAILED, STOPPED, SKIPPED = "running", "complete", "failed", "stopped", "skipped"


@dataclass(frozen=True)
class JobStatus:
    """``overrides`` are all of the job's, ``swept`` those that make it differ from the others."""

    name: str
    status: str  # running | complete | failed | stopped (asked to, and saved) | skipped (after a failure)
    overrides: list[str]
    swept: list[str]
    objective: Optional[float] = None
    objective_ci95: Optional[list[float]] = None
    seconds: float = 0.0
    exit_code: Optional[int] = None
    error: list[str] = field(default_factory=list)  # the end of the job's log
    schema_version: int = 1

    def save(self, directory: Path) -> None:
        """Write it into the job's run directory."""
        atomic_write_json(directory / STATUS, asdict(self))


def read_status(directory: Path) -> Optional[JobStatus]:
    """The job's status, None before it started. Raises InputRefused for a file that is none."""
    path = directory / STATUS
    if not path.is_file():
        return None
    try:
        return JobStatus(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputRefused(f"{path} cannot be read as the status of a job ({error}). Delete it: the job then runs "
                           "again, and finds its finished stages.") from None


def read_sweep(directory: Path) -> list[JobStatus]:
    """All jobs of a sweep's directory, the best objective first, those without one last."""
    found = [read_status(path.parent) for path in sorted(directory.glob(f"*/{STATUS}"))]
    jobs = [one for one in found if one is not None]
    return sorted(jobs, key=lambda one: -one.objective if one.objective is not None else float("inf"))
