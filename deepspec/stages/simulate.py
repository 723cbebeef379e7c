"""Stage: serving simulated from this run's profile and acceptance, and that of other runs."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Optional

from deepspec import distributed
from deepspec.artifacts import SCHEMA_VERSION, atomic_write_json
from deepspec.calibration import ConfidenceRecords
from deepspec.config.paths import responses_dir, run_dir
from deepspec.config.schema import Config, draft_length
from deepspec.data.progress import Progress
from deepspec.data.responses import read_responses
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.errors import InputRefused
from deepspec.profiling.scheduler import trusted_cost
from deepspec.simulation.against import TOLERANCE, Comparison, against_evaluation
from deepspec.simulation.costs import StepCosts
from deepspec.simulation.recommend import Recommendation, as_json, recommend
from deepspec.simulation.subjects import TRACES_FILE, Subject, calibrated, other_subject, read_profile_header
from deepspec.simulation.sweep import Point, check_loads, loads_of, sweep
from deepspec.simulation.traces import Traces, traces_from_records, traces_of
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.checkpoint import drafter_sha256
from deepspec.training.session import chosen_checkpoint, load_run

log = logging.getLogger(__name__)
SIMULATION_FILE = "simulation.json"
_SEED_OFFSET = 15485863  # other draws than evaluation's and calibration's on the same prompts


def own_traces(config: Config, sha256: str) -> Traces:
    """Acceptance of this run's drafter: its confidence records, else kept traces, else held-out prompts decoded now.

    Kept traces stay where they are those of the records, whose prompts may be gone by now. The last way is for drafters
    without a confidence head; it loads target and drafter.
    """
    path = run_dir(config) / TRACES_FILE
    kept: Optional[Traces] = None
    if path.is_file():
        try:
            kept = Traces.load(path, drafter_sha256=sha256)
        except InputRefused as error:
            log.info("%s", error)
    records = run_dir(config) / "confidence" / "records.npz"
    if records.is_file():
        made = ConfidenceRecords.load(records, block_length=draft_length(config.drafter), drafter_sha256=sha256)
        if kept is not None and kept.same_blocks(traces_from_records(made, {})):
            return kept
        traces = traces_from_records(made, _prompt_lengths(config))
    elif kept is not None and kept.sampling_temperature == config.confidence.temperature:
        return kept
    else:
        traces = decode_traces(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    traces.save(path)
    return traces


def _prompt_lengths(config: Config) -> dict[str, int]:
    """Tokens of the held-out prompts; empty, with a warning, where the responses are not at hand."""
    try:
        return {row.id: len(row.turns[0].prompt_ids) for row in read_responses(responses_dir(config), "held_out")}
    except (InputRefused, OSError) as error:
        log.warning("the lengths of prompts are unknown (%s): give simulate.prompt_tokens, or their forwards count as "
                    "those of one token", error)
        return {}


def decode_traces(config: Config) -> Traces:
    """Decode held-out prompts with every draft token verified."""
    session, options = load_run(config), config.confidence
    decoder = SpeculativeDecoder(
        session.target, session.drafter, Sampling(temperature=options.temperature, seed=config.run.seed + _SEED_OFFSET),
        batch_size=options.batch_size, max_new_tokens=options.max_new_tokens, mode="fixed")
    results = list(decoder.decode(held_out_requests(config, options.max_prompts,
                                                    session.target.tokenizer)))
    return traces_of(results, session.drafter.shape.draft_length, drafter_sha256=session.drafter_sha256,
                     sampling_temperature=options.temperature)


def own_subject(config: Config) -> Subject:
    """This run's drafter. Raises InputRefused for a profile that is missing, flat, thin or of another drafter."""
    directory = run_dir(config)
    sha256 = drafter_sha256(chosen_checkpoint(config), config.export.weights)
    trusted_cost(directory / "profile", min_samples=config.profile.min_samples, drafter_sha256=sha256)
    traces = own_traces(config, sha256)
    return Subject(config.run.name, traces, StepCosts.load(directory / "profile"), config.drafter.algorithm,
                   config.drafter.num_layers, calibrated(directory, traces))


