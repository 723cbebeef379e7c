"""Stage: lossless speculative decoding of the benchmarks against the target alone."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.calibration import Calibration
from deepspec.calibration.head import load_confidence
from deepspec.config.paths import responses_dir, run_dir
from deepspec.config.schema import Config, training_seed
from deepspec.config.schema_evaluation import MIXED
from deepspec.data.batch import Sample
from deepspec.data.progress import Progress
from deepspec.data.rendering import Renderer
from deepspec.data.samples import load_samples
from deepspec.decoding.modes import SCHEDULED
from deepspec.drafters.registry import build_drafter
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import HELD_OUT, Thinking, load_benchmark, split_domains
from deepspec.evaluation.estimate import DRAFTED, TEACHER_FORCED
from deepspec.evaluation.kept import with_kept
from deepspec.evaluation.run import Material, Subject, evaluate, planned_answers
from deepspec.evaluation.values import save_values
from deepspec.profiling.files import conditions
from deepspec.profiling.scheduler import (
    SchedulerFactory, recorded_logits, scheduler_factory as make_schedulers, trusted_cost,
)
from deepspec.training.learned import quantization_of, warn_of_another_engine
from deepspec.training.session import RunSession, load_run

log = logging.getLogger(__name__)
EVALUATION_FILE = "evaluation.json"


def scheduler_factory(config: Config, session: RunSession) -> SchedulerFactory:
    """Makes schedulers, by mode, from this run's profile and calibration.

    Raises InputRefused when the profile is missing, flat, too thin or of other hardware, dtype, target or drafter, or
    when the calibration is of another drafter.
    """
    cost = trusted_cost(run_dir(config) / "profile", min_samples=config.profile.min_samples,
                        drafter_sha256=session.drafter_sha256, **conditions(session.target))
    length = session.drafter.shape.draft_length
    calibration = None
    path = run_dir(config) / "calibration.json"
    if session.drafter.shape.confidence_head and path.is_file():
        calibration = Calibration.load(path, block_size=length, drafter_sha256=session.drafter_sha256)
    elif session.drafter.shape.confidence_head:
        log.warning("%s is missing: the scheduler uses uncalibrated confidences; launch/calibrate.py makes it", path)
    known = recorded_logits(run_dir(config) / "confidence" / "records.npz", session.drafter_sha256)
    return make_schedulers(cost, length, config.scheduler, calibration, logits=known)


def _untrained(config: Config, session: RunSession) -> torch.nn.Module:
    """The drafter as initialisation leaves it, on the device and in the dtype of the trained one."""
    with torch.random.fork_rng():
        torch.manual_seed(training_seed(config))
        fresh = build_drafter(session.drafter.shape, session.shared)
    device = next(session.drafter.parameters()).device
    return fresh.to(device).cast(session.drafter.dtype).eval().requires_grad_(False)


def _thinking(config: Config) -> list[Thinking]:
    """The kinds of conversations to evaluate on."""
    own: Thinking = config.target.thinking if config.responses.thinking_share is None else MIXED
    return list(config.evaluate.thinking) or [own]


def _held_out(config: Config, session: RunSession) -> Sequence[Sample]:
    """Held-out responses, where an estimator reads them."""
    if not {DRAFTED, TEACHER_FORCED} & set(config.evaluate.estimators):
        return ()
    samples = load_samples(responses_dir(config), HELD_OUT, config.data.max_length,
                           vocab_size=session.target.spec.vocab_size, mask_token_id=config.target.mask_token_id)
    if not samples:
        raise InputRefused(f"evaluate.estimators={list(config.evaluate.estimators)} needs held-out responses, but "
                           f"{responses_dir(config)} has none. Raise data.min_held_out and run "
                           "data_prep/collect_prompts.py and data_prep/generate_responses.py again.")
    return samples


def _material(config: Config, session: RunSession) -> tuple[Material, Optional[SchedulerFactory]]:
    """What to evaluate with, and a maker of schedulers if there can be any."""
    options = config.evaluate
    skipped: dict[str, str] = {}
    factory: Optional[SchedulerFactory] = None
    decodes = "sampled" in options.estimators
    scheduled = [mode for mode in options.modes if mode in SCHEDULED and decodes]
    if scheduled:
        try:
            factory = scheduler_factory(config, session)
        except InputRefused as error:
            skipped = dict.fromkeys(scheduled, str(error))
            log.warning("%s decoding is left out: %s", " and ".join(scheduled), error)
    benchmarks = [part for item in options.benchmarks
                  for part in split_domains(load_benchmark(item, responses_dir(config)))]
    for item in benchmarks:
        if not options.run_code and any(one.task is not None and one.task.is_code for one in item.conversations):
            log.warning("benchmark %s: the tests of its rows are not run, so its tasks are not scored; "
                        "evaluate.run_code=true runs what the model wrote, limited but not isolated", item.name)
    return Material(benchmarks, samples=_held_out(config, session), skipped=skipped, thinking=_thinking(config),
                    untrained=_untrained(config, session) if options.baseline_untrained and decodes else None,
                    thinking_share=config.responses.thinking_share), factory


def run(config: Config) -> None:
    """Evaluate on all ranks and write ``evaluation.json`` and the values behind it on rank 0."""
    session = load_run(config)
    warn_of_another_engine(config, session.target.spec)
    load_confidence(run_dir(config), session.drafter, session.drafter_sha256)
    options, shape, target = config.evaluate, session.drafter.shape, session.target
    material, factory = _material(config, session)
    subject = Subject(target, session.drafter, Renderer(target.tokenizer, config.target.thinking, config.target.name),
                      shape.draft_length, factory)
    header = {"drafter": session.drafter_sha256, "algorithm": shape.algorithm, "block_size": shape.block_size,
              "draft_length": shape.draft_length, "step": session.step, "target_sha256": target.fingerprint,
              "max_new_tokens": options.max_new_tokens, "hardware": conditions(target)["hardware"],
              "world_size": distributed.world_size(),
              "quantization": asdict(quantization_of(config, target.spec))}
    with Progress("evaluate", planned_answers(material, options), "answers") as bar:
        found = evaluate(subject, material, options, seed=config.run.seed, header=header, progress=bar.add)
    if distributed.rank() == 0:
        path = run_dir(config) / EVALUATION_FILE
        report, kept = with_kept(found.report, _previous(path))
        if kept:
            log.info("kept of the evaluation before: %s", ", ".join(kept))
        atomic_write_json(path, report)
        save_values(run_dir(config), found.values, drafter_sha256=session.drafter_sha256,
                    target_sha256=target.fingerprint, seed=config.run.seed)
        for line in table(found.report):
            log.info("%s", line)


def _previous(path: Path) -> dict[str, Any]:
    """The evaluation there is; empty for none, and for one that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
