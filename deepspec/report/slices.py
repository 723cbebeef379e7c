"""Acceptance by context length and by reasoning, of the setting that acceptance is quoted from."""

from deepspec.report.inputs import Setting, interval
from deepspec.report.page import table

_TITLES = {"by_context_length": ("By context length", "tokens before"), "by_thinking": ("By reasoning", "reasoning")}


def slice_tables(setting: Setting) -> str:
    """One table for each way of telling rounds apart, where there is more than one value of it."""
    found = ""
    for kind, (title, column) in _TITLES.items():
        values = setting.group(kind)
        if len(values) < 2:
            continue
        rows = []
        for name, one in values.items():
            low, high = interval(one) or (None, None)
            first = (one.get("conditional_acceptance") or [None])[0]
            rows.append([name, one.get("num_prompts"), one.get("rounds"), one.get("acceptance_length"), low, high,
                         first])
        note = "All benchmarks together; a round counts where it begins." if kind == "by_context_length" else ""
        found += f"<h3>{title}</h3>" + table(
            [column, "prompts", "rounds", "tokens / round", "95 % from", "to", "first position"], rows, note)
    return found