def find_run(name: str, config: Config) -> Path:
    """A run by directory, or by name beside this one. Raises InputRefused."""
    for path in (Path(name), run_dir(config).parent / name):
        if path.is_dir():
            return path
    raise InputRefused(f"runs: {name!r} is neither a directory nor a run beside {run_dir(config)}. Correct the name.")


def measured_before(config: Config, subject: Subject, hardware: Optional[str]) -> list[Comparison]:
    """The simulation beside the run's own evaluation, with a warning where they do not agree; empty without one."""
    path = run_dir(config) / "evaluation.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found = against_evaluation(subject, report, config.scheduler, hardware=hardware, seed=config.run.seed)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be compared with the simulation (%r)", path, error)
        return []
    for item in found:
        if not item.agrees:
            log.warning("%s: more than %.0f %% apart. The machine was busier during one of the two, or the profile is "
                        "out of date: measure both again on a quiet machine (launch/profile_throughput.py, "
                        "launch/evaluate_drafter.py)", item, 100 * TOLERANCE)
    return found


def run(config: Config) -> None:
    """Write ``simulation.json``: the points of Figs. 7 and 8, and a recommendation per load."""
    if distributed.rank() != 0:
        return
    options = config.simulate
    subjects = [own_subject(config)]
    header = read_profile_header(run_dir(config))
    subjects += [other_subject(find_run(name, config), header) for name in config.runs]
    check_loads(options, min(subject.costs.largest_requests for subject in subjects))
    for users in sorted(set(options.concurrency)):
        if users > options.max_concurrent:
            log.info("%d users: the engine runs simulate.max_concurrent=%d requests at a time, the others wait for "
                     "their turn", users, options.max_concurrent)
    total = len(subjects) * len(options.policies) * len(loads_of(options))
    with Progress("simulate", total, "points") as bar:
        points = sweep(subjects, options, config.scheduler, seed=config.run.seed, progress=bar.update)
    advice = recommend(subjects, options, config.scheduler, seed=config.run.seed)
    compared = measured_before(config, subjects[0], header.get("hardware"))
    atomic_write_json(run_dir(config) / SIMULATION_FILE, {
        "schema_version": SCHEMA_VERSION, "drafters": [_describe(subject) for subject in subjects],
        "hardware": header.get("hardware"), "engine": header.get("engine"), "workload": asdict(options),
        "scheduler": asdict(config.scheduler), "points": [asdict(point) for point in points],
        "against_evaluation": [asdict(item) for item in compared], "recommendations": as_json(advice)})
    for line in table(points, advice, compared):
        log.info("%s", line)


def _describe(subject: Subject) -> dict[str, object]:
    traces = subject.traces
    return {"name": subject.name, "algorithm": subject.algorithm, "layers": subject.layers,
            "draft_length": traces.draft_length, "drafter_sha256": traces.drafter_sha256,
            "conversations": len(traces), "blocks": len(traces.accepted),
            "acceptance_length": traces.acceptance_length, "sampling_temperature": traces.sampling_temperature,
            "calibrated": subject.calibration is not None}


def table(points: list[Point], advice: list[Recommendation], compared: list[Comparison]) -> list[str]:
    """Lines of text: the points, the comparison with the evaluation, then the recommendations."""
    lines = [f"{'drafter':20s} {'decoding':14s} {'load':>12s}  tokens/s  per user  verified  accepted"]
    for point in points:
        load = f"{point.concurrency} users" if point.arrival_rate is None else f"{point.arrival_rate:g} req/s"
        lines.append(f"{point.drafter or '-':20s} {point.policy:14s} {load:>12s} {point.tokens_per_second:9.1f} "
                     f"{point.tokens_per_second_per_user:9.1f} {point.verify_budget:9.2f} "
                     f"{point.acceptance_length:9.2f}")
    lines += [str(item) for item in compared]
    return lines + [f"{item.concurrency} users: {item.reason}" for item in advice]
