"""Which stages run, which are up to date, and the record of both in the run's ``manifest.json``."""

import contextlib
import fcntl
import importlib
import json
import logging
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from deepspec import distributed
from deepspec.artifacts import MANIFEST, atomic_write_json, canonical_hash, environment, is_complete, sha256_file
from deepspec.calibration.imports import record_files
from deepspec.config.paths import (
    features_dir, features_key, leaves_store, prompts_dir, prompts_key, reads_store, responses_dir, responses_key,
    run_dir,
)
from deepspec.config.schema import STAGES, Config, training_seed
from deepspec.data.decontaminate import decontamination_files
from deepspec.data.prompt_sources import FILE_KINDS
from deepspec.errors import InputRefused
from deepspec.profiling.files import hardware
from deepspec.stages.division import divided
from deepspec.stages.tracked import track_stage
from deepspec.training.identity import start_hash

log = logging.getLogger(__name__)
RUN_MANIFEST = "manifest.json"
_COLLECTIVE_TIMEOUT = 6 * 3600.0  # rank 0 alone profiles and exports while the others wait


def _latest_checkpoint(config: Config) -> list[Path]:
    latest = run_dir(config) / "checkpoints" / "latest"
    if not latest.is_file():
        return [latest]
    best = latest.with_name("best")
    return [latest, latest.parent / latest.read_text(encoding="utf-8").strip() / "manifest.json"] + (
        [best] if best.is_file() else [])


def outputs(config: Config, stage: str) -> list[Path]:
    """Small files that stand for a stage's result; their hashes are what later stages depend on."""
    run = run_dir(config)
    files: dict[str, Callable[[], list[Path]]] = {
        "prompts": lambda: [prompts_dir(config) / "manifest.json"],
        "responses": lambda: [responses_dir(config) / "manifest.json"],
        "features": lambda: [features_dir(config) / "manifest.json"] if reads_store(config) else [],
        "train": lambda: _latest_checkpoint(config),
        "confidence": lambda: [run / "confidence" / "manifest.json"] if config.drafter.confidence_head else [],
        "calibrate": lambda: [run / "calibration.json"] if config.drafter.confidence_head else [],
        "profile": lambda: [run / "profile" / "sps.json"],
        "evaluate": lambda: [run / "evaluation.json"],
        "simulate": lambda: [run / "simulation.json"],
        "export": lambda: [run / "export" / "config.json", run / "export" / "manifest.json"],
        "report": lambda: [run / "report.html"],
    }
    return files[stage]()


def decided_by(config: Config, stage: str) -> dict[str, Any]:
    """The options that decide a stage's result, its inputs aside."""
    values = asdict(config)
    trainer = {key: values["trainer"][key] for key in (
        "epochs", "max_steps", "global_batch_size", "micro_batch_size", "num_anchors", "precision")}
    training = {
        "features": features_key(config), "mask_token_id": config.target.mask_token_id, "trainer": trainer,
        "target_files": _target_files(config),
        "drafter": values["drafter"] | {"init_from": start_hash(config.drafter.init_from)},
        "seed": training_seed(config),
        "objective": {
            key: value for key, value in values["objective"].items() if key not in ("implementation", "chunk_megabytes")
        },
        "optimizer": _optimizer(values["optimizer"]),
    }
    keys: dict[str, Any] = {
        "prompts": prompts_key(config), "responses": responses_key(config), "features": features_key(config),
        "train": training,
        "confidence": {"confidence": values["confidence"], "files": _files([config.confidence.prompts])} | {
            name: values["calibration"][name] for name in (
                "fit_fraction", "num_bins", "bootstrap", "grid_min", "grid_max", "grid_points", "min_samples",
                "noise_guard")},
        "calibrate": values["calibration"] | {"files": _records_files(config)} | (
            {} if config.calibration.records is None else {"temperature": config.confidence.temperature}),
        "profile": values["profile"] | {"hardware": hardware()},
        "evaluate": values["evaluate"] | {"files": _benchmark_files(config), "scheduler": values["scheduler"]},
        "simulate": values["simulate"] | {"scheduler": values["scheduler"], "runs": config.runs},
        "export": values["export"], "report": {"runs": config.runs},
    }
    if not config.drafter.confidence_head:  # the simulation then decodes prompts itself
        keys["simulate"] |= {"temperature": config.confidence.temperature}
    if training_seed(config) != config.run.seed:
        training["validation_seed"] = config.run.seed  # held-out anchors, which choose the best checkpoint
    for name in ("ema_decay", "early_stopping_patience"):
        if values["trainer"][name] is not None:
            trainer[name] = values["trainer"][name]
    if config.trainer.early_stopping_patience is not None:  # with it, what is validated decides where training ends
        trainer |= {name: values["trainer"][name] for name in (
            "early_stopping_threshold", "validate_every", "decode_every", "validation_samples")}
    if config.export.checkpoint != "latest" and stage in _OF_ONE_CHECKPOINT:
        keys[stage] = keys[stage] | {"checkpoint": config.export.checkpoint}
    if config.export.weights != "trained" and stage in _OF_ONE_CHECKPOINT:
        keys[stage] = keys[stage] | {"weights": config.export.weights}
    return keys[stage]


