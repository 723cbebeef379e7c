"""Tokens without drafts, and the length from which on there are none, on counts made by hand."""

from deepspec.doctor.counts import Counts, PromptCounts
from deepspec.doctor.coverage import coverage, silent_limit
from deepspec.doctor.diagnosis import coverage_findings
from deepspec.doctor.endpoint import Answer
from deepspec.doctor.exam import Exam, TextCheck
from deepspec.doctor.reference import Text


def answer(tokens: int, rounds: int, accepted: int) -> Answer:
    return Answer(tuple(range(tokens)), PromptCounts(rounds, 4 * rounds, accepted, (accepted, 0, 0, 0)))


def test_every_token_comes_from_a_round() -> None:
    """Of 32 tokens one comes from the prefill; the last round may go beyond the end."""
    found = coverage([[1] * 5, [1] * 9], [answer(32, 20, 11), answer(32, 12, 22)], 4)
    assert found.drafted == (32, 32) and found.plain == 0 and found.limit is None


def test_drafting_ends_at_one_length() -> None:
    prompts = [[1] * 5, [1] * 9, [1] * 40]
    answers = [answer(32, 10, 9), answer(32, 8, 6), Answer(tuple(range(32)), PromptCounts(0, 0, 0, (0,) * 4))]
    found = coverage(prompts, answers, 4)
    assert found.drafted == (20, 15, 1) and found.plain == 12 + 17 + 31
    assert found.limit == (24, 25)


def test_no_length_where_others_were_drafted_beyond_it_or_ends_are_scattered() -> None:
    found = coverage([[1] * 5, [1] * 60], [answer(32, 10, 9), answer(32, 20, 11)], 4)
    assert found.plain == 12 and found.limit is None
    found = coverage([[1] * 5, [1] * 60], [answer(32, 10, 9), answer(32, 10, 9)], 4)
    assert found.plain == 24 and found.limit is None


def exam(prompts: list[list[int]], answers: list[Answer]) -> Exam:
    covered = coverage(prompts, answers, 4)
    rows = zip(prompts, answers, covered.drafted)
    texts = [Text(tuple(prompt), item.token_ids[:made]) for prompt, item, made in rows]
    counts = Counts(tuple(item.counts for item in answers if item.counts is not None))
    return Exam([], counts, 4, counts, counts, TextCheck(len(prompts)), texts=texts, coverage=covered)


def kinds(prompts: list[list[int]], answers: list[Answer]) -> list[tuple[str, str]]:
    return [(item.cause, item.kind) for item in coverage_findings(exam(prompts, answers))]


def test_what_is_said_of_it() -> None:
    assert kinds([[1] * 5], [answer(32, 20, 11)]) == []
    assert kinds([[1] * 5, [1] * 60], [answer(32, 10, 9), answer(32, 20, 11)]) == [("undrafted", "note")]
    prompts, answers = [[1] * 5, [1] * 9], [answer(32, 10, 9), answer(32, 8, 6)]
    assert kinds(prompts, answers) == [("length", "fault")]
    assert coverage_findings(exam(prompts, answers))[0].says == (
        "29 of 64 answered tokens were made without drafts: drafting ends where a sequence reaches 24 to 25 tokens")


KEPT = [[2, 0, 1, 3, 1, 0], [0, 4, 1, 0, 2], [1, 1]]


def counted(rounds: int, *accepted: int) -> PromptCounts:
    return PromptCounts(rounds, 4 * rounds, sum(accepted), accepted)


def test_rounds_that_accept_nothing_beyond_a_length() -> None:
    """Answers of 14 tokens: the first two go as trained for three and two rounds, the third prompt is too long."""
    served = Counts((counted(10, 2, 1, 0, 0), counted(9, 1, 1, 1, 1), counted(13, 0, 0, 0, 0)))
    assert silent_limit([10, 10, 40], [14, 14, 14], served, KEPT, 4) == (17, 17)
    found = exam([[1] * 10], [answer(14, 10, 3)])
    found.silent = (17, 17)
    item, = coverage_findings(found)
    assert (item.cause, item.kind) == ("length", "fault") and "reaches 17 tokens" in item.says


def test_no_length_where_counts_are_whole_or_of_another_kind() -> None:
    whole = Counts((counted(6, 4, 2, 1, 0), counted(5, 3, 2, 1, 1), counted(2, 2, 0, 0, 0)))
    assert silent_limit([10, 10, 10], [14, 13, 5], whole, KEPT, 4) is None
    other = Counts((counted(9, 4, 0, 0, 0), *whole.prompts[1:]))
    assert silent_limit([10, 10, 10], [14, 13, 5], other, KEPT, 4) is None
    served = Counts((counted(10, 2, 1, 0, 0), counted(9, 1, 1, 1, 1)))
    assert silent_limit([10, 90], [14, 14], served, KEPT[:2], 4) is None  # ends far apart
