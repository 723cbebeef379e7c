"""What a run would do and need: parameters, memory, disk, time, stages. No GPU, no hub, no torch."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from deepspec import artifacts
from deepspec.config import paths
from deepspec.config.schema import STAGES, Config
from deepspec.planning import memory, peak, texts, work
from deepspec.planning.ranks import trainer_ranks
from deepspec.planning.require import names_folder
from deepspec.planning.sizes import ParameterCount, count_parameters


@dataclass(frozen=True)
class StagePlan:
    """One stage: where its output lies and whether it would run."""

    name: str
    directory: str
    present: bool  # a finished output is there; the stage itself compares its inputs before it skips
    requested: bool
    in_training: bool = False  # training does its work: features.mode=online, hybrid or disaggregated
    missing: bool = False  # training would run and reads what is not there

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if not self.requested:
            return "missing, not asked for" if self.missing else "not asked for"
        if self.in_training:
            return "part of train"
        return "skip if inputs are unchanged" if self.present else "run"


@dataclass(frozen=True)
class Disk:
    """Free bytes where something is to be written."""

    path: str
    free: int
    need: int


@dataclass(frozen=True)
class Fit:
    """What a ZeRO stage needs on the ranks of the plan, and the largest batch that each accelerator has room for."""

    zero_stage: int
    peak: int
    host: int
    largest: dict[str, Optional[int]]  # None: not even the smallest


@dataclass(frozen=True)
class Plan:
    """Everything ``render`` prints."""

    run: str
    target: str
    parameters: ParameterCount
    states: tuple[memory.StateBytes, ...]
    step: memory.StepBytes
    workload: work.Workload
    texts: texts.TextBytes
    flops: dict[str, float]
    hours: dict[str, dict[str, float]]  # accelerator -> stage -> device hours
    ranks: int
    zero_stage: int
    rank: peak.RankBytes  # one rank that trains with these very options
    fits: tuple[Fit, ...]
    target_ranks: int
    target_rank_bytes: int  # of each
    batch_unit: str  # what ``Fit.largest`` counts
    stages: tuple[StagePlan, ...]
    disks: tuple[Disk, ...]
    warnings: tuple[str, ...]  # what the job would be refused for


def stage_output(config: Config, stage: str) -> Path:
    """Directory or file that holds the result of ``stage``."""
    run = paths.run_dir(config)
    data = {"prompts": paths.prompts_dir, "responses": paths.responses_dir, "features": paths.features_dir}
    if stage in data:
        return data[stage](config)
    return run / {
        "train": "checkpoints", "confidence": "confidence", "calibrate": "calibration.json", "profile": "profile",
        "evaluate": "evaluation.json", "simulate": "simulation.json", "export": "export", "report": "report.html",
    }[stage]


def is_present(config: Config, stage: str) -> bool:
    """Whether a finished output of ``stage`` exists (inputs are compared by the stage itself)."""
    path = stage_output(config, stage)
    if stage == "train":
        return (path / "latest").is_file()
    if path.suffix:
        return path.is_file()
    manifest = artifacts.read_manifest(path)
    return manifest is not None and manifest.status == "complete"


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that ``path`` is or would be on."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def plan_stages(config: Config) -> tuple[StagePlan, ...]:
    """All stages in order."""
    trains = "train" in config.stages and not is_present(config, "train")
    read = {"features"} if paths.reads_store(config) else {"responses"}

    def plan(name: str) -> StagePlan:
        present, requested = is_present(config, name), name in config.stages
        return StagePlan(name, str(stage_output(config, name)), present, requested,
                         name == "features" and config.features.mode in work.IN_TRAINING,
                         trains and name in read and not present and not requested)

    return tuple(plan(name) for name in STAGES)


def stages_due(stages: tuple[StagePlan, ...]) -> set[str]:
    """Names of the stages that would run."""
    return {stage.name for stage in stages if stage.requested and not stage.present}


def planned_texts(config: Config, workload: work.Workload, due: set[str]) -> texts.TextBytes:
    """Bytes of prompts and answers; sources are looked at only if a stage that writes such is ``due``."""
    if not due & {"prompts", "responses"}:
        return texts.TextBytes(0, 0, 0)
    return texts.text_bytes(config, workload.prompts, workload.length)


def needed_disk(config: Config, workload: work.Workload, stages: tuple[StagePlan, ...]) -> tuple[Disk, ...]:
    """Need against free, for the data root and for the run directory, counting only stages that would run."""
    due = stages_due(stages)
    fills = {stage.name: not stage.present for stage in stages}["features"] and config.features.mode == "hybrid"
    cache = workload.cache_bytes if "features" in due or (fills and "train" in due) else 0
    data = texts.peak(planned_texts(config, workload, due), cache, due)
    run = (workload.checkpoint_bytes if "train" in due else 0) + (workload.export_bytes if "export" in due else 0)
    root = Path(config.run.data_root)
    return (Disk(str(root), free_bytes(root), data), Disk(config.run.dir, free_bytes(Path(config.run.dir)), run))


def accelerator_hours(flops: dict[str, float]) -> dict[str, dict[str, float]]:
    """Device hours of each heavy stage for the named accelerators and for this CPU."""
    table = {
        name: {stage: work.hours(amount, peak, work.UTILISATION[stage]) for stage, amount in flops.items()}
        for name, peak in work.PEAK_TFLOPS.items()
    }
    rate = work.CPU_TFLOPS_PER_CORE * work.cores()
    table[work.cpu_name()] = {
        stage: work.hours(amount, rate, work.CPU_UTILISATION[stage]) for stage, amount in flops.items()
    }
    return table


def plan_fits(config: Config, parameters: ParameterCount, workload: work.Workload, ranks: int) -> tuple[Fit, ...]:
    """Every ZeRO stage on every named accelerator and in this machine's memory."""
    here = peak.machine_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    rooms = {name: gigabytes * 1e9 for name, gigabytes in peak.ACCELERATOR_GB.items()} | {work.cpu_name(): here}
    return tuple(
        Fit(stage, rank.peak, rank.host,
            {name: peak.largest_batch(config, parameters, workload.length, stage, ranks, peak.USABLE * room)
             for name, room in rooms.items()})
        for stage in memory.ZERO_STAGES
        for rank in (peak.rank_bytes(config, parameters, workload.packs, stage, ranks),)
    )


