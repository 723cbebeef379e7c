"""Bookkeeping of decoder rows: what each feeds into a step, and what it keeps of one. No tensors."""

import time
from dataclasses import dataclass, field
from typing import Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from deepspec.decoding.types import DecodeRequest, DecodeResult, RoundRecord

PREFILL_TOKENS = 2048  # prompt tokens of one step; a longer prompt is fed in parts


@dataclass
class Row:
    """One slot's request. ``ids[cached:]`` are not in the target's cache yet: the prompt, later the anchor alone."""

    request: DecodeRequest
    ids: list[int]
    limit: int  # length of ``ids`` at which the answer is cut
    cached: int = 0
    turns: int = 0  # rounds that drafted
    blind: bool = False  # the drafter has no context of it, so that it cannot draft
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: Optional[str] = None  # stop | length
    started: float = field(default_factory=time.perf_counter)

    @property
    def decoding(self) -> bool:
        """Whether only the anchor is missing from the cache, so that the row can draft."""
        return self.cached == len(self.ids) - 1 and self.cached >= len(self.request.prompt_ids)

    def result(self) -> DecodeResult:
        """The finished answer."""
        assert self.finish_reason is not None
        prompt = len(self.request.prompt_ids)
        return DecodeResult(
            id=self.request.id, domain=self.request.domain, prompt_tokens=prompt, token_ids=tuple(self.ids[prompt:]),
            finish_reason=self.finish_reason, rounds=tuple(self.rounds), seconds=time.perf_counter() - self.started)


@dataclass(frozen=True)
class Step:
    """Rows of one forward of the target, in flat order."""

    slots: list[int] = field(default_factory=list)
    feeds: list[int] = field(default_factory=list)  # uncached tokens each row feeds
    lengths: list[int] = field(default_factory=list)  # drafts each row verifies
    starts: list[int] = field(default_factory=list)  # flat index of each row's first token
    finals: list[int] = field(default_factory=list)  # places in ``slots`` that get a token out of this step

    @property
    def counts(self) -> list[int]:
        """Tokens of each row."""
        return [feed + length for feed, length in zip(self.feeds, self.lengths)]


def occupied(rows: Sequence[Optional[Row]], slot: int) -> Row:
    """The request of a slot that is in use."""
    row = rows[slot]
    assert row is not None
    return row


def plan_step(rows: Sequence[Optional[Row]], lengths: dict[int, int]) -> Step:
    """Which tokens each row feeds. Prompts share a budget of tokens; decoding rows are never held up by it."""
    step = Step()
    budget, start = PREFILL_TOKENS, 0
    for slot, row in enumerate(rows):
        if row is None:
            continue
        feed = len(row.ids) - row.cached
        if not row.decoding:
            feed = min(feed, budget)
            budget -= feed
        if feed == 0:
            continue
        if row.cached + feed == len(row.ids):
            step.finals.append(len(step.slots))
        step.slots.append(slot)
        step.feeds.append(feed)
        step.lengths.append(lengths.get(slot, 0))
        step.starts.append(start)
        start += feed + step.lengths[-1]
    return step


@dataclass(frozen=True)
class Outcome:
    """The target's verdict on one row."""

    accepted: int
    emitted: int
    analytic_rate: Optional[NDArray[np.float32]]  # [K] Eq. 8, when recording


@dataclass(frozen=True)
class Kept:
    """What a row gained in one step."""

    tokens: int  # appended to the row
    known: int  # draft positions whose outcome counts
    accepted: int  # draft tokens kept, before the answer is cut at its budget
    bonus: int


def keep(row: Row, feed: int, drafts: Sequence[int], accepted: int, emitted: int, stop_ids: frozenset[int]) -> Kept:
    """Append accepted drafts and the target's token to ``row``, ending it at an end-of-turn token or its limit.

    ``drafts`` are the verified ones. What follows an accepted end-of-turn token does not exist: no bonus, not known.
    """
    kept = list(drafts[:accepted])
    ends = [place for place, token in enumerate(kept) if token in stop_ids]
    known, bonus = len(drafts), 1
    row.cached += feed + accepted
    if ends:
        accepted = known = ends[0] + 1
        bonus = 0
        kept = kept[:accepted]
    else:
        kept.append(emitted)
    before = len(row.ids)
    row.ids.extend(kept[:row.limit - before])
    if row.ids[-1] in stop_ids:
        row.finish_reason = "stop"
    elif len(row.ids) >= row.limit:
        row.finish_reason = "length"
    return Kept(len(row.ids) - before, known, accepted, bonus)
