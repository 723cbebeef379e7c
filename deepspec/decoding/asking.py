"""Which requests of a scheduled round draft, and which ones the drafter keeps no context of.

A drafter that does not pay should cost nothing: while the schedule is settled on plain decoding, requests are *blind*,
their features are neither captured nor kept. When drafting is to be tried again, the next request to come is seen; when
it pays again, those whose rest is long enough are read again from their tokens, like a prompt.
"""

from typing import Any, Optional, Sequence

from deepspec.decoding.draft import DraftState
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.rows import Row

_TRIAL_SHARE = 8  # of the requests, one in so many drafts in a trial


def drafting_slots(rows: Sequence[Optional[Row]], scheduler: Optional[ThroughputScheduler], drafts: DraftState,
                   cache: Any) -> list[int]:
    """Slots that draft now; all that can without a scheduler.

    With one this marks rows blind, or puts rows back to be read again from ``cache`` position 0.
    """
    ready = [slot for slot, row in enumerate(rows) if row is not None and row.decoding]
    if not ready or scheduler is None:
        return ready
    asked = _asked(rows, ready, scheduler, drafts, cache)
    if not asked:
        drafts.settle()
    return asked


def _asked(rows: Sequence[Optional[Row]], ready: Sequence[int], scheduler: ThroughputScheduler, drafts: DraftState,
           cache: Any) -> list[int]:
    seen = [slot for slot in ready if not rows[slot].blind]  # type: ignore[union-attr]

    def by_context(slot: int) -> int:
        row = rows[slot]
        return 0 if row is None else row.cached

    few = max(1, len(ready) // _TRIAL_SHARE)
    asked = seen if scheduler.should_draft(len(ready), len(seen)) else []
    if asked and scheduler.trial:
        # The drafter's context of all skipped tokens has to be made up for: a few short requests are enough.
        asked = sorted(sorted(seen, key=by_context)[:few])
    if scheduler.blind:
        for slot, row in enumerate(rows):
            if row is not None and not row.blind and slot not in asked:
                row.blind = True
                drafts.drop(slot)
    elif len(seen) < len(ready) and scheduler.reread:
        hidden = [slot for slot in ready if slot not in seen]
        if scheduler.trial_is_due:
            hidden = sorted(hidden, key=by_context)[:few]
        else:
            hidden = [slot for slot in hidden if _worth_reading(rows[slot], scheduler, len(ready))]
        for slot in hidden:
            _read_again(rows[slot], slot, cache)
    return asked


def _worth_reading(row: Optional[Row], scheduler: ThroughputScheduler, requests: int) -> bool:
    assert row is not None
    return scheduler.worth_reading(row.cached, row.limit - len(row.ids), requests)


def _read_again(row: Optional[Row], slot: int, cache: Any) -> None:
    assert row is not None
    row.blind, row.cached = False, 0
    cache.truncate(slot, 0)
