"""From counts and times to the content of evaluation.json. Undefined numbers are None (null), never NaN."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Sequence

import numpy as np

from deepspec.artifacts import SCHEMA_VERSION
from deepspec.decoding.types import DecodeTimings
from deepspec.evaluation.analytic import AnchorValues
from deepspec.evaluation.benchmarks import Thinking
from deepspec.evaluation.bootstrap import acceptance_length_interval, percentile_interval, ratio_bootstrap
from deepspec.evaluation.metrics import DEFINITIONS, AcceptanceCounts, latency_per_token, summary
from deepspec.evaluation.paired import compare
from deepspec.evaluation.slices import Slices, described, together
from deepspec.evaluation.tasks import Solved, task_score


@dataclass(frozen=True)
class Speed:
    """Tokens and seconds of decoding; ranks run side by side, so their tokens add up and the slowest sets the time."""

    tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    steps: int = 0
    draft_steps: int = 0  # of these, with a proposal

    def plus(self, timings: DecodeTimings) -> "Speed":
        """With another decode call of the same rank."""
        return Speed(self.tokens + timings.tokens, self.seconds + timings.total_seconds,
                     self.draft_seconds + timings.draft_seconds, self.verify_seconds + timings.verify_seconds,
                     self.steps + timings.steps, self.draft_steps + timings.draft_steps)

    @classmethod
    def together(cls, parts: Sequence["Speed"]) -> "Speed":
        """Of ranks that ran at the same time."""
        return cls(sum(part.tokens for part in parts), max(part.seconds for part in parts),
                   sum(part.draft_seconds for part in parts), sum(part.verify_seconds for part in parts),
                   sum(part.steps for part in parts), sum(part.draft_steps for part in parts))

    @classmethod
    def pooled(cls, parts: Sequence["Speed"]) -> "Speed":
        """Of benchmarks that ran one after the other."""
        return cls(*(sum(getattr(part, name) for part in parts) for name in cls.__dataclass_fields__))

    @property
    def tokens_per_second(self) -> Optional[float]:
        """Generated tokens per wall second."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def round_ms(self) -> dict[str, Optional[float]]:
        """Milliseconds of drafting and of verifying in one round of a whole batch."""
        return {"draft_ms": 1e3 * self.draft_seconds / self.draft_steps if self.draft_steps else None,
                "verify_ms": 1e3 * self.verify_seconds / self.steps if self.steps else None}


@dataclass
class Setting:
    """One way of decoding all benchmarks, or of computing what decoding would accept."""

    temperature: float
    decoding: str  # none | fixed | scheduled
    batch_size: int
    thinking: Thinking = None
    label: str = ""  # of ``thinking`` in the id, where there is more than one
    estimator: str = "sampled"  # sampled | analytic | drafted | teacher_forced
    anchors: dict[str, int] = field(default_factory=dict)  # of each benchmark, where acceptance was computed
    values: Optional[AnchorValues] = None
    text: Optional[str] = None  # hash of the tokens that were read
    counts: dict[str, AcceptanceCounts] = field(default_factory=dict)
    speeds: dict[str, Speed] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)  # of each benchmark
    solved: dict[str, Solved] = field(default_factory=dict)  # of each benchmark, where its prompts have tasks
    slices: Slices = field(default_factory=dict)  # of all benchmarks
    inside: list[tuple[int, int]] = field(default_factory=list)  # of a reduced vocabulary: tokens inside, of how many

    def add(self, name: str, domain: str, counts: AcceptanceCounts, speed: Speed,
            solved: Optional[Solved] = None) -> None:
        """Results of one benchmark."""
        self.counts[name], self.speeds[name], self.domains[name] = counts, speed, domain
        self.solved[name] = solved or {}

    def tell_apart(self, slices: Slices) -> None:
        """Add the rounds of one benchmark by what they had before them."""
        self.slices = together([self.slices, slices])

    def solved_in(self, names: Sequence[str]) -> Solved:
        """Tasks of some benchmarks together."""
        return {task: right for name in names for task, right in self.solved.get(name, {}).items()}

    @property
    def id(self) -> str:
        """Key in the file."""
        kind = f"b{self.batch_size}-{self.decoding}" if self.estimator == "sampled" else self.estimator
        return f"t{self.temperature:g}-{kind}{self.label}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Conditions under which two ways of decoding can be compared."""
        return self.temperature, self.thinking, self.batch_size, self.estimator


def _rates(speed: Speed, alone: Optional[Speed]) -> dict[str, Optional[float]]:
    own = speed.tokens_per_second
    base = None if alone is None else alone.tokens_per_second
    return {"tokens_per_second": own, "target_only_tokens_per_second": base,
            "speedup": own / base if own is not None and base else None}


def _entry(counts: AcceptanceCounts, speed: Speed, alone: Optional[Speed], resamples: int, seed: int) -> dict[str, Any]:
    values = summary(counts)
    tau = values["acceptance_length"]
    latency = None
    if tau and speed.steps:
        latency = latency_per_token(speed.draft_seconds / speed.steps, speed.verify_seconds / speed.steps, tau)
    return values | _rates(speed, alone) | speed.round_ms | {
        "acceptance_length_ci95": acceptance_length_interval(counts, resamples, seed), "latency_per_token": latency}


