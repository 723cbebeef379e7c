"""Evaluate a drafter by decoding benchmarks with it: acceptance, its intervals, and speed against the target alone."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional, Sequence

from deepspec import distributed
from deepspec.config.schema_evaluation import MIXED, EvaluateConfig
from deepspec.data.batch import Sample
from deepspec.data.rendering import Renderer
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.modes import SCHEDULED
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.evaluation.answers import Answer
from deepspec.evaluation.benchmarks import Benchmark, Thinking, first_requests, run_conversations, with_thinking
from deepspec.evaluation.estimate import ANALYTIC, DRAFTED, TEACHER_FORCED, along_answers, at_anchors
from deepspec.evaluation.greedy import check_greedy
from deepspec.evaluation.metrics import AcceptanceCounts, require_proposals
from deepspec.evaluation.slices import of_results, reasons, together
from deepspec.evaluation.summary import Setting, Speed, assemble
from deepspec.evaluation.tasks import solved
from deepspec.evaluation.values import SettingValues, anchor_arrays
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)
_WARMUP_TOKENS = 8
Progress = Optional[Callable[..., Any]]  # (tokens, rows=1, *, note=None), as of data.progress.Progress.add


@dataclass(frozen=True)
class Subject:
    """What is evaluated. ``scheduler`` makes a fresh one for a mode, None where no scheduled decoding is possible."""

    target: Any
    drafter: Any
    renderer: Renderer
    draft_length: int
    scheduler: Optional[Callable[[str], ThroughputScheduler]] = None


@dataclass(frozen=True)
class Conditions:
    """What all ways of decoding of one round of measurements have in common."""

    temperature: float
    batch_size: int
    thinking: Thinking = None
    label: str = ""

    def setting(self, decoding: str, estimator: str = "sampled") -> Setting:
        """An empty setting of these conditions."""
        return Setting(self.temperature, decoding, self.batch_size, self.thinking, self.label, estimator)


@dataclass
class _Run:
    """Decodes one benchmark in one way, adding up time and tokens of all turns."""

    decoder: SpeculativeDecoder
    progress: Progress = None
    speed: Speed = field(default_factory=Speed)
    answers: list[Answer] = field(default_factory=list)
    rounds: int = 0  # with drafts, so far
    accepted: int = 0

    def __call__(self, requests: list[DecodeRequest]) -> list[DecodeResult]:
        results = []
        prompts = {request.id: request.prompt_ids for request in requests}
        for item in self.decoder.decode(requests):
            results.append(item)
            self.answers.append(Answer(item.id, item.domain, prompts[item.id], item.token_ids,
                                       item.finish_reason == "stop"))
            self._show(item)
        if requests:
            self.speed = self.speed.plus(self.decoder.timings)
        return results

    def _show(self, item: DecodeResult) -> None:
        drafted = [record.accepted for record in item.rounds if record.drafted]
        self.rounds += len(drafted)
        self.accepted += sum(drafted)
        if self.progress is not None:
            note = f"{1 + self.accepted / self.rounds:.2f} tokens/round" if self.rounds else "no drafts"
            self.progress(len(item.token_ids), note=f"{self.decoder.mode}: {note}")


def _decoder(subject: Subject, config: EvaluateConfig, where: Conditions, mode: str, seed: int) -> SpeculativeDecoder:
    scheduler = subject.scheduler(mode) if mode in SCHEDULED and subject.scheduler is not None else None
    return SpeculativeDecoder(
        subject.target, subject.drafter, Sampling(temperature=where.temperature, seed=seed),
        batch_size=where.batch_size, max_new_tokens=config.max_new_tokens, mode=mode, scheduler=scheduler)


def _warm_up(subject: Subject, decoder: SpeculativeDecoder, benchmark: Benchmark) -> None:
    """First rounds allocate buffers; they are not part of anybody's speed."""
    requests = first_requests(benchmark.conversations[:decoder.batch_size], subject.renderer)
    for _ in decoder.decode([replace(item, max_new_tokens=_WARMUP_TOKENS) for item in requests]):
        continue