def _optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """Without the options that runs made before them lack, where they say what was done then."""
    later = {"schedule": "cosine", "decay_ratio": None}
    return {key: value for key, value in values.items() if key not in later or value != later[key]}


def _target_files(config: Config) -> list[tuple[str, int, int]]:
    """Size and time of the files of a target in a local folder: a hint to look, what counts is its fingerprint."""
    if config.target.source != "hf" or not config.target.path:
        return []
    found = [(path.name, path.stat()) for path in sorted(Path(config.target.path).expanduser().glob("*.*"))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found if name.endswith((".safetensors", ".json"))]


def _files(paths: list[Optional[str]]) -> list[str]:
    """Hashes of the files that there are among ``paths``."""
    found = [Path(path).expanduser() for path in paths if path is not None]
    return [sha256_file(path) for path in found if path.is_file()]


def _records_files(config: Config) -> list[str]:
    """Hashes of the records of an engine in service that are calibrated on."""
    if config.calibration.records is None:
        return []
    return [sha256_file(file) for file in record_files(Path(config.calibration.records).expanduser())]


def _benchmark_files(config: Config) -> list[str]:
    paths = [Path(benchmark.path).expanduser() for benchmark in config.evaluate.benchmarks]
    return [sha256_file(path) for path in paths if path.is_file()]


_OF_ONE_CHECKPOINT = ("confidence", "calibrate", "profile", "evaluate", "simulate", "export")
_NEEDS = {
    "prompts": (), "responses": ("prompts",), "features": ("responses",), "train": ("responses", "features"),
    "confidence": ("train", "responses"), "calibrate": ("train", "confidence"), "profile": ("train",),
    "evaluate": ("train", "confidence", "calibrate", "profile"),
    "simulate": ("train", "confidence", "calibrate", "profile", "evaluate"),
    "export": ("train", "confidence", "calibrate", "profile", "evaluate"),
    "report": ("train", "confidence", "calibrate", "profile", "evaluate", "simulate", "export"),
}


def output_hashes(config: Config, stage: str) -> dict[str, str]:
    """SHA-256 of each output file that exists."""
    return {str(path): sha256_file(path) for path in outputs(config, stage) if path.is_file()}


def fingerprint(config: Config, stage: str) -> str:
    """Hash of everything a stage's result depends on: its options and the results of the stages it reads."""
    inputs = {name: sorted(output_hashes(config, name).values()) for name in _NEEDS[stage]}
    return canonical_hash({"options": decided_by(config, stage), "inputs": inputs})


def read_run(directory: Path) -> dict[str, Any]:
    """The run's manifest; empty for a new run. Raises InputRefused for one that is damaged."""
    path = directory / RUN_MANIFEST
    if not path.is_file():
        return {"schema_version": 1, "stages": {}}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). Delete that file and run again.") from None
    stages = values.get("stages") if isinstance(values, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(record, dict) for record in stages.values()):
        raise InputRefused(f"{path} is damaged: stages is no table of what each stage did. Delete that file and run "
                           "again.")
    return values


