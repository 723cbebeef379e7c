"""What W&B gets of a finished stage: figures, long-form tables, and artifacts that say what was made from what.

Hashes, counts and measurements only: no prompt, no response, no token. Prompts, responses, features and weights are
referenced where they lie, never uploaded, unless ``tracking.upload_drafter`` asks for the exported drafter.
Training has a run of its own that it logs to step by step, and leaves its checkpoint there as an artifact.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Optional

from deepspec.artifacts import read_manifest
from deepspec.config.paths import features_dir, prompts_dir, responses_dir, run_dir
from deepspec.config.schema import Config
from deepspec.report.inputs import is_number
from deepspec.tracking import ArtifactFiles, Tracker, resolve_mode

JOB_TYPES = {
    "prompts": "collect_prompts", "responses": "generate_responses", "features": "extract_features",
    "confidence": "fit_confidence", "calibrate": "calibrate_confidence", "profile": "profile_throughput",
    "evaluate": "evaluate_drafter", "export": "export_drafter",
}
Table = tuple[str, list[str], list[list[Any]]]  # name, columns, rows


class Result(NamedTuple):
    """What a stage leaves in W&B."""

    summary: dict[str, Any]
    tables: list[Table]
    artifact: Optional[ArtifactFiles]
    inputs: tuple[str, ...]


def track_stage(config: Config, stage: str, environ: Any) -> None:
    """Log ``stage``, which has just finished, as a W&B run of its own in the group of the drafter's run.

    Called on rank 0 only. Whatever W&B does, the stage stays finished: a failure is one warning.
    """
    if stage not in JOB_TYPES or resolve_mode(config.tracking.mode, environ) == "disabled":
        return
    result = read_result(config, stage)
    tracker = Tracker.start(asdict(config), config.tracking, config.run.name, run_dir(config), JOB_TYPES[stage])
    if result.summary:
        tracker.summary(result.summary)
    for table in result.tables:
        tracker.table(*table)
    if result.artifact is not None:
        tracker.artifact(result.artifact, result.inputs)
    tracker.finish()


def read_result(config: Config, stage: str) -> Result:
    """What ``stage`` left on disk, as W&B gets it."""
    return _READERS[stage](config)


def names(config: Config) -> dict[str, str]:
    """Artifact of each stage. Data is named by its content's folder, so that runs that share it share its artifact."""
    target = config.target.name
    data = {"prompts": prompts_dir(config), "responses": responses_dir(config), "features": features_dir(config)}
    named = {stage: f"{target}-{path.name}" for stage, path in data.items()}
    own = {"train": "checkpoint", "confidence": "confidence", "calibrate": "calibration", "profile": "profile",
           "evaluate": "evaluation", "export": "drafter"}
    return named | {stage: f"{config.run.name}-{word}" for stage, word in own.items()}


def _folder(config: Config, stage: str, folder: Path, kind: str, inputs: tuple[str, ...]) -> Result:
    """A data directory: its manifest by value, the files that has hashes of by reference. Figures are its numbers."""
    manifest = read_manifest(folder)
    if manifest is None:
        return Result({}, [], None, inputs)
    summary = {f"{stage}/{key}": value for key, value in _flat(manifest.facts) if is_number(value)}
    metadata = {"fingerprint": manifest.fingerprint, "target": config.target.name, "folder": str(folder)}
    references = tuple(folder / name for name in sorted(manifest.files) if (folder / name).is_file())
    return Result(summary, [], ArtifactFiles(names(config)[stage], kind, (folder / "manifest.json",), references,
                                             metadata), inputs)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _prompts(config: Config) -> Result:
    return _folder(config, "prompts", prompts_dir(config), "prompts", ())


def _responses(config: Config) -> Result:
    return _folder(config, "responses", responses_dir(config), "responses", (names(config)["prompts"],))


def _features(config: Config) -> Result:
    return _folder(config, "features", features_dir(config), "target-features", (names(config)["responses"],))


def _train(config: Config) -> Result:
    named = names(config)
    root = run_dir(config) / "checkpoints"
    if not (root / "latest").is_file():
        return Result({}, [], None, ())
    tag = (root / "latest").read_text(encoding="utf-8").strip()
    artifact = ArtifactFiles(named["train"], "checkpoint", (root / tag / "manifest.json",), (root / tag,), {}, (tag,))
    return Result({}, [], artifact, (named["features"], named["responses"]))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _confidence(config: Config) -> Result:
    path = run_dir(config) / "confidence" / "summary.json"
    values = _json(path)
    rows = [[head, metric, k + 1, value] for head in ("joint", "refit") if isinstance(values.get(head), dict)
            for metric, column in values[head].items() if isinstance(column, list) for k, value in enumerate(column)]
    artifact = ArtifactFiles(names(config)["confidence"], "confidence", (path,)) if values else None
    summary = {"confidence/blocks": values["blocks"]} if is_number(values.get("blocks")) else {}
    return Result(summary, [("confidence/heads", ["head", "metric", "position", "value"], rows)] if rows else [],
                  artifact, (names(config)["train"],))


