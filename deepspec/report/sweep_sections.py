"""The paper's table and figures out of a sweep: what its jobs measured, seeds put together."""

from collections import defaultdict
from typing import Any, Callable, Mapping, Optional, Sequence

from deepspec.evaluation.metrics import AcceptanceCounts, conditional_acceptance
from deepspec.evaluation.repeated import Estimate
from deepspec.report.columns import columns
from deepspec.report.confidence import reliability, thresholds
from deepspec.report.inputs import RunFiles, is_number
from deepspec.report.page import Section, figure, figures, table
from deepspec.report.pairs import KINDS
from deepspec.report.repeats import DRAFTER, Comparison, Contrast, Group, Measured, Options, Row, measured, number
from deepspec.report.svg import Row as ChartRow, Series, line_chart, row_chart

_CURVES = 6  # lines of one chart a reader can tell apart
_TOKENS = "tokens per round"


def estimate(found: Optional[Estimate], digits: int = 2, share: bool = False) -> Optional[str]:
    """``2.31 (2.25 to 2.37)``, or as per cent with signs; None for an unknown one."""
    if found is None:
        return None
    form: Callable[[float], str] = (lambda value: f"{value:+.1%}") if share else (lambda value: f"{value:.{digits}f}")
    return form(found.value) + ("" if found.interval is None else " ({} to {})".format(*map(form, found.interval)))


def comparison_table(found: Comparison) -> str:
    """Table 1: acceptance by domain, macro mean, latencies and speed by Eq. 1."""
    domains = list(found.rows[0].domains) if found.rows else []
    rows = [[row.label, *(estimate(row.domains[name]) for name in domains), estimate(row.macro),
             None if row.macro is None else row.macro.trainings, row.draft_ms, row.verify_ms, estimate(row.speedup)]
            for row in found.rows]
    header = ["drafter", *domains, "macro", "trainings", "draft ms", "verify ms", "speed-up (Eq. 1)"]
    note = (f"{_TOKENS.capitalize()}, bonus included, temperature {found.temperature:g}, "
            f"{KINDS.get(found.estimator, found.estimator)}; 95 % intervals over prompts and training seeds. Macro: "
            "mean over benchmarks. Latencies: one request, median of the profiles' cells; speed-up: over the target "
            "alone by (T_draft + T_verify) / tau.")
    return table(header, rows, note)


def contrast_table(found: Comparison) -> str:
    """Relative gains; "" without a pair."""
    if not found.contrasts:
        return ""
    domains = list(found.contrasts[0].domains)
    rows = [[f"{one.first} over {one.second}", *(estimate(one.domains[name], share=True) for name in domains),
             estimate(one.macro, share=True), estimate(one.speed, share=True)] for one in found.contrasts]
    note = ("More tokens per round, and more tokens per second by Eq. 1, "
            f"{KINDS.get(found.estimator, found.estimator)}. 95 % intervals: prompts drawn the same for both, "
            "trainings as independent.")
    return table(["gain", *domains, "macro", "speed (Eq. 1)"], rows, note)


def _series(name: str, places: Sequence[float], found: Sequence[Optional[Estimate]], scale: float = 1.0) -> Series:
    bounds = [None if one is None else one.interval for one in found]
    return Series(name, places, [None if one is None else scale * one.value for one in found],
                  [None if one is None else scale * one[0] for one in bounds],
                  [None if one is None else scale * one[1] for one in bounds])


def _panels(domains: Sequence[str]) -> list[Optional[str]]:
    return [*domains, None] if len(domains) > 1 else list(domains)


def _value(one: Row | Contrast, domain: Optional[str]) -> Optional[Estimate]:
    return one.macro if domain is None else one.domains.get(domain)


def _keys(groups: Sequence[Group]) -> list[str]:
    """Swept options with more than one value, the drafter's name aside."""
    values: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for key, value in group.options:
            values[key].add(value)
    return sorted(key for key, found in values.items() if len(found) > 1 and key != DRAFTER)


def _without(options: Mapping[str, str], key: str) -> Options:
    return tuple(sorted((name, value) for name, value in options.items() if name != key))


def _lines(rows: Sequence[Any], key: str) -> dict[Options, list[Any]]:
    """Rows by the options that a line of a figure has in common."""
    found: dict[Options, list[Any]] = defaultdict(list)
    for row in rows:
        if key in row.options:
            found[_without(row.options, key)].append(row)
    return dict(found)


def _line_name(options: Options, fallback: str) -> str:
    return ", ".join(value if key == DRAFTER else f"{key.rpartition('.')[2]} {value}" for key, value in options
                     ) or fallback


def by_option(found: Comparison, key: str) -> list[str]:
    """Acceptance against the values of ``key``, a panel per domain (Figs. 3 and 4): lines where they are numbers."""
    charts = []
    lines = _lines(found.rows, key)
    values = list(dict.fromkeys(row.options[key] for rows in lines.values() for row in rows))
    leaf = key.rpartition(".")[2].replace("_", " ")
    for domain in _panels(list(found.rows[0].domains)):
        title = f"{domain or 'macro mean'}: {_TOKENS} by {leaf}"
        if all(number(value) is not None for value in values):
            series = [_series(_line_name(name, found.rows[0].algorithm), [number(row.options[key]) or 0.0
                                                                          for row in rows],
                              [_value(row, domain) for row in rows]) for name, rows in lines.items()]
            charts.append(figure(line_chart(series, x_label=leaf, y_label=_TOKENS, description=title), f"{title}."))
            continue
        by_value = [{row.options[key]: _value(row, domain) for row in rows} for rows in lines.values()]
        bars = [ChartRow(value, [None if (one := by.get(value)) is None else one.value for by in by_value],
                         [None if (one := by.get(value)) is None else one.interval for by in by_value])
                for value in values]
        names = [_line_name(name, found.rows[0].algorithm) for name in lines]
        charts.append(figure(row_chart(bars, names, x_label=_TOKENS, bars=False, start=1.0, description=title),
                             f"{title}."))
    return charts


