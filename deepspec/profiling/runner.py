"""Rounds of the real decoder at fixed shapes: target, drafter, acceptance and bookkeeping as decoding runs them."""

import time
from typing import Any, Callable, Optional, Sequence

import torch

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.rows import Row
from deepspec.decoding.types import DecodeRequest, DraftProposal
from deepspec.drafters.types import DrafterShape
from deepspec.profiling.measure import RoundTime, Shape
from deepspec.scheduling import Floats
from deepspec.targets.sampling import Sampling

_TOKENS_PER_ROUND = 2  # verified tokens of a request whose features the next proposal projects


class _FixedRounds(SpeculativeDecoder):
    """A decoder whose rows are put back after every round and whose lengths are told."""

    length = 0

    def _choose_lengths(self, proposal: Optional[DraftProposal]) -> tuple[dict[int, int], Optional[Floats]]:
        rows = () if proposal is None else proposal.rows
        return dict.fromkeys(rows, self.length), None

    def open_rows(self, slots: int, kv_len: int, shape: DrafterShape) -> None:
        """Caches for ``slots`` rows of ``kv_len`` tokens."""
        self._stop_ids = frozenset()
        self._filler = shape.mask_token_id
        # Contexts hold zeros: what is read costs the same whatever it says, and prefilling them would take longer than
        # the measurement.
        self._open(slots, kv_len + shape.draft_length + 2)
        if self._drafts is None:
            return
        width = len(shape.feature_layers) * shape.target_hidden_size
        self._features = torch.zeros(kv_len, width, dtype=self.target.dtype, device=self.target.device)
        for slot in range(slots):
            self._drafts.append(slot, self._features, [self._filler] * kv_len)
            self._drafts.settle()

    def _put_row(self, slot: int, ids: list[int], cached: int) -> None:
        request = DecodeRequest(f"profile-{slot}", tuple(ids[:-1]) if cached else tuple(ids))
        self._rows[slot] = Row(request, ids, limit=1 << 30, cached=cached)

    def put(self, rows: int, kv_len: int) -> None:
        """The first ``rows`` slots decode with ``kv_len`` tokens of context, the others are empty."""
        recent = min(_TOKENS_PER_ROUND, kv_len)
        for slot in range(len(self._rows)):
            self._cache.lengths[slot] = kv_len if slot < rows else 0
            if self._drafts is not None:
                self._drafts.drop(slot)
            if slot >= rows:
                self._rows[slot] = None
                continue
            if self._drafts is not None:
                self._drafts.lengths[slot] = kv_len - recent
                self._drafts.append(slot, self._features[:recent], [self._filler] * recent)
            self._put_row(slot, [self._filler] * (kv_len + 1), kv_len)

    def put_prompt(self, tokens: int) -> None:
        """Slot 0 has a prompt to be fed, the others are empty."""
        for slot in range(len(self._rows)):
            self._cache.lengths[slot] = 0
            if self._drafts is not None:
                self._drafts.drop(slot)
            self._rows[slot] = None
        self._put_row(0, [self._filler] * tokens, 0)

    def project_prompt(self) -> None:
        """What drafting does with a prompt once it is verified: its keys and values for the drafter."""
        if self._drafts is not None:
            self._drafts._flush([0])


class DecoderRunner:
    """Times rounds of the in-process decoder at temperature 1, the sampling of production."""

    def __init__(self, target: Any, drafter: Any, seed: int = 0,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._target, self._drafter, self._clock = target, drafter, clock
        self._sampling = Sampling(temperature=1.0, seed=seed)
        self._kv_len = 0

    def _make(self, slots: int, kv_len: int, *, alone: bool = False) -> _FixedRounds:
        rounds = _FixedRounds(self._target, self._drafter, self._sampling, batch_size=slots, max_new_tokens=1,
                              mode="none" if alone else "fixed")
        rounds.clock = self._clock
        rounds.open_rows(slots, kv_len, self._drafter.shape)
        return rounds

    def prepare(self, kv_len: int, shapes: Sequence[Shape]) -> None:
        """Make caches for the largest request count."""
        self._kv_len = kv_len
        self._rounds = self._make(max(shape.num_reqs for shape in shapes), kv_len)

    def run(self, shape: Shape) -> RoundTime:
        """One round in which every request verifies ``verify_tokens - 1`` drafts."""
        rounds = self._rounds
        rounds.put(shape.num_reqs, self._kv_len)
        rounds.length = shape.verify_tokens - 1
        before = vars(rounds.timings).copy()
        rounds._round()
        after = vars(rounds.timings)
        names = ("draft_seconds", "verify_seconds", "total_seconds")
        draft, verify, total = (after[name] - before[name] for name in names)
        return RoundTime(draft, verify, total)

    def prepare_extras(self, num_reqs: int, kv_len: int, prompt_tokens: int) -> None:
        """Make caches for ``alone`` and ``prompt``."""
        self._plain_kv_len = kv_len
        self._plain = self._make(num_reqs, max(kv_len, prompt_tokens), alone=True)
        self._drafting = self._make(1, max(kv_len, prompt_tokens))

    def alone(self, num_reqs: int) -> float:
        """Seconds of a round of plain decoding without a drafter at the target's side."""
        self._plain.put(num_reqs, self._plain_kv_len)
        before = self._plain.timings.total_seconds
        self._plain._round()
        return self._plain.timings.total_seconds - before

    def prompt(self, tokens: int, *, drafting: bool) -> float:
        """Seconds of one request's prompt; ``drafting`` also makes the drafter's context of it."""
        rounds = self._drafting if drafting else self._plain
        rounds.put_prompt(tokens)
        began = rounds._clock()
        while self._rows_feed(rounds):
            rounds._round()
        rounds.project_prompt()
        return rounds._clock() - began

    @staticmethod
    def _rows_feed(rounds: _FixedRounds) -> bool:
        row = rounds._rows[0]
        return row is not None and not row.decoding