def _calibrate(config: Config) -> Result:
    path = run_dir(config) / "calibration.json"
    values = _json(path)
    metrics = ("temperatures", "ece_before", "ece_after", "ece_noise_floor", "auc", "brier_before", "brier_after")
    rows = [[metric, k + 1, value] for metric in metrics for k, value in enumerate(values.get(metric, ()))]
    summary = {f"calibration/{metric}@{position}": value for metric, position, value in rows if value is not None}
    after = [value for value in values.get("ece_after", ()) if value is not None]
    if after:
        summary["calibration/ece_mean"] = sum(after) / len(after)
    artifact = ArtifactFiles(names(config)["calibrate"], "calibration", (path,)) if values else None
    return Result(summary, [("calibration/positions", ["metric", "position", "value"], rows)] if rows else [],
                  artifact, (names(config)["train"], names(config)["confidence"]))


def _profile(config: Config) -> Result:
    path = run_dir(config) / "profile" / "sps.json"
    values = _json(path)
    rows = [[tokens, rate] for tokens, rate in zip(values.get("sample_batch_tokens", ()),
                                                   values.get("sample_steps_per_sec", ()))]
    artifact = ArtifactFiles(names(config)["profile"], "profile", (path, path.with_name("records.jsonl")),
                             metadata={"hardware": values.get("hardware")}) if values else None
    return Result({f"profile/{key}": value for key, value in _flat(values.get("fit") or {}) if is_number(value)},
                  [("profile/steps_per_second", ["batch_tokens", "steps_per_second"], rows)] if rows else [],
                  artifact, (names(config)["train"],))


def _numbers(values: Any) -> list[tuple[str, Any]]:
    """Numbers of a table, intervals as two of them."""
    found = []
    for key, value in (values.items() if isinstance(values, dict) else ()):
        if is_number(value):
            found.append((key, value))
        elif isinstance(value, list) and len(value) == 2:
            found += [(f"{key}_low", value[0]), (f"{key}_high", value[1])]
    return found


def _evaluate(config: Config) -> Result:
    path = run_dir(config) / "evaluation.json"
    values = _json(path)
    rows = []
    for setting, found in values.get("settings", {}).items():
        for name, one in found.get("benchmarks", {}).items():
            for metric, value in one.items():
                if is_number(value):
                    rows.append([setting, name, None, metric, value])
                elif metric in ("conditional_acceptance", "accepted_per_position"):
                    rows += [[setting, name, k + 1, metric, number] for k, number in enumerate(value)]
                elif metric == "task_score":
                    rows += [[setting, name, None, f"task_score/{key}", number] for key, number in _numbers(value)]
    summary = {f"eval/{key}": value for key, value in values.get("macro", {}).items() if is_number(value)}
    summary |= {f"eval/task_score/{key}": value for key, value in _numbers(values.get("macro", {}).get("task_score"))}
    artifact = ArtifactFiles(names(config)["evaluate"], "evaluation", (path,)) if values else None
    columns = ["setting", "benchmark", "position", "metric", "value"]
    named = names(config)
    return Result(summary, [("eval/values", columns, rows)] if rows else [], artifact,
                  (named["train"], named["calibrate"], named["profile"]))


def _export(config: Config) -> Result:
    folder = run_dir(config) / "export"
    if not (folder / "config.json").is_file():
        return Result({}, [], None, ())
    named = names(config)
    small = tuple(folder / name for name in ("config.json", "README.md", "manifest.json") if (folder / name).is_file())
    weights = tuple(sorted(folder.glob("*.safetensors")))
    upload = config.tracking.upload_drafter
    artifact = ArtifactFiles(named["export"], "drafter", small + (weights if upload else ()), () if upload else weights,
                             {"algorithm": config.drafter.algorithm, "target": config.target.name})
    return Result({}, [], artifact, tuple(named[stage] for stage in ("train", "calibrate", "profile", "evaluate")))


_READERS: dict[str, Callable[[Config], Result]] = {
    "prompts": _prompts, "responses": _responses, "features": _features, "train": _train, "confidence": _confidence,
    "calibrate": _calibrate, "profile": _profile, "evaluate": _evaluate, "export": _export,
}