def tokens_inside(drafter: Any, results: Sequence[DecodeResult]) -> tuple[int, int]:
    """Generated tokens that a drafter of a reduced vocabulary could have proposed, of how many; none of 0 for others.

    The answers are the target's, so the share is a ceiling on the acceptance of one draft token."""
    ids = None if drafter.shape.draft_ids is None else set(drafter.shape.draft_ids)
    if ids is None:
        return 0, 0
    return (sum(token in ids for item in results for token in item.token_ids),
            sum(len(item.token_ids) for item in results))


def decode_setting(subject: Subject, benchmarks: Sequence[Benchmark], config: EvaluateConfig, where: Conditions,
                   modes: Sequence[str], *, seed: int, label: str = "", progress: Progress = None,
                   answers: Optional[dict[str, tuple[str, list[Answer]]]] = None) -> dict[str, Setting]:
    """Decode every benchmark in every mode under one set of conditions; prompts are shared out over the ranks.

    Modes take turns on each benchmark, so that a machine that gets slower does so for all of them. Complete on rank 0;
    other ranks return what they decoded themselves. ``answers`` gets this rank's answers of the target alone by
    benchmark, with its domain, if that is one of the modes.
    """
    settings = {mode: where.setting(mode) for mode in modes}
    for mode in modes:
        if benchmarks:
            _warm_up(subject, _decoder(subject, config, where, mode, seed), benchmarks[0])
    for benchmark in benchmarks:
        own = benchmark.conversations[distributed.rank()::distributed.world_size()]
        for mode in modes:
            run = _Run(_decoder(subject, config, where, mode, seed), progress)
            results = run_conversations(own, subject.renderer, run)
            counts = AcceptanceCounts.of(results, subject.draft_length)
            right = solved(own, results, subject.renderer.text, run_code=config.run_code)
            slices = of_results(results, subject.draft_length, config.context_buckets, reasons(own))
            found = counts, run.speed, right, slices, tokens_inside(subject.drafter, results)
            gathered = distributed.gather_objects(found)
            parts: list[Any] = [found] if gathered is None else gathered
            merged = AcceptanceCounts.concatenate(part[0] for part in parts)
            if mode == "fixed":
                require_proposals(merged, f"evaluation of {label}{benchmark.name} ({mode}, T={where.temperature:g})")
            elif mode in SCHEDULED and not merged.proposed.sum():
                log.info("%s%s, %s, T=%g: the schedule never drafted, plain decoding is faster here", label,
                         benchmark.name, mode, where.temperature)
            elif mode == "none" and answers is not None:
                answers[benchmark.name] = benchmark.domain, run.answers
            settings[mode].add(benchmark.name, benchmark.domain, merged, Speed.together([part[1] for part in parts]),
                               {name: right for part in parts for name, right in part[2].items()})
            if mode != "none":
                settings[mode].tell_apart(together(part[3] for part in parts))
                settings[mode].inside.extend(part[4] for part in parts)
    return settings


def _computed(subject: Subject, config: EvaluateConfig, where: Conditions, samples: Sequence[Sample],
              answers: dict[str, tuple[str, list[Answer]]], modes: dict[str, bool], *, seed: int,
              progress: Progress) -> list[Setting]:
    """Settings whose acceptance is computed: along ``answers`` and at anchors of held-out ``samples``."""
    sampling = Sampling(temperature=where.temperature, seed=seed)
    found, edges = [], config.context_buckets
    if ANALYTIC in config.estimators:
        found.append(along_answers(subject.target, subject.drafter, answers, where.setting("fixed", ANALYTIC), sampling,
                                   edges=edges, modes=modes, progress=progress))
    for estimator in (DRAFTED, TEACHER_FORCED):
        if estimator in config.estimators and samples:
            found.append(at_anchors(subject.target, subject.drafter, samples, where.setting("fixed", estimator),
                                    sampling, anchors=config.anchors, batch_size=where.batch_size, name="held_out",
                                    edges=edges, progress=progress))
    return found


@dataclass(frozen=True)
class Evaluation:
    """Content of evaluation.json, and the values behind each of its settings."""

    report: dict[str, Any]
    values: dict[str, SettingValues]


@dataclass(frozen=True)
class Material:
    """What there is to evaluate with.

    ``untrained`` is a freshly initialised drafter, decoded like the trained one with fixed lengths; a trained one must
    beat it clearly. ``samples`` are held-out responses; ``skipped`` names modes that cannot run, and why.
    """

    benchmarks: Sequence[Benchmark]
    samples: Sequence[Sample] = ()
    untrained: Optional[Any] = None
    skipped: dict[str, str] = field(default_factory=dict)
    thinking: Sequence[Thinking] = (None,)
    thinking_share: Optional[float] = None


