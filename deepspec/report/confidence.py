"""Sections on whether the confidence means what it says, and what a threshold on it would do."""

from html import escape
from typing import Any, Callable, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from deepspec.calibration import (
    Calibration, ConfidenceRecords, reliability_curve, sigmoid, split_conversations, survival_probability,
)
from deepspec.calibration.thresholds import best_threshold, threshold_sweep
from deepspec.report.inputs import RunFiles, is_number
from deepspec.report.page import Section, figure, figures, missing, table
from deepspec.report.svg import Series, line_chart, number

_CURVES = 5  # lines of one chart a reader can tell apart
_FORMS = {"raw": "as trained", "sts": "temperatures", "folded": "folded into the head",
          "folded_sts": "folded, with temperatures", "platt": "Platt", "beta": "beta", "isotonic": "isotonic"}


def report_split(records: ConfidenceRecords, calibration: Calibration) -> ConfidenceRecords:
    """The blocks that the calibration was measured on."""
    part = split_conversations(records.conversation, records.domain, refit_fraction=calibration.refit_fraction,
                               fit_fraction=calibration.fit_fraction)
    return records.select(part == "report")


def reliability_chart(report: ConfidenceRecords, calibration: Calibration, position: int) -> str:
    """SVG of Fig. 6 for the survival through one position (0-based), before and after temperature scaling."""
    known = report.known[:, position]
    forms = {"before": sigmoid(report.logits),
             "after": sigmoid(report.logits / np.asarray(calibration.temperatures))}
    series = []
    for name, confidence in forms.items():
        survival = survival_probability(confidence)[known, position]
        mean, outcome, count = reliability_curve(survival, report.survived[known, position], calibration.num_bins)
        used = count >= max(5, 0.002 * known.sum())  # a bin of three blocks is noise, not a deviation
        series.append(Series(name, mean[used].tolist(), outcome[used].tolist()))
    return line_chart(series, x_label="predicted survival", y_label="observed", y_limits=(0.0, 1.0),
                      x_limits=(0.0, 1.0), diagonal=True,
                      description=f"Reliability through position {position + 1} before and after temperature scaling")


