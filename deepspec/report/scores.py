"""Whether answers stay as good: task scores of the target alone and of decoding with the drafter."""

from typing import Any, Optional

from deepspec.report.inputs import Setting, is_number, settings
from deepspec.report.page import table


def _span(values: dict[str, Any], key: str, signs: bool) -> Optional[str]:
    found = values.get(key)
    if not isinstance(found, list) or len(found) != 2 or not all(map(is_number, found)):
        return None
    return " to ".join(f"{value:+.1%}" if signs else f"{value:.1%}" for value in found)


def _row(setting: Setting, name: str, score: dict[str, Any]) -> list[Any]:
    verdict = score.get("within_noise")
    return [setting.name, name, score.get("prompts"), f"{score['score']:.1%}", _span(score, "score_ci95", False),
            f"{score['difference']:+.1%}" if is_number(score.get("difference")) else None,
            _span(score, "difference_ci95", True), score.get("gained"), score.get("lost"), score.get("p_value"),
            None if verdict is None else "yes" if verdict else "no"]


def score_table(evaluation: dict[str, Any]) -> str:
    """HTML of all scores; "" where no prompt had a task."""
    rows = []
    for setting in settings(evaluation):
        groups = [*setting.group("benchmarks").items(), ("all", setting.macro)]
        if len(groups) == 2:
            groups.pop()
        for name, values in groups:
            score = values.get("task_score")
            if isinstance(score, dict) and is_number(score.get("score")):
                rows.append(_row(setting, name, score))
    if not rows:
        return ""
    header = ["setting", "benchmark", "tasks", "solved", "95 %", "minus target alone", "95 % of it",
              "solved only with the drafter", "only without", "p", "within noise"]
    note = ("Share of tasks solved. Lossless decoding changes no distribution: above temperature 0 single answers "
            "differ, their score may not. Intervals: Wilson, and for the difference matched pairs (Agresti and Min); p "
            "exact on the tasks where the two differ.")
    return "<h3>Task scores</h3>" + table(header, rows, note)
