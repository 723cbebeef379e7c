"""Evaluate a drafter by decoding benchmarks with it: acceptance, its intervals, and speed against the target alone."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional, Sequence

from deepspec import distributed
from deepspec.config.schema import EvaluateConfig
from deepspec.data.rendering import Renderer
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.evaluation.benchmarks import Benchmark, first_requests, run_conversations
from deepspec.evaluation.greedy import check_greedy
from deepspec.evaluation.metrics import AcceptanceCounts, require_proposals
from deepspec.evaluation.summary import Setting, Speed, assemble
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)
_WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Subject:
    """What is evaluated. ``scheduler`` makes a fresh one, None where scheduled decoding is not possible."""

    target: Any
    drafter: Any
    renderer: Renderer
    draft_length: int
    scheduler: Optional[Callable[[], ThroughputScheduler]] = None


@dataclass
class _Run:
    """Decodes one benchmark in one way, adding up time and tokens of all turns."""

    decoder: SpeculativeDecoder
    progress: Optional[Callable[[int], Any]] = None
    speed: Speed = field(default_factory=Speed)

    def __call__(self, requests: list[DecodeRequest]) -> list[DecodeResult]:
        results = []
        for item in self.decoder.decode(requests):
            results.append(item)
            if self.progress is not None:
                self.progress(1)
        if requests:
            self.speed = self.speed.plus(self.decoder.timings)
        return results


def _decoder(subject: Subject, config: EvaluateConfig, temperature: float, mode: str, seed: int) -> SpeculativeDecoder:
    scheduler = subject.scheduler() if mode == "scheduled" and subject.scheduler is not None else None
    return SpeculativeDecoder(
        subject.target, subject.drafter, Sampling(temperature=temperature, seed=seed), batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens, mode=mode, scheduler=scheduler)


def _warm_up(subject: Subject, decoder: SpeculativeDecoder, benchmark: Benchmark) -> None:
    """First rounds allocate buffers; they are not part of anybody's speed."""
    requests = first_requests(benchmark.conversations[:decoder.batch_size], subject.renderer)
    for _ in decoder.decode([replace(item, max_new_tokens=_WARMUP_TOKENS) for item in requests]):
        continue


def decode_setting(subject: Subject, benchmarks: Sequence[Benchmark], config: EvaluateConfig, temperature: float,
                   modes: Sequence[str], *, seed: int, label: str = "",
                   progress: Optional[Callable[[int], Any]] = None) -> dict[str, Setting]:
    """Decode every benchmark in every mode at one temperature; prompts are shared out over the ranks.

    Modes take turns on each benchmark, so that a machine that gets slower does so for all of them. Complete on rank 0;
    other ranks return what they decoded themselves.
    """
    settings = {mode: Setting(temperature, mode, config.batch_size) for mode in modes}
    for mode in modes:
        if benchmarks:
            _warm_up(subject, _decoder(subject, config, temperature, mode, seed), benchmarks[0])
    for benchmark in benchmarks:
        own = benchmark.conversations[distributed.rank()::distributed.world_size()]
        for mode in modes:
            run = _Run(_decoder(subject, config, temperature, mode, seed), progress)
            results = run_conversations(own, subject.renderer, run)
            counts = AcceptanceCounts.of(results, subject.draft_length)
            gathered = distributed.gather_objects((counts, run.speed))
            parts: list[Any] = [(counts, run.speed)] if gathered is None else gathered
            merged = AcceptanceCounts.concatenate(part[0] for part in parts)
            if mode != "none":
                require_proposals(merged, f"evaluation of {label}{benchmark.name} ({mode}, T={temperature:g})")
            settings[mode].add(benchmark.name, benchmark.domain, merged, Speed.together([part[1] for part in parts]))
    return settings


def evaluate(subject: Subject, benchmarks: Sequence[Benchmark], config: EvaluateConfig, *, seed: int,
             header: dict[str, Any], untrained: Optional[Any] = None, skipped: Optional[dict[str, str]] = None,
             progress: Optional[Callable[[int], Any]] = None) -> dict[str, Any]:
    """Content of evaluation.json; complete on rank 0.

    Args:
        header: drafter, algorithm, block_size, thinking.
        untrained: a freshly initialised drafter, evaluated like the trained one with fixed lengths; a trained one must
            beat it clearly.
        skipped: modes that cannot run, and why.

    Raises:
        InputRefused: the drafter never proposed anything.
    """
    skipped = dict(skipped or {})
    modes = [mode for mode in config.modes if mode not in skipped]
    settings: list[Setting] = []
    baselines: list[Setting] = []
    for temperature in config.temperatures:
        done = decode_setting(subject, benchmarks, config, temperature, modes, seed=seed, progress=progress)
        settings.extend(done.values())
        if untrained is not None:
            other = Subject(subject.target, untrained, subject.renderer, subject.draft_length)
            done = decode_setting(other, benchmarks, config, temperature, ["fixed"], seed=seed, progress=progress,
                                  label="the untrained drafter on ")
            baselines.extend(done.values())
    checks = {}
    if config.check_greedy and distributed.rank() == 0:
        for benchmark in benchmarks:
            requests = first_requests(benchmark.conversations[:config.check_greedy], subject.renderer)
            checks[benchmark.name] = check_greedy(
                subject.target, subject.drafter, requests, batch_size=config.batch_size,
                max_new_tokens=config.max_new_tokens)
    return assemble(settings, baselines, header=header, resamples=config.bootstrap, seed=seed, greedy_check=checks,
                    skipped=skipped)
