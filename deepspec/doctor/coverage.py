"""Which part of every answer was made by rounds at all. An engine may stop drafting, without a word, where a sequence
becomes longer than it believes the drafter can read; its counters then hold only the rounds before.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

from deepspec.doctor.counts import Counts, PromptCounts
from deepspec.doctor.endpoint import Answer

_SLACK = 1  # steps; an engine may give an answer's first or last one no drafts


@dataclass(frozen=True)
class Coverage:
    """``drafted``: tokens of every answer that rounds have made, the prefill's first one included."""

    drafted: tuple[int, ...]
    plain: int = 0  # tokens of all answers that were made without drafts
    limit: Optional[tuple[int, int]] = None  # shortest and longest sequence at which drafting ended, if near


def coverage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer], draft_length: int) -> Coverage:
    """Compare the tokens of each answer with those its rounds account for: one of the prefill, and per round the
    accepted drafts and one more. K = ``draft_length`` per round.

    Drafting has a limit where it ended within two blocks of the same length in all answers that went on without, and
    nowhere beyond: what fits is judged before a block is drafted, by the length with all drafts in flight.
    """
    drafted, ends, plain = [], [], 0
    for prompt, answer in zip(prompts, answers):
        made, counts = len(answer.token_ids), answer.counts
        known = made if counts is None else min(made, 1 + counts.rounds + counts.total)
        if made - known <= _SLACK:
            known = made
        elif counts is not None and counts.rounds:
            ends.append(len(prompt) + known)
        plain += made - known
        drafted.append(known)
    if not plain or not ends or max(ends) - min(ends) > 2 * draft_length + 1:
        return Coverage(tuple(drafted), plain)
    longest = max((len(prompt) + known for prompt, known in zip(prompts, drafted) if known > 1), default=0)
    near = longest <= max(ends) + 2 * draft_length + 1
    return Coverage(tuple(drafted), plain, (min(ends), max(ends)) if near else None)


def _cut(kept: Sequence[int], tokens: int, draft_length: int, drafted: int) -> PromptCounts:
    """Counts of an answer of ``tokens`` tokens whose rounds accept ``kept`` until ``drafted`` and then nothing."""
    head = kept[:drafted]
    rounds = drafted + max(0, tokens - 1 - drafted - sum(head))
    return PromptCounts(rounds, rounds * draft_length, sum(head),
                        tuple(sum(1 for value in head if value > place) for place in range(draft_length)))


def silent_limit(prompts: Sequence[int], tokens: Sequence[int], served: Counts, kept: Sequence[Sequence[int]],
                 draft_length: int) -> Optional[tuple[int, int]]:
    """Shortest and longest sequence from which on rounds go on but accept nothing, None where that is not what the
    counts say. ``prompts`` and ``tokens``: lengths of prompts and answers; ``kept``: accepted drafts of every round of
    the drafter as trained.

    vLLM's older runner fills the drafts of a sequence that outgrew the drafter's length with zeros and counts them.
    Every answer's counts must be those of the trained drafter up to some round and of none accepted after it, and the
    ends must lie within two blocks of each other, as in ``coverage``.
    """
    slack = 2 * draft_length + 1
    ends, whole, never = [], [], []
    for prompt, made, counts, rounds in zip(prompts, tokens, served.prompts, kept, strict=True):
        fits = [place for place in range(len(rounds) + 1) if _cut(rounds, made, draft_length, place) == counts]
        if not fits:
            return None
        if fits[-1] == len(rounds):
            whole.append(prompt + made)
        elif fits[0] == 0:
            never.append(prompt + 1)
        else:
            ends.append(prompt + 1 + fits[0] + sum(rounds[:fits[0]]))
    if not ends or len(ends) + len(whole) < 2:
        return None  # one answer may look so by chance
    if max(ends) - min(ends) > slack or max(whole, default=0) > max(ends) + slack:
        return None
    return (min(ends), max(ends)) if min(never, default=max(ends)) >= min(ends) - slack else None
