"""From measurements to causes: which findings stand, which the acceptance confirms, and what stays open."""

from dataclasses import dataclass, replace
from typing import Optional, Sequence

from deepspec.doctor.exam import Exam
from deepspec.doctor.faults import AS_TRAINED
from deepspec.doctor.findings import FAULT, NOTE, Finding
from deepspec.doctor.ranking import UNKNOWN, by_cause

_ROUNDING, _ALTERED = 0.25, 2.0  # logits: what rounding does to a near tie; what quantisation does
_LIKELY = 0.05
_TRAFFIC_ROUNDS = 50


@dataclass(frozen=True)
class Diagnosis:
    """The verdict. ``gap``: acceptance length missing against offline, with its 95 % interval."""

    healthy: bool
    short: bool  # the engine accepts less than it should
    gap: tuple[float, float, float]
    findings: tuple[Finding, ...]
    causes: dict[str, float]  # by acceptance; empty where nothing is missing


def is_short(exam: Exam, tolerance: float, certainty: float) -> bool:
    """Whether the engine accepts less than offline, beyond the tolerance and beyond chance.

    Beyond chance: the interval of the gap lies above 0, or the counts speak against a drafter run as trained. The
    second needs fewer prompts, since the replay predicts the counts of each.
    """
    gap, low, _ = exam.gap()
    offline = exam.offline.acceptance_length or 1.0
    unlike = by_cause(exam.ranked).get(AS_TRAINED, 1.0) < 1.0 - certainty
    return gap > tolerance * offline and (low > 0.0 or unlike)


def _share(exam: Exam, length: Optional[float]) -> Optional[float]:
    """Part of the missing acceptance length that an acceptance length of ``length`` accounts for."""
    offline, served = exam.offline.acceptance_length, exam.served.acceptance_length
    if length is None or offline is None or served is None or offline - served <= 0:
        return None
    return round(min(1.0, max(0.0, (offline - length) / (offline - served))), 3)


def length_findings(exam: Exam, trained: int, tolerance: float) -> list[Finding]:
    """``num_speculative_tokens`` of the engine against what the drafter was trained for."""
    if exam.draft_length == trained:
        return []
    offline, here = exam.offline.acceptance_length or 1.0, exam.expected.acceptance_length or 1.0
    says = f"the engine drafts {exam.draft_length} tokens per round, the drafter was trained for {trained}"
    fix = f"Start the server with num_speculative_tokens={trained}."
    if exam.draft_length > trained:
        return [Finding("num_speculative_tokens", f"{says}: the slots beyond were never trained and only cost time",
                        fix, found_by="server", explains=_share(exam, here))]
    kind = FAULT if offline - here > tolerance * offline else NOTE
    return [Finding("num_speculative_tokens", f"{says}, which alone takes the acceptance length from {offline:.2f} to "
                    f"{here:.2f}", fix, kind, "server", explains=_share(exam, here))]


def _length_fault(says: str, limit: tuple[int, int]) -> Finding:
    where = f"{limit[0]}" if limit[0] == limit[1] else f"{limit[0]} to {limit[1]}"
    return Finding("length", f"{says}: drafting ends where a sequence reaches {where} tokens",
                   "Give the drafter the target's length: max_position_embeddings in its config.json as exported, and "
                   "no smaller max_model_len in the speculative configuration.", found_by="server")


def coverage_findings(exam: Exam) -> list[Finding]:
    """Tokens that were made without drafts."""
    plain, limit = exam.coverage.plain, exam.coverage.limit
    total = sum(len(text.answer) for text in exam.texts) + plain
    if exam.silent is not None:
        return [_length_fault("every answer's counts are the trained drafter's up to a length, and nothing is accepted "
                              "beyond", exam.silent)]
    if not plain:
        return []
    says = f"{plain} of {total} answered tokens were made without drafts"
    if limit is None:
        return [Finding("undrafted", f"{says}, at no particular length: the engine drafts in some steps only",
                        "Compare without schedules by batch size, adaptive verification and other load.", NOTE,
                        "server")]
    return [_length_fault(says, limit)]


def text_findings(exam: Exam) -> list[Finding]:
    """Greedy texts that are not the target's own."""
    check = exam.text
    if check.margin is None:
        return []
    where = (f"{len(check.different)} of {check.prompts} greedy answers are not the target's, the first differing at "
             f"token {min(check.first)}; there the target prefers its own token by {check.margin:.2f} logits (median)")
    if check.margin <= _ROUNDING:
        return [Finding("rounding", f"{where}: near ties that another dtype or kernel decides differently",
                        "Nothing, if acceptance is as expected.", NOTE, "text")]
    if check.margin <= _ALTERED:
        return [Finding("quantised_target", f"{where}: more than rounding, so the served target is quantised or its "
                        "weights were altered", "Extract features from the model as it is served (same quantisation) "
                        "and train or fine-tune on them, or serve the weights the run was trained on.",
                        found_by="text")]
    return [Finding("base_model", f"{where}: the server runs another model than the drafter was trained for",
                    "Serve the target of the run (its name and revision are in the export's README.md), or train a "
                    "drafter for the model that is served.", found_by="text")]


