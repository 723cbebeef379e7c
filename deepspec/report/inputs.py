"""Everything a report reads of one run. A missing or broken file is noted, never an error: reports come early."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from deepspec.calibration import Calibration, ConfidenceRecords
from deepspec.decoding.modes import MODES
from deepspec.errors import InputRefused
from deepspec.evaluation.values import SettingValues, load_values

COMMANDS = {
    "train": "deepspeed launch/train_drafter.py", "confidence": "python launch/fit_confidence.py",
    "calibrate": "python launch/calibrate.py", "profile": "python launch/profile_throughput.py",
    "evaluate": "python launch/evaluate_drafter.py", "simulate": "python launch/simulate_serving.py",
    "export": "python launch/export_drafter.py",
    "report": "python launch/report.py",
}


@dataclass(frozen=True)
class RunFiles:
    """Contents of a run directory; None or empty where there is nothing (yet)."""

    directory: Path
    name: str
    manifest: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    calibration: Optional[Calibration]
    records: Optional[ConfidenceRecords]
    confidence: dict[str, Any]
    profile: dict[str, Any]
    cells: tuple[dict[str, Any], ...]
    evaluation: dict[str, Any]
    problems: tuple[str, ...]  # files that are there and cannot be read
    simulation: dict[str, Any] = field(default_factory=dict)
    validations: tuple[dict[str, Any], ...] = ()
    values: dict[str, SettingValues] = field(default_factory=dict)  # by setting, per prompt and anchor

    def command(self, stage: str) -> str:
        """What to type to get the stage's output for this run."""
        return f"{COMMANDS[stage]} run.dir={self.directory}"

    def option(self, group: str, name: str) -> Any:
        """An option of the recorded configuration, None if it is not there."""
        config = self.manifest.get("config")
        values = config.get(group) if isinstance(config, dict) else None
        return values.get(name) if isinstance(values, dict) else None

    @property
    def empty(self) -> bool:
        """Whether the directory holds nothing a report could show."""
        return not (self.metrics or self.evaluation or self.calibration or self.profile)


def _read(path: Path, parse: Callable[[Path], Any], empty: Any, problems: list[str]) -> Any:
    try:
        return parse(path) if path.is_file() else empty
    except (OSError, ValueError, KeyError, TypeError, InputRefused) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return empty


def _json_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Rows of a JSONL file; a torn last line (the job may be writing it) is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue
            raise ValueError(f"line {number} is not JSON") from None
        if isinstance(row, dict):
            rows.append(row)
    return tuple(rows)


def _values(directory: Path, problems: list[str]) -> dict[str, SettingValues]:
    try:
        return load_values(directory)
    except InputRefused as error:
        problems.append(str(error))
        return {}


def read_run_files(directory: Path) -> RunFiles:
    """Read what there is in ``directory``."""
    problems: list[str] = []

    def objects(name: str) -> dict[str, Any]:
        return _read(directory / name, _json_object, {}, problems)

    def rows(name: str) -> tuple[dict[str, Any], ...]:
        return _read(directory / name, _json_lines, (), problems)

    manifest = objects("manifest.json")
    return RunFiles(
        directory=directory, name=str(manifest.get("name") or directory.resolve().name), manifest=manifest,
        metrics=rows("metrics.jsonl"), confidence=objects("confidence/summary.json"),
        calibration=_read(directory / "calibration.json", Calibration.load, None, problems),
        records=_read(directory / "confidence" / "records.npz", ConfidenceRecords.load, None, problems),
        profile=objects("profile/sps.json"), cells=rows("profile/records.jsonl"), evaluation=objects("evaluation.json"),
        validations=rows("validation.jsonl"), values=_values(directory, problems),
        problems=tuple(problems), simulation=objects("simulation.json"),
    )