def _reliability_figures(report: ConfidenceRecords, calibration: Calibration) -> str:
    parts = []
    for k in range(calibration.block_size):
        before, after, floor = (number(values[k], 2) for values in (
            calibration.ece_before, calibration.ece_after, calibration.ece_noise_floor))
        parts.append(figure(reliability_chart(report, calibration, k),
                            f"Survival through position {k + 1}: ECE {before} before, {after} after, noise floor "
                            f"{floor}."))
    length = len(parts)
    shown = sorted({0, length // 2, length - 1})
    rest = [part for k, part in enumerate(parts) if k not in shown]
    more = f"<details><summary>All other positions</summary>{figures(*rest)}</details>" if rest else ""
    return figures(*(parts[k] for k in shown)) + more


def _heads(summary: dict[str, Any]) -> str:
    """The jointly trained and the refitted confidence head side by side."""
    heads = [(label, summary.get(key)) for label, key in (("jointly trained", "joint"), ("refitted", "refit"))]
    rows: list[list[Any]] = []
    for label, values in heads:
        if not isinstance(values, dict):
            continue
        means = []
        for name in ("auc", "brier", "ece", "ece_scaled"):
            present = [value for value in values.get(name) or [] if value is not None]
            means.append(float(np.mean(present)) if present else None)
        rows.append([label, *means])
    if not rows:
        return ""
    compared = summary.get("comparison")
    if isinstance(compared, dict):
        spans = []
        for name in ("auc", "brier", "ece"):
            entry = compared.get(name) or {}
            low_high = entry.get("difference_ci95")
            spans.append(f"{low_high[0]:+.4f} to {low_high[1]:+.4f}" if low_high else None)
        rows.append(["refitted minus jointly trained, 95 %", *spans, None])
    note = (f"Means over positions on conversations neither head was fitted on. Used: {summary.get('chosen')}. Rule: "
            f"{summary.get('rule')}.")
    return "<h3>Confidence head</h3>" + table(["head", "AUC", "Brier", "ECE", "ECE, scaled"], rows, note)


def _forms(calibration: Calibration) -> str:
    """Every form of the confidence, and who can use it."""
    rows = []
    for name, values in calibration.methods.items():
        brier = [value for value in values["brier"] if value is not None]
        floor = [value for value in values["noise_floor"] if value is not None]
        rows.append([_FORMS.get(name, name), values["ece_mean"], float(np.mean(floor)) if floor else None,
                     float(np.mean(brier)) if brier else None, values["engines"]])
    if not rows:
        return ""
    found, fold = calibration.excess, calibration.fold
    note = (f"Means over positions on the same blocks. Folded: temperature {fold['temperature']:.3f} and shift "
            f"{fold['shift']:+.3f} for all positions in the head's own weights. ")
    if found and found.get("before_ci95"):
        (low, high), (least, most) = found["before_ci95"], found["after_ci95"]
        note += (f"ECE above the noise floor: {found['before']:.4f} ({low:.4f} to {high:.4f}) as trained, "
                 f"{found['after']:.4f} ({least:.4f} to {most:.4f}) with temperatures (95 % intervals).")
    return "<h3>Forms of the confidence</h3>" + table(
        ["form", "ECE", "noise floor", "Brier", "usable by"], rows, note)


def _domains(calibration: Calibration) -> str:
    rows = []
    for name, one in calibration.per_domain.items():
        columns = (one["ece_before"], one["ece_pooled"], one.get("ece_own") or [], one["ece_noise_floor"])
        means = [[value for value in values if value is not None] for values in columns]
        rows.append([name, one["blocks"], *(float(np.mean(values)) if values else None for values in means),
                     one.get("note", "")])
    if not rows:
        return ""
    return "<h3>By domain</h3>" + table(
        ["domain", "blocks", "ECE before", "pooled temperatures", "its own", "noise floor", ""], rows,
        "Means over positions. Temperatures that suit one domain and not another are a sign of mixed traffic.")


def reliability(files: RunFiles) -> Section:
    """Reliability before and after temperature scaling (Fig. 6)."""
    lead = ("Whether the confidence means what it says: of the blocks it gives a 70 % chance to survive, 70 % should. "
            "Points on the dashed diagonal are right, below it the confidence promises too much. The expected "
            "calibration error (ECE) is the mean distance; it should come down to the noise floor, which is what a "
            "perfect confidence would show on as many blocks.")
    title, calibration = "Confidence", files.calibration
    if calibration is None:
        body = missing("There is no calibration of this run yet.", files.command("calibrate"))
        if files.option("drafter", "confidence_head") is False:
            body = "<p>This drafter has no confidence head, so there is nothing to calibrate.</p>"
        return Section("confidence", title, lead, body + _heads(files.confidence))
    rows = [
        [k + 1, calibration.temperatures[k], calibration.ece_before[k], calibration.ece_after[k],
         calibration.ece_noise_floor[k], calibration.auc[k], calibration.brier_before[k], calibration.brier_after[k]]
        for k in range(calibration.block_size)
    ]
    header = ["position", "temperature", "ECE before", "after", "noise floor", "AUC", "Brier before", "after"]
    note = (f"{calibration.num_samples:,} blocks of {calibration.report_split.get('conversations')} conversations that "
            f"the fit never saw. {calibration.verdict}")
    charts = missing("The records behind the reliability diagram are not there.", files.command("confidence"))
    if _own_records(files) is not None:
        charts = _reliability_figures(report_split(files.records, calibration), calibration)  # type: ignore[arg-type]
    elif calibration.source != "deepspec":
        charts = (f'<p class="missing">Made from records of {escape(calibration.source)}, which this page does not '
                  "have: no diagram.</p>")
    remark, empty = "", ", ".join(map(str, calibration.positions_without_data))
    if empty:
        remark = (f"<p>Fewer than {calibration.min_samples} blocks survived to position {empty}: the temperature there "
                  "is left at 1.</p>")
    return Section("confidence", title, lead, charts + table(header, rows, note) + remark + _forms(calibration)
                   + _domains(calibration) + _heads(files.confidence))


def _own_records(files: RunFiles) -> Optional[ConfidenceRecords]:
    """The run's records where the calibration was made of them."""
    calibration = files.calibration
    if calibration is None or files.records is None or calibration.source != "deepspec":
        return None
    return files.records if files.records.origin.block_length == calibration.block_size else None


def _round_seconds(cells: Sequence[dict[str, Any]], requests: int) -> Callable[[float], float]:
    """Seconds of a round of so many requests by draft tokens verified per request, between measured cells."""
    points = sorted((cell["verify_tokens"] - 1, cell["p50_ms"] / 1e3) for cell in cells
                    if cell["num_reqs"] == requests)
    lengths, seconds = zip(*dict(points).items())
    return lambda verified: float(np.interp(verified, lengths, seconds))


def threshold_charts(report: ConfidenceRecords, confidence: NDArray[np.float64],
                     cells: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Figures of acceptance and predicted speed against the threshold (Fig. 5), and the best threshold per load."""
    domains = {"all": report.domain == report.domain}
    domains |= {name: report.domain == name for name in sorted(set(report.domain.tolist()))[:_CURVES - 1]}
    series = []
    for name, mask in domains.items() if len(domains) > 2 else list(domains.items())[:1]:
        rows = threshold_sweep(report.select(mask), confidence[mask])
        series.append(Series(name, [row["threshold"] or 0.0 for row in rows],
                             [row["acceptance_rate"] for row in rows], points=False))
    charts = [figure(line_chart(series, x_label="threshold on predicted survival", y_label="accepted of sent",
                                y_limits=(0.0, 1.0), x_limits=(0.0, 1.0),
                                description="Acceptance rate against the confidence threshold, per domain"),
                     "Share of the draft tokens sent to the target that it accepts, when a block stops at the first "
                     "prefix below the threshold.")]
    sweep, loads = threshold_sweep(report, confidence), sorted({cell["num_reqs"] for cell in cells})
    speeds, best = [], []
    for requests in sorted({loads[0], loads[len(loads) // 2], loads[-1]}) if loads and sweep else ():
        seconds = _round_seconds(cells, requests)
        rates = [requests * (row["tokens"] or 0.0) / seconds(row["verified"] or 0.0) for row in sweep]
        speeds.append(Series(f"{requests} request{'s' * (requests > 1)}", [row["threshold"] or 0.0 for row in sweep],
                             [rate / rates[0] for rate in rates], points=False))
        top = best_threshold(sweep, seconds)
        if top is not None:
            best.append([requests, top["threshold"], top["verified"], top["acceptance_rate"],
                         requests * top["tokens_per_second"], rates[0]])
    if speeds:
        charts.append(figure(line_chart(speeds, x_label="threshold on predicted survival", y_label="speed, full = 1",
                                        x_limits=(0.0, 1.0),
                                        description="Predicted tokens per second against the threshold"),
                             "Tokens per second that the measured profile predicts, relative to verifying every draft "
                             "token (threshold 0)."))
    return charts, best


def thresholds(files: RunFiles) -> Section:
    """Acceptance and speed against a confidence threshold (Fig. 5)."""
    lead = ("What would happen if a block stopped where its predicted survival falls below a threshold: fewer tokens "
            "are verified and more of them are accepted. Computed from recorded full drafts, so nothing is decoded "
            "again. A scheduler does better than any single threshold, since it weighs all requests at their load.")
    title, records, calibration = "Confidence threshold", _own_records(files), files.calibration
    if records is None or calibration is None:
        return Section("thresholds", title, lead, missing("This needs the run's confidence records and a calibration.",
                                                          files.command("confidence")))
    report = report_split(records, calibration)
    cells = [cell for cell in files.cells
             if all(is_number(cell.get(name)) for name in ("num_reqs", "verify_tokens", "p50_ms"))]
    charts, best = threshold_charts(report, calibration.apply(report.logits), cells)
    header = ["requests", "best threshold", "verified / block", "accepted of sent", "tokens / s", "at threshold 0"]
    body = figures(*charts) + (table(header, best, "Predicted from the profile; measured speed is in its own section.")
                               if best else missing("There is no throughput profile to predict speed with.",
                                                    files.command("profile")))
    return Section("thresholds", title, lead, body)
