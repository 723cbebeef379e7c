"""What earlier stages measured about the drafter that leaves: calibration, profile, acceptance. Each may be absent."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from deepspec.decoding.cost import ProfileCell
from deepspec.errors import InputRefused


@dataclass(frozen=True)
class Evidence:
    """Results that go into card and bundle; ``absent`` says in words what is missing and why."""

    calibration: Optional[dict[str, Any]] = None
    evaluation: Optional[dict[str, Any]] = None
    cells: tuple[ProfileCell, ...] = ()
    sps: Optional[dict[str, Any]] = None
    absent: dict[str, str] = field(default_factory=dict)


_REQUIRED = {"sps.json": ("sample_batch_tokens", "sample_steps_per_sec"), "calibration.json": ("temperatures",),
             "evaluation.json": ("settings",)}


def _read(path: Path) -> Optional[dict[str, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). Delete it and run its stage again.") from None
    missing = [key for key in _REQUIRED.get(path.name, ()) if not isinstance(values, dict) or key not in values]
    if missing or not isinstance(values, dict):
        raise InputRefused(f"{path} is damaged: it lacks {missing[0] if missing else 'its fields'}. Delete it and run "
                           "its stage again.")
    return values


def read_cells(path: Path) -> tuple[ProfileCell, ...]:
    """The cells of records.jsonl; empty where there is none. Keys of later versions are ignored."""
    if not path.is_file():
        return ()
    known = set(ProfileCell.__dataclass_fields__)
    cells = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            if line.strip():
                cells.append(ProfileCell(**{key: value for key, value in json.loads(line).items() if key in known}))
        except (ValueError, TypeError) as error:
            raise InputRefused(f"{path}:{number} is not a profile cell ({error}). Measure again with "
                               "launch/profile_throughput.py.") from None
    return tuple(cells)


def _mismatch(values: dict[str, Any], drafter_sha256: str, target_sha256: str) -> Optional[str]:
    """Why ``values`` are not about this drafter and target: a hash of another one."""
    found = values.get("drafter_sha256") or values.get("drafter")
    if isinstance(found, str) and len(found) == 64 and found != drafter_sha256:
        return f"it is of another drafter ({found[:12]}, this is {drafter_sha256[:12]})"
    target = values.get("target_sha256")
    if isinstance(target, str) and target != target_sha256:
        return f"it was measured with another target ({target[:12]}, this is {target_sha256[:12]})"
    return None


def gather(run_dir: Path, drafter_sha256: str, target_sha256: str, draft_length: int,
           confidence_head: bool = True) -> Evidence:
    """Read the run's results.

    A result that belongs to other weights or another block size is left out, and ``absent`` says so.
    """
    absent: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    commands = {"calibration": "launch/calibrate.py", "evaluation": "launch/evaluate_drafter.py",
                "profile": "launch/profile_throughput.py"}
    files = {"calibration": "calibration.json", "evaluation": "evaluation.json", "profile": "profile/sps.json"}
    for name, file in files.items():
        values = _read(run_dir / file)
        reason = f"not there; make it with {commands[name]}" if values is None else _mismatch(
            values, drafter_sha256, target_sha256)
        if reason is None and values is not None and name == "calibration":
            temperatures = values.get("temperatures") or ()
            if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in temperatures):
                raise InputRefused(f"{run_dir / file} has temperatures that are none: {temperatures}. Make it again "
                                   "with launch/calibrate.py.")
            count = len(temperatures)
            reason = None if count == draft_length else f"it has {count} temperatures for {draft_length} draft tokens"
        if name == "calibration" and not confidence_head:
            reason = "this drafter has no confidence head to calibrate"
        if reason is not None:
            absent[name] = reason
        elif values is not None:
            found[name] = values
    cells = () if "profile" in absent else read_cells(run_dir / "profile" / "records.jsonl")
    return Evidence(found.get("calibration"), found.get("evaluation"), cells, found.get("profile"), absent)
