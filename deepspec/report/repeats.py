"""The numbers of a sweep as the paper's tables have them: trainings that differ in their seed alone are one drafter.

Acceptance by domain and macro (mean over benchmarks), speed by Eq. 1 with the latencies of the runs' own profiles, and
gains of one drafter over another on the same prompts; intervals speak of other prompts and of other seeds.
"""

import logging
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Mapping, Optional, Sequence

from deepspec.evaluation.metrics import AcceptanceCounts, latency_per_token
from deepspec.evaluation.repeated import Estimate, Trainings, acceptance_lengths, gain, mean, shared_prompts
from deepspec.report.inputs import RunFiles, Setting, is_number
from deepspec.report.pairs import full_settings

log = logging.getLogger(__name__)
SEED, DRAFTER, DEPTH = "trainer.seed", "drafter", "drafter.num_layers"
REFERENCE = "dspark"
RESAMPLES = 2000
Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Group:
    """Trainings whose options differ in the seed alone."""

    options: Options  # swept ones, without the seed
    runs: tuple[RunFiles, ...]

    @property
    def label(self) -> str:
        """Name in tables and legends."""
        return ", ".join(value if key == DRAFTER else f"{key.rpartition('.')[2]} {value}"
                         for key, value in self.options) or self.runs[0].name

    @property
    def algorithm(self) -> str:
        """dspark, dflash, .."""
        return str(self.runs[0].option("drafter", "algorithm") or dict(self.options).get(DRAFTER, ""))

    @property
    def rest(self) -> Options:
        """What other drafters have to share to be compared with this one."""
        return tuple(item for item in self.options if item[0] != DRAFTER)


def grouped(jobs: Sequence[tuple[Mapping[str, str], RunFiles]]) -> list[Group]:
    """Jobs (their swept options, their files) by everything that differs but the seed, in the order of the options.

    A training that is there twice, under names of two commands, counts once: it says nothing about the spread of seeds.
    """
    values: dict[str, set[str]] = {}
    for options, _ in jobs:
        for name, value in options.items():
            values.setdefault(name, set()).add(value)
    told = {name for name, different in values.items() if name != SEED and (len(different) > 1 or name == DRAFTER)}
    found: dict[Options, dict[str, RunFiles]] = {}
    for options, files in jobs:
        key = tuple(sorted((name, value) for name, value in options.items() if name in told))
        seed = options.get(SEED) or str(files.option("trainer", "seed"))
        first = found.setdefault(key, {}).setdefault(seed, files)
        if first is not files:
            log.warning("%s and %s have the same options and seed of training: only the first counts", first.name,
                        files.name)
    return [Group(key, tuple(files for _, files in sorted(runs.items())))
            for key, runs in sorted(found.items(), key=lambda item: _order(item[0]))]


def _order(options: Options) -> list[tuple[str, bool, float, str]]:
    return [(key, number(value) is None, number(value) or 0.0, value) for key, value in options]


def number(text: str) -> Optional[float]:
    """A swept value as a number, None for one that is none."""
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Measured:
    """What was measured in one way under one set of conditions, of every training of every group."""

    estimator: str
    temperature: float
    domains: dict[str, list[str]]  # benchmarks of each domain
    counts: list[list[dict[str, AcceptanceCounts]]]  # of each group and training, on the same prompts

    def lengths(self, group: int, domain: Optional[str] = None) -> Optional[Trainings]:
        """Acceptance lengths of one group: mean over the benchmarks of ``domain``, or over all."""
        names = [name for own, part in self.domains.items() if domain in (None, own) for name in part]
        return acceptance_lengths(self.counts[group], names, resamples=RESAMPLES)


def measured(groups: Sequence[Group]) -> list[Measured]:
    """Every way of measuring that all trainings have in common; decoded ones first."""
    own = [[full_settings(files) for files in group.runs] for group in groups]
    flat = [one for part in own for one in part]
    if not flat:
        return []
    keys = [key for key in flat[0] if all(key in one for one in flat)]
    found = []
    for key in sorted(keys, key=lambda item: (item[0] != "sampled", str(item))):
        parts = [files.values[one[key].name].counts for group, settings in zip(groups, own)
                 for files, one in zip(group.runs, settings)]
        shared = shared_prompts(parts)
        named = [name for name in shared[0] if len(shared[0][name])]
        if not named:
            continue
        sizes = iter(range(len(shared)))
        counts = [[shared[next(sizes)] for _ in group.runs] for group in groups]
        found.append(Measured(key[0], key[1], _domains(flat[0][key], named), counts))
    return found


def _domains(setting: Setting, benchmarks: Sequence[str]) -> dict[str, list[str]]:
    known = setting.group("benchmarks")
    found: dict[str, list[str]] = {}
    for name in benchmarks:
        found.setdefault(str(known.get(name, {}).get("domain") or name), []).append(name)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Latencies:
    """Milliseconds of a round of one request (Eq. 1), medians of the profiles' cells."""

    draft_ms: list[float]  # of each training, at the pace of all of them
    verify_ms: float  # of the whole block; of all trainings that verify as many tokens: it is the same work
    alone_ms: float  # of a step of the target alone


def _cells(files: RunFiles, verify_tokens: int) -> list[dict[str, Any]]:
    return [cell for cell in files.cells if cell.get("num_reqs") == 1 and cell.get("verify_tokens") == verify_tokens
            and all(is_number(cell.get(name)) for name in ("draft_ms", "verify_ms", "host_ms"))]


def _target_ms(runs: Sequence[RunFiles], verify_tokens: int) -> Optional[float]:
    found = [cell["verify_ms"] + cell["host_ms"] for files in runs for cell in _cells(files, verify_tokens)]
    return median(found) if found else None


