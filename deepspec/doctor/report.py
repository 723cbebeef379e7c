"""The diagnosis in a paragraph, a table and ``doctor.json``."""

from typing import Any, Optional, Sequence

from deepspec.doctor.counts import Counts
from deepspec.doctor.diagnosis import Diagnosis
from deepspec.doctor.endpoint import ServerFacts
from deepspec.doctor.exam import Exam
from deepspec.doctor.findings import FAULT

SCHEMA_VERSION = 1


def _number(value: Optional[float], digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def paragraph(diagnosis: Diagnosis, exam: Exam) -> str:
    """What is wrong and what to do, in one paragraph."""
    gap, low, high = diagnosis.gap
    measured = (f"The engine accepts {_number(exam.served.acceptance_length)} tokens per round on {len(exam.prompts)} "
                f"reference prompts, our decoder {_number(exam.offline.acceptance_length)} with the same drafter "
                f"(missing {gap:.2f}, 95 % {low:.2f} to {high:.2f}; greedy, bonus token included).")
    faults = [item for item in diagnosis.findings if item.kind == FAULT]
    if diagnosis.healthy:
        return f"Healthy. {measured}"
    parts = []
    for item in faults:
        sure = "" if item.probability is None else f" (probability {item.probability:.2f})"
        share = "" if item.explains is None else f" It accounts for {item.explains:.0%} of what is missing."
        parts.append(f"{item.says[:1].upper()}{item.says[1:]}{sure}.{share} {item.fix}")
    return f"{len(faults)} fault{'s' * (len(faults) != 1)} found. {measured} " + " ".join(parts)


def _conditional(counts: Counts) -> list[Optional[float]]:
    positions = counts.positions
    if positions is None:
        return []
    reached = [counts.rounds, *positions[:-1]]
    return [kept / came if came else None for kept, came in zip(positions, reached)]


def _line(name: str, counts: Counts, probability: str = "") -> str:
    shares = " ".join(_number(value) for value in _conditional(counts))
    return (f"{name[:62]:62s} {probability:>6s} {_number(counts.acceptance_length, 3):>7s} {counts.rounds:7d}  "
            f"{shares}")


def table(diagnosis: Diagnosis, exam: Exam, rows: int = 8) -> list[str]:
    """Acceptance per position of the engine, of our decoder, and of our decoder with the likeliest mistakes."""
    lines = [f"{'':62s} {'prob.':>6s} {'length':>7s} {'rounds':>7s}  conditional acceptance by position",
             _line("engine", exam.served), _line("offline, as trained", exam.offline)]
    shown = exam.ranked if diagnosis.short else []
    for item in shown[:rows]:
        if item.place >= 0:
            hypothesis = exam.hypotheses[item.place]
            lines.append(_line(hypothesis.detail, exam.predictions[item.place], f"{item.probability:.3f}"))
        else:
            lines.append(f"{'none of those known':62s} {item.probability:6.3f}")
    lines += [f"{finding.kind}: {finding.cause}: {finding.says}" for finding in diagnosis.findings]
    return lines


def document(diagnosis: Diagnosis, exam: Exam, facts: ServerFacts, folder: str, drafter_sha256: str,
             settings: dict[str, Any]) -> dict[str, Any]:
    """Content of doctor.json."""
    hypotheses: Sequence[dict[str, Any]] = [
        {"cause": item.cause, "probability": round(item.probability, 6),
         "detail": "none of those known" if item.place < 0 else exam.hypotheses[item.place].detail,
         "prompts_reproduced": item.exact,
         "same_counts_as": [exam.hypotheses[place].detail for place in item.twins],
         **({} if item.place < 0 else {"predicted": exam.predictions[item.place].to_json()}),
         **({} if item.place < 0 or exam.trials is None else {
             "predicted_in_trials": exam.trial_predictions[item.place].to_json()})}
        for item in exam.ranked]
    traffic = exam.traffic
    return {
        "schema_version": SCHEMA_VERSION, "healthy": diagnosis.healthy, "verdict": paragraph(diagnosis, exam),
        "missing_acceptance_length": diagnosis.gap[0], "missing_ci95": list(diagnosis.gap[1:]),
        "server": facts.to_json(), "drafter": folder, "drafter_sha256": drafter_sha256, "settings": settings,
        "served": exam.served.to_json(), "offline": exam.offline.to_json(), "expected": exam.expected.to_json(),
        "texts": {"prompts": exam.text.prompts, "different": len(exam.text.different),
                  "first_difference": list(exam.text.first), "margins": list(exam.text.margins)},
        "trials": None if exam.trials is None else exam.trials.to_json(),
        "without_drafts": {"tokens": exam.coverage.plain, "from_length": exam.coverage.limit},
        "before": None if traffic is None else Counts((traffic,)).to_json(),
        "causes": {cause: round(value, 6) for cause, value in diagnosis.causes.items()},
        "findings": [item.to_json() for item in diagnosis.findings], "hypotheses": list(hypotheses),
        "convention": "acceptance length = 1 + accepted / rounds over all rounds; greedy; end-of-turn tokens ignored",
    }
