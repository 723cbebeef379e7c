"""Stage: lossless speculative decoding of the benchmarks against the target alone."""

import logging
import sys
from typing import Callable, Optional

import torch
from tqdm import tqdm

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.calibration import Calibration
from deepspec.calibration.head import load_confidence
from deepspec.config.paths import responses_dir, run_dir
from deepspec.config.schema import Config
from deepspec.data.rendering import Renderer
from deepspec.decoding.cost import CostTable
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.drafters.registry import build_drafter
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import load_benchmark, split_domains
from deepspec.evaluation.run import Subject, evaluate
from deepspec.profiling.files import RECORDS_FILE, SPS_FILE, conditions
from deepspec.scheduling import SpsTable
from deepspec.training.session import RunSession, load_run

log = logging.getLogger(__name__)
EVALUATION_FILE = "evaluation.json"


def scheduler_factory(config: Config, session: RunSession) -> Callable[[], ThroughputScheduler]:
    """Makes schedulers from this run's profile and calibration.

    Raises InputRefused when the profile is missing, flat or of other hardware, dtype, target or drafter, or when the
    calibration is of another drafter.
    """
    directory = run_dir(config) / "profile"
    SpsTable.load(directory / SPS_FILE, drafter_sha256=session.drafter_sha256, **conditions(session.target))
    cost = CostTable.load(directory / RECORDS_FILE)
    length = session.drafter.shape.draft_length
    temperatures = None
    path = run_dir(config) / "calibration.json"
    if session.drafter.shape.confidence_head and path.is_file():
        temperatures = Calibration.load(path, block_size=length, drafter_sha256=session.drafter_sha256).temperatures
    elif session.drafter.shape.confidence_head:
        log.warning("%s is missing: the scheduler uses uncalibrated confidences; launch/calibrate.py makes it", path)
    return lambda: ThroughputScheduler(cost, length, temperatures=temperatures)


def _untrained(config: Config, session: RunSession) -> torch.nn.Module:
    """The drafter as initialisation leaves it, on the device and in the dtype of the trained one."""
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        fresh = build_drafter(session.drafter.shape, session.shared)
    parameter = next(session.drafter.parameters())
    return fresh.to(parameter.device, parameter.dtype).eval().requires_grad_(False)


def run(config: Config) -> None:
    """Decode all benchmarks on all ranks and write ``evaluation.json`` on rank 0."""
    session = load_run(config)
    load_confidence(run_dir(config), session.drafter, session.drafter_sha256)
    options = config.evaluate
    benchmarks = [part for item in options.benchmarks
                  for part in split_domains(load_benchmark(item, responses_dir(config)))]
    skipped: dict[str, str] = {}
    factory: Optional[Callable[[], ThroughputScheduler]] = None
    if "scheduled" in options.modes:
        try:
            factory = scheduler_factory(config, session)
        except InputRefused as error:
            skipped["scheduled"] = str(error)
            log.warning("scheduled decoding is left out: %s", error)
    shape = session.drafter.shape
    subject = Subject(session.target, session.drafter, Renderer(session.target.tokenizer, config.target.thinking,
                                                                config.target.name), shape.draft_length, factory)
    untrained = _untrained(config, session) if options.baseline_untrained else None
    header = {"drafter": session.drafter_sha256, "algorithm": shape.algorithm, "block_size": shape.block_size,
              "draft_length": shape.draft_length, "step": session.step, "target_sha256": session.target.fingerprint,
              "thinking": config.target.thinking, "max_new_tokens": options.max_new_tokens,
              "hardware": conditions(session.target)["hardware"], "world_size": distributed.world_size()}
    with tqdm(desc="evaluate", unit="answer", disable=not sys.stderr.isatty() or distributed.rank() != 0) as bar:
        report = evaluate(subject, benchmarks, options, seed=config.run.seed, header=header, untrained=untrained,
                          skipped=skipped, progress=bar.update)
    if distributed.rank() == 0:
        atomic_write_json(run_dir(config) / EVALUATION_FILE, report)
        for line in table(report):
            log.info("%s", line)


def table(report: dict[str, object]) -> list[str]:
    """Lines of text: per setting and benchmark the acceptance length with its interval, and the speed."""
    def number(value: Optional[float], digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [f"{'setting':28s} {'benchmark':18s} prompts    tau      95 %        tok/s speed-up"]
    settings = report["settings"]
    assert isinstance(settings, dict)
    for name, setting in settings.items():
        rows = setting["benchmarks"] | {"macro": {"num_prompts": ""} | setting["macro"]}
        for benchmark, values in rows.items():
            low, high = values["acceptance_length_ci95"] or (None, None)
            lines.append(f"{name:28s} {benchmark:18s} {values['num_prompts']!s:>7s} "
                         f"{number(values['acceptance_length']):>6s} [{number(low)}, {number(high)}] "
                         f"{number(values['tokens_per_second'], 1):>9s} {number(values['speedup']):>8s}")
    return lines