def gain_by_option(found: Comparison, key: str) -> str:
    """Gain over each other drafter against the values of ``key``, a line per domain (Fig. 4); "" without numbers."""
    charts = []
    for second in dict.fromkeys(_opponent(one, key) for one in found.contrasts if key in one.options):
        own = [one for one in found.contrasts if key in one.options and _opponent(one, key) == second]
        places = [number(one.options[key]) for one in own]
        if len(own) < 2 or None in places:
            continue
        series = [_series(domain or "macro", [place or 0.0 for place in places],
                          [_value(one, domain) for one in own], 100.0)
                  for domain in _panels(list(own[0].domains))]
        leaf = key.rpartition(".")[2].replace("_", " ")
        title = f"More {_TOKENS} than {second}, by {leaf}"
        charts.append(figure(line_chart(series, x_label=leaf, y_label="gain, %", description=title), f"{title}."))
    return "".join(charts)


def _opponent(one: Contrast, key: str) -> str:
    value = one.options.get(key)
    return ", ".join(part for part in one.second.split(", ") if part != f"{key.rpartition('.')[2]} {value}")


def _pooled(found: Measured, place: int, domain: str) -> list[Optional[float]]:
    """Conditional acceptance [K] of one group, trainings pooled."""
    parts = [one[name] for one in found.counts[place] for name in found.domains[domain]]
    return conditional_acceptance(AcceptanceCounts.concatenate(parts))


def by_position(groups: Sequence[Group], found: Measured) -> list[str]:
    """Conditional acceptance by draft position, a panel per domain and a line per drafter (Fig. 2)."""
    charts = []
    for domain in found.domains:
        series = []
        for place, group in enumerate(groups[:_CURVES]):
            values = _pooled(found, place, domain)
            series.append(Series(group.label, range(1, len(values) + 1), values))
        title = f"{domain}: accepted, given that all before it were"
        charts.append(figure(line_chart(series, x_label="draft position", y_label="conditional acceptance",
                                        y_limits=(0.0, 1.0), description=title), f"{title}."))
    return charts


def head_cost(groups: Sequence[Group]) -> str:
    """Share of a round that drafting takes against the load (Fig. 4), a line per drafter; "" without profiles."""
    series = []
    for group in groups[:_CURVES]:
        shares: dict[int, list[float]] = defaultdict(list)
        for files in group.runs:
            length: Any = files.evaluation.get("draft_length")
            for cell in files.cells:
                if all(is_number(cell.get(name)) for name in ("num_reqs", "draft_ms", "verify_ms", "host_ms")) \
                        and is_number(length) and cell.get("verify_tokens") == length + 1:
                    whole = cell["draft_ms"] + cell["verify_ms"] + cell["host_ms"]
                    shares[cell["num_reqs"]].append(100.0 * cell["draft_ms"] / whole)
        places = sorted(shares)
        series.append(Series(group.label, places, [sum(shares[at]) / len(shares[at]) for at in places]))
    if not any(one.x for one in series):
        return ""
    title = "Share of a round that drafting takes, whole blocks verified"
    return figure(line_chart(series, x_label="requests in a batch", y_label="% of the round", x_log=True,
                             y_limits=(0.0, 10.0), description=title), f"{title}; difference of two drafters: the cost "
                  "of what one has more than the other.")


def sweep_sections(groups: Sequence[Group], found: Sequence[Comparison], best: Optional[RunFiles]) -> list[Section]:
    """Sections of a sweep's page, from the numbers of its ``groups``; ``best`` is the run whose confidence is shown
    (Figs. 5 and 6)."""
    sections = []
    if found:
        lead = ("Trainings that differ in their seed alone are one drafter. An interval speaks of other prompts and "
                "other seeds; with few seeds it is wide because their spread is hardly known. Gains are paired: every "
                "drafter answered the same prompts.")
        body = "".join(comparison_table(one) + contrast_table(one) for one in found)
        sections.append(Section("drafters", "Drafters compared", lead, body))
        first = found[0]
        if len(groups) > 1:
            sections.append(Section(
                "by-position", "Acceptance by position", "As Fig. 2 of the paper: a good drafter starts high and stays "
                "flat along the block. Trainings are pooled, positions never reached left out.",
                figures(*by_position(groups, measured(groups)[0]), head_cost(groups))))
        for key in _keys(groups):
            sections.append(Section(
                f"by-{key.replace('.', '-')}", f"By {key}", "Acceptance by the swept option with 95 % intervals over "
                "prompts and seeds, a panel per domain, and the gain over other drafters at the same value.",
                figures(*by_option(first, key), gain_by_option(first, key))))
    if best is not None:
        sections += [thresholds(best), reliability(best)]
    return sections


def comparison_lines(found: Sequence[Comparison]) -> list[str]:
    """The tables as text, for a terminal."""
    lines = []
    for one in found:
        way = f"{KINDS.get(one.estimator, one.estimator)}, T={one.temperature:g}"
        names = [*one.rows[0].domains, "macro"]
        rows = [[way, *names, "speed-up (Eq. 1)"]]
        rows += [[row.label, *(estimate(value) or "-" for value in (*row.domains.values(), row.macro)),
                  estimate(row.speedup) or "-"] for row in one.rows]
        rows += [[f"{pair.first} over {pair.second}",
                  *(estimate(value, share=True) or "-" for value in (*pair.domains.values(), pair.macro, pair.speed))]
                 for pair in one.contrasts]
        lines += columns(rows, left=1).splitlines()
    return lines