def _mean(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _macro(setting: Setting, entries: dict[str, dict[str, Any]], alone: Optional[Setting], resamples: int,
           seed: int) -> dict[str, Any]:
    """Means over benchmarks that have rounds; speed is pooled, because a mean of rates is nobody's throughput."""
    used = [name for name, counts in setting.counts.items() if counts.rounds.sum()]
    draws = []
    for place, name in enumerate(used):
        counts = setting.counts[name]
        draws.append(ratio_bootstrap(counts.accepted + counts.bonus, counts.rounds, resamples, seed + place))
    interval = None
    if draws and resamples and sum(len(setting.counts[name]) for name in used) > 1:
        shortest = min(len(part) for part in draws)
        interval = percentile_interval(np.mean([part[:shortest] for part in draws], axis=0))
    base = None if alone is None else Speed.pooled(list(alone.speeds.values()))
    return {"acceptance_length": _mean([entry["acceptance_length"] for entry in entries.values()]),
            "acceptance_length_ci95": interval, "num_benchmarks": len(used),
            **_rates(Speed.pooled(list(setting.speeds.values())), base)}


def _anchors(setting: Setting, names: Sequence[str]) -> dict[str, int]:
    """How many anchors were looked at; nothing where rounds were decoded."""
    return {"anchors": sum(setting.anchors[name] for name in names)} if setting.anchors else {}


def _score(setting: Setting, alone: Optional[Setting], names: Sequence[str]) -> dict[str, Any]:
    """The task score of some benchmarks, against the target alone under the same conditions; nothing without tasks."""
    base = None if alone is None or alone is setting else alone.solved_in(names)
    found = task_score(setting.solved_in(names), base)
    return {} if found is None else {"task_score": found}


def _vocabulary(setting: Setting) -> dict[str, Any]:
    """What a reduced draft vocabulary costs: the share of generated tokens that could have been proposed."""
    total = sum(part[1] for part in setting.inside)
    return {"draft_vocab_coverage": sum(part[0] for part in setting.inside) / total} if total else {}


def describe(setting: Setting, alone: Optional[Setting], *, resamples: int, seed: int) -> dict[str, Any]:
    """One entry of ``settings``."""
    benchmarks = {
        name: {"domain": setting.domains[name]} | _anchors(setting, [name]) | _entry(
            counts, setting.speeds[name], None if alone is None else alone.speeds[name], resamples, seed)
        | _score(setting, alone, [name]) for name, counts in setting.counts.items()
    }
    domains = {}
    for domain in sorted(set(setting.domains.values())):
        names = [name for name, own in setting.domains.items() if own == domain]
        base = None if alone is None else Speed.pooled([alone.speeds[name] for name in names])
        domains[domain] = _anchors(setting, names) | _entry(
            AcceptanceCounts.concatenate(setting.counts[name] for name in names),
            Speed.pooled([setting.speeds[name] for name in names]), base, resamples, seed)
        domains[domain]["acceptance_length_macro"] = _mean([benchmarks[name]["acceptance_length"] for name in names])
        domains[domain] |= _score(setting, alone, names)
    return {"temperature": setting.temperature, "thinking": setting.thinking,
            "mode": "sampled" if setting.estimator == "sampled" else "analytic", "estimator": setting.estimator,
            "decoding": setting.decoding, "batch_size": setting.batch_size, "benchmarks": benchmarks,
            "domains": domains, "macro": _macro(setting, benchmarks, alone, resamples, seed)
            | _score(setting, alone, list(setting.counts)), **described(setting.slices, resamples, seed),
            **_vocabulary(setting)}


def _against(trained: Optional[Setting], baseline: Setting, resamples: int, seed: int) -> Optional[dict[str, Any]]:
    """Paired comparison over all prompts of all benchmarks; None where there is nothing to pair."""
    if trained is None or not resamples:
        return None
    pooled = [AcceptanceCounts.concatenate(part.counts.values()) for part in (trained, baseline)]
    if len(pooled[0]) != len(pooled[1]) or len(pooled[0]) < 2 or not all(part.rounds.sum() for part in pooled):
        return None
    return asdict(compare(pooled[0], pooled[1], resamples, seed))


def assemble(settings: Sequence[Setting], baselines: Sequence[Setting], *, header: dict[str, Any], resamples: int,
             seed: int, greedy_check: dict[str, Any], skipped: dict[str, str]) -> dict[str, Any]:
    """The whole file. ``macro`` repeats the default setting's: the first with fixed lengths, else the first.

    Decoded settings come first, so that the default one is decoded where anything was.
    """
    settings = sorted(settings, key=lambda item: item.estimator != "sampled")
    by_key = {(item.decoding, *item.key): item for item in settings}
    described = {item.id: describe(item, by_key.get(("none", *item.key)), resamples=resamples, seed=seed)
                 for item in settings}
    first: Optional[dict[str, Any]] = None
    for item in baselines:
        values = describe(item, by_key.get(("none", *item.key)), resamples=resamples, seed=seed)
        values |= {"drafter": "untrained", "trained_minus_untrained": _against(
            by_key.get(("fixed", *item.key)), item, resamples, seed)}
        described[f"{item.id}-untrained"] = values
        first = values if first is None else first
    default = next((item for item in settings if item.decoding == "fixed"), settings[0] if settings else None)
    return {
        **header, "schema_version": SCHEMA_VERSION,
        "settings": described, "default_setting": None if default is None else default.id,
        "macro": None if default is None else described[default.id]["macro"], "untrained": first,
        "greedy_check": greedy_check, "skipped": skipped, "definitions": DEFINITIONS, "seed": seed,
    }