def traffic_findings(exam: Exam, tolerance: float, sampled: Optional[float]) -> list[Finding]:
    """Requests served before against the reference prompts. ``sampled``: offline acceptance at temperature 1."""
    before, served = exam.traffic, exam.served.acceptance_length
    if before is None or before.rounds < _TRAFFIC_ROUNDS or served is None:
        return []
    length = 1 + before.total / before.rounds
    if served - length <= 2 * tolerance * served:
        return []
    hot = "" if sampled is None else f" Our decoder accepts {sampled:.2f} on the same prompts at temperature 1."
    return [Finding("traffic", f"the {before.rounds} rounds before this examination accepted {length:.2f} tokens, the "
                    f"reference prompts accept {served:.2f} on the same server: the difference lies in the requests "
                    f"(temperature, sampling, thinking mode, domain or length).{hot}",
                    "Compare the clients' temperature and chat_template_kwargs with the run's; where they are meant, "
                    "fine-tune on logged requests (data=requests drafter.init_from=DIR).", found_by="server")]


def _twins(exam: Exam) -> list[int]:
    top = exam.ranked[0]
    return [top.place, *top.twins] if top.place >= 0 else []


def acceptance_findings(exam: Exam, static: Sequence[Finding], certainty: float,
                        other_model: bool) -> tuple[list[Finding], list[Finding]]:
    """Causes found by comparing counts, and ``static`` with what the counts say about it."""
    top, causes = exam.ranked[0], by_cause(exam.ranked)
    group = _twins(exam)
    named = {exam.hypotheses[place].cause for place in group}
    length = exam.predictions[top.place].acceptance_length if top.place >= 0 else None
    explains = _share(exam, length)
    together = sum(item.probability for item in exam.ranked if item.cause in named)
    if "served_folder" in named and together >= _LIKELY:
        confirmed = [replace(item, probability=round(min(1.0, together), 4), explains=explains)
                     if item.kind == FAULT else item for item in static]
        return [], confirmed
    trials = "" if exam.trials is None else " (with answers made of what the suspects would draft)"
    fitting = f"the counts of {top.exact} of {exam.judged} answers{trials} are reproduced exactly"
    if top.cause == AS_TRAINED and causes[AS_TRAINED] >= certainty:
        return [], list(static)  # what is missing comes from the number of draft tokens or from the texts
    if top.cause == UNKNOWN and causes[UNKNOWN] >= certainty:
        if other_model:
            return [], list(static)
        return [Finding("unknown", "no known mistake reproduces the engine's counts",
                        "Report it with doctor.json; compare one draft token by token (engine's log, our decoder).",
                        found_by="acceptance", probability=round(causes[UNKNOWN], 4))], list(static)
    if len(named) == 1 and causes[top.cause] >= certainty:
        chosen = exam.hypotheses[top.place]
        found = " or ".join(dict.fromkeys(exam.hypotheses[place].detail for place in group))
        return [Finding(chosen.cause, f"{found}; {fitting} by our decoder with that mistake", chosen.fix,
                        found_by="acceptance", probability=round(causes[top.cause], 4), explains=explains)
                ], list(static)
    likely = [cause for cause, value in causes.items() if value >= _LIKELY]
    details = dict.fromkeys(f"{item.detail} ({causes[item.cause]:.2f})" for item in exam.hypotheses
                            if item.cause in likely)
    return [Finding("undecided", f"these cannot be told apart by what is accepted{trials}: {'; '.join(details)}",
                    "Check them one by one against the run's export, the likeliest first. A drafter trained longer, or "
                    "more prompts (doctor.max_prompts), would separate them.", found_by="acceptance",
                    probability=round(sum(causes[cause] for cause in likely), 4), explains=explains)], list(static)


def unnoticed(exam: Exam, tolerance: float) -> list[Finding]:
    """Mistakes that this drafter on these prompts could not show: their replay accepts as much as without them."""
    base = exam.expected.acceptance_length or 1.0
    hidden = [item.detail for item, found in zip(exam.hypotheses[1:], exam.predictions[1:])
              if abs((found.acceptance_length or 1.0) - base) <= tolerance * base
              and found.prompts != exam.served.prompts and item.cause.startswith(("layers", "slots"))]
    if not hidden:
        return []
    return [Finding("not_testable", f"acceptance would hardly change with: {'; '.join(hidden)}",
                    "Only the files were compared for these.", NOTE, "acceptance")]


def diagnose(exam: Exam, static: Sequence[Finding], rendered: Sequence[Finding], *, trained: int, tolerance: float,
             certainty: float, sampled: Optional[float] = None) -> Diagnosis:
    """Everything put together. ``static``: findings of the files, ``rendered``: of the prompts."""
    short = is_short(exam, tolerance, certainty)
    text = text_findings(exam)
    lengths = length_findings(exam, trained, tolerance)
    found: list[Finding] = []
    files = list(static)
    if exam.silent is None and is_short(replace_offline(exam), tolerance, certainty):
        found, files = acceptance_findings(exam, static, certainty, any(item.kind == FAULT for item in text))
    traffic = [] if short else traffic_findings(exam, tolerance, sampled)
    notes = [] if short else unnoticed(exam, tolerance)
    if not exam.alone:
        notes.append(Finding("other_requests", "other requests were counted together with the reference prompts",
                             "Examine a server without traffic for exact counts.", NOTE, "server"))
    findings = [*found, *lengths, *coverage_findings(exam), *files, *text, *rendered, *traffic, *notes]
    findings.sort(key=lambda item: (item.kind != FAULT, -(item.explains or 0.0)))
    healthy = not short and all(item.kind == NOTE for item in findings)
    if short and all(item.kind == NOTE for item in findings):
        findings.insert(0, Finding("unknown", "acceptance is missing, and nothing that was looked at explains it",
                                   "Report it with doctor.json.", found_by="acceptance"))
    return Diagnosis(healthy, short, exam.gap(), tuple(findings), by_cause(exam.ranked) if short else {})


def replace_offline(exam: Exam) -> Exam:
    """The same with what is expected of this number of draft tokens on the texts served as the offline figure."""
    return replace(exam, offline=exam.expected)
