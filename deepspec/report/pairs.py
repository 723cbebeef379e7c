"""Pairs of runs on the same prompts: which difference is real, and how far computing beats counting."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

from deepspec.evaluation.paired import Comparison, compare
from deepspec.evaluation.values import SettingValues, paired_counts
from deepspec.report.inputs import RunFiles, Setting, is_number, settings
from deepspec.report.page import table
from deepspec.report.svg import number

KINDS = {"sampled": "counted", "analytic": "computed along the target's answers",
         "drafted": "computed along drafts, at fixed anchors", "teacher_forced": "computed along held-out responses"}


@dataclass(frozen=True)
class Pair:
    """The first run minus another under the same conditions."""

    first: str
    second: str
    estimator: str
    temperature: Any
    thinking: Any
    result: Comparison
    macro_gain: Optional[float]  # of mean acceptance lengths over benchmarks, as a share

    @property
    def width(self) -> float:
        """Of the 95 % interval, tokens per round."""
        return self.result.interval[1] - self.result.interval[0]


def _conditions(setting: Setting) -> tuple[Any, ...]:
    return setting.estimator, setting.temperature, str(setting.values.get("thinking"))


def full_settings(files: RunFiles) -> dict[tuple[Any, ...], Setting]:
    """Settings with every draft token verified, by what must be equal in a pair; of several batch sizes the first."""
    found: dict[tuple[Any, ...], Setting] = {}
    for one in settings(files.evaluation):
        if one.decoding == "fixed" and not one.untrained and one.name in files.values:
            found.setdefault(_conditions(one), one)
    return found


def _gain(first: Setting, second: Setting) -> Optional[float]:
    values: list[Any] = [one.macro.get("acceptance_length") for one in (first, second)]
    same = set(first.group("benchmarks")) == set(second.group("benchmarks"))
    return values[0] / values[1] - 1.0 if same and all(map(is_number, values)) else None


def _compared(first: SettingValues, second: SettingValues, seed: int) -> Optional[Comparison]:
    pair = paired_counts(first, second)
    return None if pair is None else compare(*pair, seed=seed)


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the runs, those of their folders where two have one name."""
    names = [one.name for one in runs]
    return [one.directory.resolve().name if names.count(one.name) > 1 else one.name for one in runs]


def pairs(runs: Sequence[RunFiles], seed: int = 0) -> list[Pair]:
    """The first run against each other one, wherever both were evaluated on the same prompts in the same way."""
    found = []
    labels = _labels(runs)
    own = full_settings(runs[0]) if runs else {}
    for other, label in zip(runs[1:], labels[1:]):
        theirs = full_settings(other)
        for key in sorted(set(own) & set(theirs), key=str):
            one, two = own[key], theirs[key]
            result = _compared(runs[0].values[one.name], other.values[two.name], seed)
            if result is not None:
                found.append(Pair(labels[0], label, one.estimator, one.temperature, one.values.get("thinking"),
                                  result, _gain(one, two)))
    return found


def sharpness(found: Sequence[Pair]) -> list[str]:
    """Sentences: how much narrower intervals are where acceptance was computed along answers instead of counted."""
    counted = {(one.second, one.temperature, str(one.thinking)): one.width for one in found
               if one.estimator == "sampled"}
    sentences = []
    for one in found:
        wide = counted.get((one.second, one.temperature, str(one.thinking)))
        if one.estimator == "analytic" and wide and one.width > 0:
            sentences.append(f"Against {one.second} at temperature {one.temperature:g}, the interval of the computed "
                             f"difference is {number(wide / one.width, 2)} times narrower than that of the counted one "
                             f"on the same {one.result.prompts} prompts.")
    return sentences


def _row(one: Pair) -> list[Any]:
    result = one.result
    return [f"{one.first} \N{MINUS SIGN} {one.second}", KINDS.get(one.estimator, one.estimator), one.temperature,
            result.prompts, f"{result.effect:+.3f}", f"{result.interval[0]:+.3f} to {result.interval[1]:+.3f}",
            f"{result.ratio - 1:+.1%}", "\N{EN DASH}" if one.macro_gain is None else f"{one.macro_gain:+.1%}",
            number(result.p_value, 2), "\N{EN DASH}" if result.standardised is None else f"{result.standardised:+.2f}"]


def pair_lines(found: Sequence[Pair]) -> list[str]:
    """The same as text, for a terminal."""
    lines = [f"{one.first} minus {one.second}, T={one.temperature:g}, {KINDS.get(one.estimator, one.estimator)}: "
             f"{one.result.effect:+.3f} tokens per round [{one.result.interval[0]:+.3f}, {one.result.interval[1]:+.3f}]"
             f", {one.result.ratio - 1:+.1%}, p = {number(one.result.p_value, 2)}, {one.result.prompts} prompts"
             for one in found]
    return lines + sharpness(found)


def pair_table(found: Sequence[Pair]) -> str:
    """HTML of all pairs; "" without one."""
    if not found:
        return ""
    header = ["pair", "how", "T", "prompts", "tokens / round", "95 %", "gain", "gain of macro means", "p", "effect"]
    note = ("Paired over prompts (conversations): 95 % bootstrap with the same draws for both, p from flipping the "
            "signs of the prompts' shares, effect = mean share / standard deviation. Macro means: over benchmarks. "
            + " ".join(sharpness(found)))
    return "<h3>Differences on the same prompts</h3>" + table(header, [_row(one) for one in found], note)