def missing_target(config: Config) -> tuple[str, ...]:
    """A line where ``target.path`` names a local folder that is not there."""
    target = config.target
    if target.source != "hf" or not names_folder(target.path) or Path(target.path).expanduser().is_dir():
        return ()
    return (f"This job would be refused: target.path={target.path!r} is not a folder. Give the target's folder or a "
            "hub id.",)


def make_plan(config: Config) -> Plan:
    """The plan of ``config``, from its options and from what is on disk."""
    parameters = count_parameters(config)
    workload = work.workload(config, parameters)
    flops = work.stage_flops(config, parameters, workload)
    stages = plan_stages(config)
    states = tuple(
        memory.state_bytes(parameters.trainable, config.trainer.precision, stage, ranks,
                           averaged=config.trainer.ema_decay is not None)
        for stage in memory.ZERO_STAGES for ranks in memory.RANK_COUNTS
    )
    ranks, zero_stage = trainer_ranks(config), config.engine.zero_stage
    target_ranks = config.target.ranks if config.features.mode == "disaggregated" else 0
    return Plan(
        run=config.run.name, target=config.target.name, parameters=parameters, states=states,
        step=memory.step_bytes(config, parameters, workload.packs), workload=workload,
        texts=planned_texts(config, workload, stages_due(stages)), flops=flops,
        hours=accelerator_hours(flops),
        ranks=ranks, zero_stage=zero_stage, stages=stages,
        rank=peak.rank_bytes(config, parameters, workload.packs, zero_stage, ranks),
        fits=plan_fits(config, parameters, workload, ranks), target_ranks=target_ranks,
        target_rank_bytes=peak.target_rank_bytes(config, parameters, workload.packs) if target_ranks else 0,
        batch_unit="samples of trainer.micro_batch_size" if config.trainer.pack_tokens is None else
        "tokens of trainer.pack_tokens",
        disks=needed_disk(config, workload, stages), warnings=missing_target(config),
    )