def up_to_date(config: Config, stage: str) -> bool:
    """Whether the stage finished with these very inputs and options and its output is still what it wrote."""
    if stage == "prompts" and (any(source.kind in FILE_KINDS for source in config.data.sources)
                               or decontamination_files(config) or config.data.redaction):
        return False  # the stage itself compares the files' contents
    if stage in ("report", "simulate") and config.runs:
        return False  # what the other runs hold now is not looked up here
    if stage == "calibrate" and config.calibration.records is not None and not config.calibration.recalibrate:
        return False  # a look at drift is asked for, which leaves nothing that later stages read
    record = read_run(run_dir(config))["stages"].get(stage)
    if not record or record.get("status") != "complete" or record.get("fingerprint") != fingerprint(config, stage):
        return False
    found = outputs(config, stage)
    whole = all(is_complete(path.parent) if path.name == MANIFEST else path.is_file() for path in found)
    return whole and record.get("outputs") == output_hashes(config, stage)


def _record(config: Config, stage: str, **values: Any) -> None:
    if distributed.rank() != 0:
        return
    manifest = read_run(run_dir(config))
    previous = manifest["stages"].get(stage, {})
    manifest["stages"][stage] = previous | values
    manifest |= {"name": config.run.name, "seed": config.run.seed, "config": asdict(config), **environment()}
    atomic_write_json(run_dir(config) / RUN_MANIFEST, manifest)


class RunLock:
    """Only one job at a time writes into a run directory (two jobs started in one second would mix checkpoints)."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._handle = open(directory / ".lock", "w", encoding="utf-8")
        if distributed.rank() != 0:
            return
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputRefused(
                f"{directory} is in use by another job. Wait for it, or give this one a name of its own: run.name=NAME"
            ) from None

    def release(self) -> None:
        self._handle.close()


def run_stages(config: Config, stages: tuple[str, ...], *, force: Optional[str] = None) -> None:
    """Run ``stages`` in pipeline order; one that is up to date is skipped and says so, unless named by ``force``."""
    distributed.set_threads(config.run.threads)
    with divided(config, stages) as split:
        if split is not None and split.is_target:
            importlib.import_module("deepspec.stages.target_rank").serve(config, split)
            return
        lock = RunLock(run_dir(config))
        try:
            if distributed.world_size() > 1:
                distributed.init(_COLLECTIVE_TIMEOUT)
            for stage in _in_order(stages):
                _run_stage(config, stage, forced=stage == force)
        finally:
            lock.release()
        distributed.shutdown()


def _in_order(stages: tuple[str, ...]) -> Iterator[str]:
    return (stage for stage in STAGES if stage in stages)


def _run_stage(config: Config, stage: str, *, forced: bool) -> None:
    # Rank 0 decides for all: another rank may look when rank 0 has already written the next record.
    current = distributed.rank() == 0 and not forced and up_to_date(config, stage)
    if distributed.broadcast_object(current):
        log.info("%-10s up to date", stage)
        return
    log.info("%-10s starts", stage)
    decided = fingerprint(config, stage) if distributed.rank() == 0 else ""
    stored = leaves_store(config) or config.features.path is not None
    reads = {"reads": [str(features_dir(config))]} if stage == "train" and stored else {}
    _record(config, stage, status="running", fingerprint=decided, host=socket.gethostname(), **reads)
    started = time.perf_counter()
    try:
        importlib.import_module(f"deepspec.stages.{stage}").run(config)
    except BaseException as error:
        stopped = isinstance(error, SystemExit) and not error.code  # asked to stop by a signal, and saved
        with contextlib.suppress(OSError):  # a full disk: the first error is the one to show
            _record(config, stage, status="stopped" if stopped else "failed")
        raise
    distributed.barrier()
    seconds = time.perf_counter() - started
    if distributed.rank() == 0:
        _record(config, stage, status="complete", fingerprint=fingerprint(config, stage), seconds=round(seconds, 2),
                outputs=output_hashes(config, stage))
        track_stage(config, stage, os.environ)
    log.info("%-10s done in %.1f s", stage, seconds)
    distributed.barrier()