_LABELS = {True: "-thinking", False: "-direct", MIXED: "-mixed", None: ""}


def _conditions(material: Material, config: EvaluateConfig) -> list[Conditions]:
    sizes = list(config.batch_sizes) or [config.batch_size]
    several = len(material.thinking) > 1
    return [Conditions(temperature, size, thinking, _LABELS[thinking] if several else "")
            for thinking in material.thinking for temperature in config.temperatures for size in sizes]


def planned_answers(material: Material, config: EvaluateConfig) -> int:
    """How many rows ``evaluate`` will report to its progress on this rank: answers decoded and answers computed on."""
    modes = [mode for mode in config.modes if mode not in material.skipped] if "sampled" in config.estimators else []
    share = slice(distributed.rank(), None, distributed.world_size())
    turns = sum(one.turns for benchmark in material.benchmarks for one in benchmark.conversations[share])
    conditions = _conditions(material, config)
    each = len(list(config.batch_sizes)) or 1
    firsts = len(conditions) // each
    alone = ANALYTIC in config.estimators
    decoded = turns * (len(conditions) * len(modes) + firsts * (
        (alone and "none" not in modes) + alone + (material.untrained is not None)))
    domains = {item.domain for item in material.samples}
    samples = sum(len([item for item in material.samples if item.domain == domain][share]) for domain in domains)
    return decoded + samples * firsts * sum(name in config.estimators for name in (DRAFTED, TEACHER_FORCED))


def evaluate(subject: Subject, material: Material, config: EvaluateConfig, *, seed: int, header: dict[str, Any],
             progress: Progress = None) -> Evaluation:
    """Everything ``config`` asks for; complete on rank 0. ``header`` (drafter, algorithm, block_size) goes on top.

    Raises InputRefused when the drafter never proposed anything.
    """
    sampled = "sampled" in config.estimators
    modes = [mode for mode in config.modes if mode not in material.skipped] if sampled else []
    settings: list[Setting] = []
    baselines: list[Setting] = []
    for where in _conditions(material, config):
        benchmarks = [with_thinking(item, where.thinking, material.thinking_share) for item in material.benchmarks]
        first = where.batch_size == (list(config.batch_sizes) or [config.batch_size])[0]
        answers: dict[str, tuple[str, list[Answer]]] = {}
        needed = modes if not first or ANALYTIC not in config.estimators or "none" in modes else ["none", *modes]
        done = decode_setting(subject, benchmarks, config, where, needed, seed=seed, progress=progress, answers=answers)
        settings.extend(done[mode] for mode in modes)
        if first:
            settings += _computed(subject, config, where, material.samples, answers,
                                  {key: value for item in benchmarks for key, value in
                                   reasons(item.conversations).items()}, seed=seed, progress=progress)
        if material.untrained is not None and first:
            other = Subject(subject.target, material.untrained, subject.renderer, subject.draft_length)
            done = decode_setting(other, benchmarks, config, where, ["fixed"], seed=seed, progress=progress,
                                  label="the untrained drafter on ")
            baselines.extend(done.values())
    report = assemble(settings, baselines, header=header, resamples=config.bootstrap, seed=seed,
                      greedy_check=_greedy(subject, material.benchmarks, config), skipped=dict(material.skipped))
    return Evaluation(report, {item.id: SettingValues(
        item.counts, {} if item.values is None else anchor_arrays(item.values), item.text) for item in settings})


def _greedy(subject: Subject, benchmarks: Sequence[Benchmark], config: EvaluateConfig) -> dict[str, dict[str, int]]:
    """Losslessness at temperature 0 of a few prompts per benchmark, on rank 0."""
    if not config.check_greedy or distributed.rank() != 0:
        return {}
    return {benchmark.name: check_greedy(
        subject.target, subject.drafter, first_requests(benchmark.conversations[:config.check_greedy],
                                                        subject.renderer),
        batch_size=config.batch_size, max_new_tokens=config.max_new_tokens) for benchmark in benchmarks}
