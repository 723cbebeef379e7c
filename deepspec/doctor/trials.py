"""Trials: where the reference prompts leave more than one mistake possible, the engine is made to write what a suspect
would draft.

A drafter that is fed wrongly may have none of its tokens accepted, and then every mistake of that size looks alike. Its
drafts are not random, though: our decoder knows them for each suspect. The server is asked for answers made of those
tokens alone. If the suspect is right the engine's drafts are accepted, and otherwise they hardly are. The counts are
judged by replay as all others, so it does not matter what the server wrote in the end.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Sequence

from deepspec.doctor.counts import Counts, PromptCounts
from deepspec.doctor.endpoint import Engine
from deepspec.doctor.exam import Exam, states_of
from deepspec.doctor.ranking import by_cause, rank
from deepspec.doctor.reference import Text, restricted_answer
from deepspec.doctor.replay import first_drafts, replay
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)
_LIKELY = 0.02
_SUSPECTS, _PROMPTS, _TOKENS = 6, 2, 24


@dataclass(frozen=True)
class Wanted:
    """One restricted answer to ask for: a prompt by its place, and the tokens it may be made of."""

    place: int
    only: tuple[int, ...]


def contested(exam: Exam, certainty: float) -> list[int]:
    """Places of the hypotheses that a trial could decide between, likeliest first; none where a cause is certain."""
    causes = by_cause(exam.ranked)
    if next(iter(causes.values()), 1.0) >= certainty:
        return []
    return [item.place for item in exam.ranked if item.place >= 0 and causes[item.cause] >= _LIKELY
            and item.probability > 0.0][:_SUSPECTS]


def plan(exam: Exam, suspects: Sequence[int], target: Any) -> list[Wanted]:
    """Answers made of a suspect's first draft alone, and of its first block with the token before it.

    Suspects that only stand for a kind of mistake (``Hypothesis.exact`` false) draft nothing that could be expected of
    the engine; they are judged on the others' answers.
    """
    texts = [text for text in exam.texts if text.answer][:_PROMPTS]
    states = states_of(target, texts, exam.layers())
    wanted: dict[Wanted, None] = {}
    for suspect in suspects:
        if not exam.hypotheses[suspect].exact:
            continue
        drafts = first_drafts(exam.variants[suspect], texts, states, target.tokenizer_size)
        for place, (text, block) in enumerate(zip(texts, drafts)):
            wanted[Wanted(place, (block[0],))] = None
            wanted[Wanted(place, tuple(sorted({text.answer[0], *block})))] = None
    return list(wanted)


def _ask(engine: Engine, target: Any, exam: Exam, wanted: Sequence[Wanted]) -> tuple[list[Text], Counts]:
    """The texts that the server wrote, with what our target would have written next, and the server's counts.

    Raises InputRefused when the server refuses to be restricted.
    """
    texts, counts = [], []
    for item in wanted:
        prompt = exam.prompts[item.place].ids
        answer = engine.answer(prompt, _TOKENS, item.only)
        more = restricted_answer(target, [*prompt, *answer.token_ids], item.only, exam.draft_length + 1)
        texts.append(Text(prompt, answer.token_ids, more))
        counts.append(answer.counts or PromptCounts(0, 0, 0))
    return texts, Counts(tuple(counts))


def settle(engine: Engine, target: Any, exam: Exam, certainty: float) -> Exam:
    """``exam`` with trials where its ranking leaves more than one cause possible; the same one where none helps."""
    wanted = plan(exam, contested(exam, certainty), target)
    if not wanted:
        return exam
    log.info("several mistakes explain the counts: %d answers are asked for that tell them apart", len(wanted))
    try:
        texts, counts = _ask(engine, target, exam, wanted)
    except InputRefused as error:
        log.warning("the server does not restrict answers to given tokens, so nothing more could be decided: %s", error)
        return exam
    if not counts.rounds:
        return exam
    states = states_of(target, texts, exam.layers())
    predictions = [replay(variant, texts, states, target.tokenizer_size) for variant in exam.variants]
    ranked = rank(exam.served, exam.named(), exam.draft_length, more=(counts, predictions))
    return replace(exam, ranked=ranked, trials=counts, trial_predictions=predictions)
