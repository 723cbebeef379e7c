"""The one number a sweep compares its jobs by, read from what a run left."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

from deepspec.errors import InputRefused
from deepspec.report.inputs import interval, main_setting


class Objective(NamedTuple):
    """A value, larger is better, with its 95 % interval where there is one."""

    value: float
    ci95: Optional[tuple[float, float]]


def read_objective(run: Path, name: str) -> Objective:
    """``acceptance_length`` or ``speedup`` of evaluation.json (mean over benchmarks of its first full-length setting),
    or ``validation``: the best held-out acceptance length while training (analytic), for jobs that only train.

    Raises InputRefused where the run has no such number.
    """
    if name == "validation":
        path = run / "validation.jsonl"
        rows = _lines(path) if path.is_file() else []
        values = [row.get("ema", row)["acceptance_length_proxy"] for row in rows]
        if values:
            return Objective(max(values), None)
        raise InputRefused(f"{path} holds no validation: the job did not train, or trainer.validate_every and "
                           "held-out samples were missing.")
    path = run / "evaluation.json"
    if path.is_file():
        setting = main_setting(json.loads(path.read_text(encoding="utf-8")))
        value = setting.macro.get(name) if setting is not None else None
        if value is not None and setting is not None:
            return Objective(float(value), interval(setting.macro) if name == "acceptance_length" else None)
    raise InputRefused(f"{path} holds no {name}: the jobs of this sweep do not evaluate. Add the evaluate stage, or "
                       "compare them by sweep.objective=validation.")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