def _pace(files: RunFiles, runs: Sequence[RunFiles]) -> float:
    """How long the target's own work took in this profile relative to all of them.

    A machine is faster in one hour than in the next; the target's steps, the same work in every run, tell by how much.
    """
    lengths = {cell["verify_tokens"] for cell in files.cells if is_number(cell.get("verify_tokens"))}
    found = [own / every for tokens in lengths
             if (own := _target_ms([files], tokens)) and (every := _target_ms(runs, tokens))]
    return median(found) if found else 1.0


def _draft_length(files: RunFiles) -> int:
    length: Any = files.evaluation.get("draft_length")
    return int(length) if is_number(length) else 0


def latencies(group: Group, runs: Sequence[RunFiles]) -> Optional[Latencies]:
    """Of ``group``; ``runs`` are all trainings on that machine. None where a profile lacks the cells for it."""
    drafts = [[cell["draft_ms"] for cell in _cells(files, _draft_length(files) + 1)] for files in group.runs]
    verify, alone = _target_ms(runs, _draft_length(group.runs[0]) + 1), _target_ms(runs, 1)
    if not all(drafts) or verify is None or alone is None:
        return None
    return Latencies([median(part) / _pace(files, runs) for files, part in zip(group.runs, drafts)], verify, alone)


def tokens_per_ms(lengths: Trainings, cost: Latencies) -> Trainings:
    """1 / L of every training (Eq. 1)."""
    return lengths.scaled([1.0 / latency_per_token(draft, cost.verify_ms, 1.0) for draft in cost.draft_ms])


@dataclass(frozen=True)
class Row:
    """One drafter: a line of Table 1."""

    label: str
    algorithm: str
    options: dict[str, str]
    domains: dict[str, Optional[Estimate]]
    macro: Optional[Estimate]
    draft_ms: Optional[float] = None
    verify_ms: Optional[float] = None
    speedup: Optional[Estimate] = None  # by Eq. 1, over the target alone


@dataclass(frozen=True)
class Contrast:
    """One drafter over another: gains as shares (0.16 is 16 % more)."""

    first: str
    second: str
    options: dict[str, str]  # what both share
    domains: dict[str, Optional[Estimate]]
    macro: Optional[Estimate]
    speed: Optional[Estimate] = None  # of tokens per second by Eq. 1


@dataclass(frozen=True)
class Comparison:
    """Everything about one way of measuring."""

    estimator: str
    temperature: float
    rows: list[Row] = field(default_factory=list)
    contrasts: list[Contrast] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As comparison.json holds it."""
        return asdict(self)


def _row(found: Measured, place: int, group: Group, cost: Optional[Latencies]) -> Row:
    whole = found.lengths(place)
    domains = {name: None if (part := found.lengths(place, name)) is None else mean(part) for name in found.domains}
    if whole is None or cost is None:
        return Row(group.label, group.algorithm, dict(group.options), domains, None if whole is None else mean(whole))
    faster = tokens_per_ms(whole, cost).scaled([cost.alone_ms] * len(whole.values))
    return Row(group.label, group.algorithm, dict(group.options), domains, mean(whole), median(cost.draft_ms),
               cost.verify_ms, mean(faster))


def opponents(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Which groups to compare: each of the reference drafter's with the others' of the same options, and where depth
    is swept, with the others' deepest (Fig. 3). Without several drafters, each group with the first."""
    algorithms = list(dict.fromkeys(group.algorithm for group in groups))
    if len(algorithms) < 2:
        return [(place, 0) for place in range(1, len(groups))]
    reference = REFERENCE if REFERENCE in algorithms else algorithms[0]
    own = [place for place, group in enumerate(groups) if group.algorithm == reference]
    pairs = []
    for name in algorithms:
        theirs = [place for place, group in enumerate(groups) if group.algorithm == name != reference]
        deepest = max(theirs, key=lambda place: number(dict(groups[place].options).get(DEPTH, "")) or 0.0, default=None)
        for place in own:
            same = [other for other in theirs if groups[other].rest == groups[place].rest]
            if deepest is not None and DEPTH in dict(groups[place].options) and deepest not in same:
                same.append(deepest)
            pairs += [(place, other) for other in same]
    return pairs


def _contrast(found: Measured, groups: Sequence[Group], costs: Sequence[Optional[Latencies]], first: int,
              second: int) -> Contrast:
    def over(domain: Optional[str]) -> Optional[Estimate]:
        one, two = found.lengths(first, domain), found.lengths(second, domain)
        return None if one is None or two is None else gain(one, two)

    speed, wholes = None, [found.lengths(place) for place in (first, second)]
    used = [costs[place] for place in (first, second)]
    if None not in wholes and None not in used:
        speed = gain(*(tokens_per_ms(whole, cost) for whole, cost in zip(wholes, used)))  # type: ignore[arg-type]
    shared = dict(set(groups[first].options) & set(groups[second].options))
    return Contrast(groups[first].label, groups[second].label, shared, {name: over(name) for name in found.domains},
                    over(None), speed)


def compare_groups(groups: Sequence[Group]) -> list[Comparison]:
    """Rows and gains of every way of measuring; decoded ones first, empty where there are no values to compare."""
    runs = [files for group in groups for files in group.runs]
    costs = [latencies(group, runs) for group in groups]
    return [Comparison(found.estimator, found.temperature,
                       [_row(found, place, group, costs[place]) for place, group in enumerate(groups)],
                       [_contrast(found, groups, costs, *pair) for pair in opponents(groups)])
            for found in measured(groups)]
