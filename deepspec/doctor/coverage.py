"""Which part of every answer was made by rounds at all. An engine may stop drafting, without a word, where a sequence
becomes longer than it believes the drafter can read; its counters then hold only the rounds before.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

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
