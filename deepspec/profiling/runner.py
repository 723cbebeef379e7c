"""Rounds of the real decoder at fixed shapes: target, drafter, acceptance and bookkeeping as decoding runs them."""

from typing import Any, Optional, Sequence

import torch

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.rows import Row
from deepspec.decoding.types import DecodeRequest, DraftProposal
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

    def open_rows(self, slots: int, kv_len: int) -> None:
        """Caches for ``slots`` rows of ``kv_len`` tokens."""
        self._stop_ids = frozenset()
        # Contexts hold zeros: what is read costs the same whatever it says, and prefilling them would take longer than
        # the measurement.
        self._open(slots, kv_len + self.drafter.shape.draft_length + 2)
        width = len(self.drafter.shape.feature_layers) * self.drafter.shape.target_hidden_size
        self._features = torch.zeros(kv_len, width, dtype=self.target.dtype, device=self.target.device)
        for slot in range(slots):
            self._drafts.append(slot, self._features)
            self._drafts.settle()

    def put(self, rows: int, kv_len: int) -> None:
        """The first ``rows`` slots decode with ``kv_len`` tokens of context, the others are empty."""
        token = self.drafter.shape.mask_token_id
        recent = min(_TOKENS_PER_ROUND, kv_len)
        for slot in range(len(self._rows)):
            self._cache.lengths[slot] = kv_len if slot < rows else 0
            self._drafts.drop(slot)
            if slot >= rows:
                self._rows[slot] = None
                continue
            self._drafts.lengths[slot] = kv_len - recent
            self._drafts.append(slot, self._features[:recent])
            ids = [token] * (kv_len + 1)
            self._rows[slot] = Row(DecodeRequest(f"profile-{slot}", tuple(ids[:-1])), ids, limit=1 << 30, cached=kv_len)


class DecoderRunner:
    """Times rounds of the in-process decoder at temperature 1, the sampling of production."""

    def __init__(self, target: Any, drafter: Any, seed: int = 0) -> None:
        self._target, self._drafter = target, drafter
        self._sampling = Sampling(temperature=1.0, seed=seed)
        self._kv_len = 0

    def prepare(self, kv_len: int, shapes: Sequence[Shape]) -> None:
        """Make caches for the largest request count."""
        self._kv_len = kv_len
        most = max(shape.num_reqs for shape in shapes)
        self._rounds = _FixedRounds(self._target, self._drafter, self._sampling, batch_size=most, max_new_tokens=1)
        self._rounds.open_rows(most, kv_len)

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
