"""Sections on how good the drafter and its confidence are."""

from html import escape
from typing import Any, Optional

from deepspec.report.estimates import accepted_histogram, computed_table
from deepspec.report.inputs import RunFiles, Setting, interval, is_number, main_setting
from deepspec.report.page import Section, figure, figures, missing, table
from deepspec.report.scores import score_table
from deepspec.report.slices import slice_tables
from deepspec.report.svg import Row, Series, line_chart, row_chart

_CURVES = 5  # lines of one chart a reader can tell apart


def _rows(trained: Setting, untrained: Optional[Setting], kind: str) -> list[Row]:
    rows = []
    for name, values in trained.group(kind).items():
        other = untrained.group(kind).get(name, {}) if untrained else {}
        pair = [values] + ([other] if untrained else [])
        rows.append(Row(name, [one.get("acceptance_length") for one in pair], [interval(one) for one in pair]))
    return rows


def _checks(evaluation: dict[str, Any], untrained: Optional[Setting]) -> str:
    """Sentences on the gain over the untrained drafter and on losslessness."""
    sentences = []
    gain = untrained.values.get("trained_minus_untrained") if untrained else None
    if isinstance(gain, dict) and is_number(gain.get("effect")) and len(gain.get("interval") or ()) == 2:
        low, high = gain["interval"]
        sentences.append(f"Trained minus untrained, paired over {gain.get('prompts')} prompts: {gain['effect']:+.2f} "
                         f"tokens per round (95 % interval {low:+.2f} to {high:+.2f}).")
    checked = evaluation.get("greedy_check")
    counts = [value for value in checked.values() if isinstance(value, dict)] if isinstance(checked, dict) else []
    total, same, ties, wrong = (sum(int(one.get(name) or 0) for one in counts)
                                for name in ("prompts", "identical", "near_ties", "mismatches"))
    if total:
        sentences.append(f"Greedy check: {same} of {total} answers equal the target's own token by token, {ties} part "
                         f"at a near-tie of two logits, {wrong} differ" + (" and must not." if wrong else "."))
    return f"<p>{escape(' '.join(sentences))}</p>" if sentences else ""


def acceptance(files: RunFiles) -> Section:
    """Acceptance length per domain and benchmark with intervals."""
    lead = ("How many tokens one round yields on average, the target's own bonus token included: 1 is no gain, "
            "the block size plus 1 is the most there can be. Higher is better; two results differ only where their "
            "95 % intervals hardly overlap.")
    trained = main_setting(files.evaluation)
    if trained is None:
        return Section("acceptance", "Acceptance length", lead, missing("There is no evaluation of this run yet.",
                                                                        files.command("evaluate")))
    untrained = main_setting(files.evaluation, untrained=True)
    names = ["this drafter"] + (["untrained drafter"] if untrained else [])
    parts = []
    for kind, caption in (("domains", "Per domain"), ("benchmarks", "Per benchmark")):
        chart = row_chart(_rows(trained, untrained, kind), names, x_label="tokens per round", bars=False, start=1.0,
                          description=f"Acceptance length, {caption.lower()}, with 95 % intervals")
        parts.append(figure(chart, f"{caption}: dot = pooled mean, bar = 95 % interval over prompts."))
    rows = []
    for name, values in trained.group("benchmarks").items():
        low, high = interval(values) or (None, None)
        spread = values.get("acceptance_length_by_prompt") or {}
        rows.append([name, values.get("domain"), values.get("num_prompts"), values.get("rounds"),
                     values.get("acceptance_length"), low, high, *(spread.get(key) for key in ("p10", "p50", "p90")),
                     values.get("draft_ms"), values.get("verify_ms")])
    header = ["benchmark", "domain", "prompts", "rounds", "tokens / round", "95 % from", "to", "prompts: p10", "p50",
              "p90", "draft ms / round", "verify ms / round"]
    mode = "estimated from distributions" if trained.values.get("mode") == "analytic" else "measured by decoding"
    note = f"Setting {trained.name}, {mode}; pooled: all tokens divided by all rounds."
    return Section("acceptance", "Acceptance length", lead, figures(*parts, accepted_histogram(trained))
                   + table(header, rows, note) + slice_tables(trained) + computed_table(files.evaluation)
                   + _checks(files.evaluation, untrained) + score_table(files.evaluation))


def by_position(files: RunFiles) -> Section:
    """Conditional acceptance by position (Fig. 2)."""
    lead = ("Chance that the target accepts the draft token at a position, given that it accepted all before it. A "
            "good drafter starts high and stays flat; a curve that falls means later tokens are guessed without enough "
            "of what was drafted before them.")
    title = "Acceptance by position"
    setting = main_setting(files.evaluation)
    if setting is None:
        return Section("positions", title, lead, missing("There is no evaluation of this run yet.",
                                                         files.command("evaluate")))
    curves = setting.group("domains") or setting.group("benchmarks")
    series = [
        Series(name, range(1, len(values["conditional_acceptance"]) + 1), values["conditional_acceptance"])
        for name, values in list(curves.items())[:_CURVES] if values.get("conditional_acceptance")
    ]
    chart = line_chart(series, x_label="draft position", y_label="accepted", y_limits=(0.0, 1.0),
                       description="Conditional acceptance by draft position, one line per domain")
    caption = "Per domain; positions that were never reached are left out."
    return Section("positions", title, lead, figure(chart, caption)
                   or "<p>The evaluation holds no acceptance by position.</p>")
