"""Acceptance that was counted beside acceptance that was computed, and how many tokens rounds accepted."""

from typing import Any

from deepspec.report.inputs import Setting, interval, is_number, settings
from deepspec.report.page import figure, table
from deepspec.report.pairs import KINDS
from deepspec.report.svg import Row, row_chart


def accepted_histogram(setting: Setting) -> str:
    """Share of the rounds that accepted 0, 1, .. K draft tokens, over all benchmarks."""
    found = [values.get("accepted_histogram") for values in setting.group("benchmarks").values()]
    counts = [one for one in found if isinstance(one, list) and one and all(map(is_number, one))]
    length = max(map(len, counts), default=0)
    total = sum(map(sum, counts))
    if not total:
        return ""
    shares = [sum(one[k] for one in counts if k < len(one)) / total for k in range(length)]
    chart = row_chart([Row(str(k), [share]) for k, share in enumerate(shares)], ["share"], x_label="share of rounds",
                      bars=True, description="Share of rounds by number of accepted draft tokens")
    return figure(chart, "Draft tokens that a round accepted, all benchmarks together.")


def computed_table(evaluation: dict[str, Any]) -> str:
    """One row per way of measuring, where there is more than counting."""
    found = [one for one in settings(evaluation) if not one.untrained and one.decoding == "fixed"]
    if all(one.estimator == "sampled" for one in found):
        return ""
    found.sort(key=lambda one: (str(one.temperature), str(one.values.get("thinking")), list(KINDS).index(one.estimator)
                                if one.estimator in KINDS else len(KINDS)))
    rows = []
    for one in found:
        low, high = interval(one.macro) or (None, None)
        anchors: list[Any] = [values.get("anchors") for values in one.group("benchmarks").values()]
        counted = [value for value in anchors if is_number(value)]
        rows.append([one.name, KINDS.get(one.estimator, one.estimator), one.macro.get("acceptance_length"), low, high,
                     sum(counted) if counted else None])
    note = ("Macro means. Counted: real decoding. Computed along the target's answers: what decoding would accept on "
            "average given the text, with rounds beginning where decoding would begin them; it estimates the same "
            "number. At fixed anchors: one round from evenly drawn places, which is more than decoding gets, since its "
            "rounds begin more often where text is hard to guess; good for comparing drafters, not for speed.")
    return "<h3>Counted and computed</h3>" + table(
        ["setting", "how", "tokens / round", "95 % from", "to", "anchors"], rows, note)
