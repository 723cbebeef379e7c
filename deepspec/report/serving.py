"""Simulated serving: speed of the engine against speed of a user (Fig. 7), both against load (Fig. 8), and advice."""

from typing import Any, Optional, Sequence

from deepspec.report.inputs import RunFiles, is_number
from deepspec.report.page import Section, figure, figures, missing, table
from deepspec.report.svg import Series, line_chart

_LEAD = ("What an engine with this drafter would do under load, simulated from the measured profile and the recorded "
         "acceptance. Good is a curve of the schedule that lies on or above all others everywhere: more throughput at "
         "the same speed per user.")
_NUMBERS = ("tokens_per_second", "tokens_per_second_per_user", "verify_budget")


def _rows(values: Any, required: Sequence[str]) -> list[dict[str, Any]]:
    rows = values if isinstance(values, list) else []
    return [row for row in rows if isinstance(row, dict) and all(is_number(row.get(name)) for name in required)]


def _label(point: dict[str, Any]) -> str:
    if not point.get("drafter"):
        return "no speculation"
    return f"{point['drafter']}, {point.get('policy')}"


def _lines(points: Sequence[dict[str, Any]], x: str, y: str) -> list[Series]:
    """One line per drafter and way of decoding, in the order of load."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        groups.setdefault(_label(point), []).append(point)
    return [Series(name, [point[x] for point in group], [point[y] for point in group])
            for name, group in groups.items()]


def _advice(found: Any) -> str:
    rows = []
    for item in _rows(found, ("concurrency",)):
        settings = item.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        text = ", ".join(f"{name}={value}" for name, value in settings.items() if name not in ("run", "algorithm"))
        rows.append([item["concurrency"], str(settings.get("run") or "none"), _number(item.get("layers")), text,
                     str(item.get("reason") or "")])
    if not rows:
        return ""
    return table(["users", "drafter", "layers", "settings", "why"], rows,
                 "Recommended for each load; choices within 2 % count as equal, the simpler one is taken.")


def _number(value: Any) -> Optional[int]:
    return value if isinstance(value, int) else None


def serving(files: RunFiles) -> Section:
    """Figures and recommendations of ``simulation.json``."""
    values = files.simulation
    points = _rows(values.get("points"), _NUMBERS)
    closed = [point for point in points if is_number(point.get("concurrency"))]
    if not points:
        return Section("serving", "Simulated serving", _LEAD, missing("Serving has not been simulated yet.",
                                                                      files.command("simulate")))
    trade = line_chart(_lines(closed or points, "tokens_per_second_per_user", "tokens_per_second"),
                       x_label="tokens per second and user", y_label="tokens per second", y_limits=(0.0, 0.0),
                       description="Throughput by speed per user, one line per drafter and way of decoding")
    load = line_chart(_lines(closed, "concurrency", "tokens_per_second"), x_label="users", y_label="tokens per second",
                      x_log=True, y_limits=(0.0, 0.0), description="Throughput by number of users")
    budget = line_chart(_lines([point for point in closed if point.get("drafter")], "concurrency", "verify_budget"),
                        x_label="users", y_label="tokens per request and step", x_log=True, y_limits=(1.0, 1.0),
                        description="Mean verification budget by number of users")
    arrivals = [point for point in points if is_number(point.get("arrival_rate"))]
    open_load = line_chart(_lines(arrivals, "arrival_rate", "tokens_per_second_per_user"),
                           x_label="requests per second", y_label="tokens per second and user", y_limits=(0.0, 0.0),
                           description="Speed per user by arrival rate")
    drafters = [[str(row.get("name")), str(row.get("algorithm") or "unknown"), _number(row.get("layers")),
                 _number(row.get("draft_length")), row["acceptance_length"], _number(row.get("blocks"))]
                for row in _rows(values.get("drafters"), ("acceptance_length",))]
    doubtful = any(point.get("extrapolated") for point in points)
    return Section("serving", "Simulated serving", _LEAD, figures(
        figure(trade, "Throughput against speed per user; each line runs from few users (right) to many (left)."),
        figure(load, "Throughput by load."),
        figure(budget, "Tokens verified per request and step, its own last token included: the schedule verifies less "
                       "as load grows."),
        figure(open_load, "Speed per user when requests arrive at random."),
    ) + _advice(values.get("recommendations"))
        + table(["drafter", "algorithm", "layers", "draft tokens", "tokens / round", "recorded blocks"], drafters,
                f"Priced by a profile of {values.get('hardware') or 'unknown hardware'}."
                + (" Some points have more requests in flight than were profiled: their costs are extrapolated."
                   if doubtful else "")))