@dataclass(frozen=True)
class Setting:
    """One setting of evaluation.json, with what it decoded with made plain."""

    name: str
    decoding: str  # none | fixed | scheduled
    untrained: bool
    temperature: Optional[float]
    batch_size: Optional[int]
    values: dict[str, Any]

    @property
    def estimator(self) -> str:
        """sampled, or how acceptance was computed."""
        return str(self.values.get("estimator") or self.values.get("mode") or "sampled")

    def group(self, kind: str) -> dict[str, dict[str, Any]]:
        """``domains`` or ``benchmarks``: name to numbers."""
        found = self.values.get(kind)
        found = found if isinstance(found, dict) else {}
        return {name: value for name, value in found.items() if isinstance(value, dict)}

    @property
    def macro(self) -> dict[str, Any]:
        """Means over benchmarks."""
        found = self.values.get("macro")
        return found if isinstance(found, dict) else {}

    def speed(self, key: str = "tokens_per_second") -> Optional[float]:
        """Tokens per second over the whole setting: the file's own figure, else the mean over benchmarks."""
        if is_number(self.macro.get(key)):
            return float(self.macro[key])
        values = [value[key] for value in self.group("benchmarks").values() if is_number(value.get(key))]
        return sum(values) / len(values) if values else None


def is_number(value: Any) -> bool:
    """A finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _decoding(name: str, values: dict[str, Any]) -> str:
    for key in ("decoding", "mode"):
        if values.get(key) in MODES:
            return str(values[key])
    return next((mode for mode in MODES if mode in name), "fixed")


def settings(evaluation: dict[str, Any]) -> list[Setting]:
    """All settings in file order."""
    found = evaluation.get("settings")
    result = []
    for name, values in (found.items() if isinstance(found, dict) else ()):
        if isinstance(values, dict):
            untrained = values.get("drafter") == "untrained" or "untrained" in name
            result.append(Setting(name, _decoding(name, values), untrained, values.get("temperature"),
                                  values.get("batch_size"), values))
    return result


def main_setting(evaluation: dict[str, Any], *, untrained: bool = False) -> Optional[Setting]:
    """The setting that acceptance is quoted from: the first with every draft token verified, else the first of all.
    Decoded ones come first; a computed one is quoted where nothing was decoded."""
    choices = [one for one in settings(evaluation) if one.untrained == untrained and one.decoding != "none"]
    choices.sort(key=lambda one: one.estimator != "sampled")
    return next((one for one in choices if one.decoding == "fixed"), choices[0] if choices else None)


def interval(values: dict[str, Any]) -> Optional[tuple[float, float]]:
    """95 % interval of the acceptance length, None if there is none."""
    found = values.get("acceptance_length_ci95")
    if isinstance(found, (list, tuple)) and len(found) == 2 and all(map(is_number, found)):
        return float(found[0]), float(found[1])
    return None


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one temperature and batch size by way of decoding."""

    temperature: Optional[float]
    batch_size: Optional[int]
    none: Optional[float]
    fixed: Optional[float]
    scheduled: Optional[float]
    asynchronous: Optional[float] = None

    @property
    def label(self) -> str:
        """Shown beside a bar."""
        batch = f"batch {self.batch_size}" if self.batch_size is not None else "all"
        return batch if self.temperature is None else f"T={self.temperature:g}, {batch}"


def speeds(evaluation: dict[str, Any]) -> list[Speed]:
    """Speeds by temperature and batch size; "none" may come from a setting of its own or from the others' files."""
    groups: dict[tuple[Any, Any], dict[str, Optional[float]]] = {}
    for one in settings(evaluation):
        if one.untrained or one.estimator != "sampled":
            continue
        group = groups.setdefault((one.temperature, one.batch_size), {})
        group.setdefault(one.decoding, one.speed())
        alone = one.speed("target_only_tokens_per_second")
        if one.decoding != "none" and alone is not None:
            group.setdefault("target_only", alone)
    return [Speed(temperature, batch, values.get("none", values.get("target_only")), values.get("fixed"),
                  values.get("scheduled"), values.get("asynchronous"))
            for (temperature, batch), values in groups.items()]
