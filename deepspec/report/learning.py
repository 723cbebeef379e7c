"""Section on the learning curve: validations so far, and what more samples would give."""

from dataclasses import dataclass
from html import escape
from typing import Any, Optional

from deepspec.errors import InputRefused
from deepspec.evaluation.learning_curve import Cost, LearningCurve, decoded_length, fit_learning_curve
from deepspec.report.inputs import RunFiles, is_number, main_setting
from deepspec.report.page import Section, figure, table
from deepspec.report.svg import Series, line_chart

PROXY = "acceptance_length_proxy"
_FACTORS = (1.0, 3.0, 10.0)  # of the samples so far


@dataclass(frozen=True)
class Outlook:
    """A fitted curve and its points; ``rows`` are samples, validation length with interval, decoded length, speed-up.
    """

    curve: LearningCurve
    samples: list[float]
    lengths: list[float]
    rows: list[list[Any]]


def _samples_at(files: RunFiles) -> dict[int, int]:
    return {row["step"]: row["samples"] for row in files.metrics
            if is_number(row.get("step")) and is_number(row.get("samples"))}


def cost(files: RunFiles, draft_length: int) -> Optional[Cost]:
    """Round and step times of one request, from the profile."""
    cells = [cell for cell in files.cells if cell.get("num_reqs") == 1 and all(
        is_number(cell.get(name)) for name in ("verify_tokens", "draft_ms", "verify_ms", "host_ms"))]
    alone = [cell["verify_ms"] + cell["host_ms"] for cell in cells if cell["verify_tokens"] == 1]
    full = [(cell["draft_ms"], cell["verify_ms"] + cell["host_ms"]) for cell in cells
            if cell["verify_tokens"] == draft_length + 1]
    return Cost(*full[0], alone[0]) if alone and full else None


def outlook(files: RunFiles) -> Optional[Outlook]:
    """The curve of this run's validations; None without any. Raises InputRefused where they are too few to fit."""
    counted = _samples_at(files)
    points = [(float(counted[row["step"]]), float(row[PROXY])) for row in files.validations
              if row.get("step") in counted and is_number(row.get(PROXY))]
    if not points:
        return None
    rates = [name for name in files.validations[-1] if name.startswith("acceptance_rate@")]
    samples, lengths = [x for x, _ in points], [y for _, y in points]
    curve = fit_learning_curve(samples, lengths, most=len(rates) + 1.0)
    setting = main_setting(files.evaluation)
    decoded = None if setting is None else setting.macro.get("acceptance_length")
    spent = cost(files, len(rates))
    rows = []
    for factor in _FACTORS:
        found = curve.at(factor * curve.longest)
        row: list[Any] = [round(found.samples), found.acceptance_length, f"{found.interval[0]:.2f} to "
                          f"{found.interval[1]:.2f}", None, None]
        if decoded is not None and is_number(decoded):
            low, middle, high = (decoded_length(value, lengths[-1], float(decoded)) for value in (
                found.interval[0], found.acceptance_length, found.interval[1]))
            row[3] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            if spent is not None:
                row[4] = f"{spent.speedup(middle):.2f}x ({spent.speedup(low):.2f} to {spent.speedup(high):.2f})"
        rows.append(row)
    return Outlook(curve, samples, lengths, rows)


def learning(files: RunFiles) -> Section:
    """Validations by samples with the fitted curve, and the prediction."""
    lead = ("Acceptance on held-out responses against the samples trained on, and where the curve leads. Read it "
            "before paying for more data: where it is flat, more of the same will not help. Within one run the "
            "learning rate falls to its end, which flattens the curve; several runs of different length tell more.")
    title = "Learning curve"
    try:
        found = outlook(files)
    except InputRefused as error:
        return Section("learning", title, lead, f"<p>{escape(str(error))}</p>")
    if found is None:
        return Section("learning", title, lead, "<p>There are no validations with held-out samples. Train with "
                       "trainer.validate_every.</p>")
    steps = [found.samples[0] * (10 * found.samples[-1] / found.samples[0]) ** (k / 40) for k in range(41)]
    guesses = [found.curve.at(x) for x in steps]
    chart = line_chart(
        [Series("validations", found.samples, found.lengths, line=False),
         Series("fitted", steps, [one.acceptance_length for one in guesses], points=False),
         Series("95 % from", steps, [one.interval[0] for one in guesses], points=False),
         Series("to", steps, [one.interval[1] for one in guesses], points=False)],
        x_label="samples", y_label="tokens per round", x_log=True,
        description="Held-out acceptance length by training samples with a fitted power law")
    header = ["samples", "teacher forced", "95 %", "decoded", "speed-up, one request (Eq. 1)"]
    note = (f"Power law through {found.curve.points} validations, limit {found.curve.limit:.2f}; intervals from "
            "resampled residuals. Decoded: accepted tokens keep the ratio that this run's evaluation found. Speed-up "
            "with this run's profile.")
    return Section("learning", title, lead, figure(chart, "Validations, fitted curve and its 95 % interval.")
                   + table(header, found.rows, note))


def learning_lines(files: RunFiles) -> list[str]:
    """The prediction as text, for a terminal; nothing without validations enough."""
    try:
        found = outlook(files)
    except InputRefused:
        return []
    return [] if found is None else [
        f"learning curve: {row[0]} samples would give {row[1]:.2f} tokens per round teacher forced (95 % {row[2]})"
        + (f", {row[3]} decoded" if row[3] else "") + (f", speed-up {row[4]}" if row[4] else "") for row in found.rows]
