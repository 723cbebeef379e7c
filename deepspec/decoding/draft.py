"""The drafter's side of decoding: context keys and values of ragged rows, and the proposal.

S decoder rows, R rows of one proposal, K draft tokens, C context capacity, L drafter layers, V vocabulary.
"""

from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from deepspec.decoding.types import DraftProposal
from deepspec.drafters.sequential import sample_block
from deepspec.kernels import greedy_drafting
from deepspec.targets.sampling import PURPOSE_DRAFT, Sampling, pick, target_probs, uniform

_ROUND_SHIFT = 32  # positions stay below 2**32, so (round, position) is one integer
_CONTEXT_STEP = 64  # contexts are padded to multiples of this: few distinct shapes, so memory is reused


def draft_uniforms(seed: int, ids: Sequence[str], anchors: Sequence[int], rounds: Sequence[int], length: int) -> Tensor:
    """Random numbers [R, K] for the draft tokens after ``anchors``.

    The round is part of the key. A token drafted and discarded must not come from the number that drafts the same
    position again: schedules are made from confidences of discarded tokens, and would then know the next draft.
    """
    firsts = [(count << _ROUND_SHIFT) + anchor + 1 for anchor, count in zip(anchors, rounds)]
    positions = [first + k for first in firsts for k in range(length)]
    names = [name for name in ids for _ in range(length)]
    return uniform(seed, names, positions, PURPOSE_DRAFT).view(len(ids), length)


class TokenChooser:
    """Draws draft tokens of R requests and keeps the distributions they were drawn from.

    ``uniforms`` [R, K] choose the tokens; ids from ``tokenizer_size`` on have no token and are never proposed.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling, tokenizer_size: int) -> None:
        self._uniforms, self._sampling, self._tokenizer_size = uniforms, sampling, tokenizer_size
        self._at: list[Tensor] = []
        self._probs: Optional[Tensor] = None  # [K, R, V]: each position lies in one piece, and none is copied later

    def __call__(self, k: int, logits: Tensor) -> Tensor:
        """Ids [R] of draft token k from its logits [R, V], which are changed in place."""
        if self._tokenizer_size < logits.shape[-1]:
            logits[:, self._tokenizer_size:] = float("-inf")
        if self._sampling.temperature == 0:
            return logits.argmax(dim=-1)
        if self._probs is None:
            self._probs = logits.new_empty(self._uniforms.shape[1], *logits.shape, dtype=torch.float32)
        probs = target_probs(logits, self._sampling, out=self._probs[k])
        chosen = pick(probs, self._uniforms[:, k])
        self._at.append(probs.gather(1, chosen[:, None]))
        return chosen

    def proposal(self, rows: Sequence[int], anchors: Tensor, ids: Tensor, hidden: Tensor,
                 confidence: Optional[Tensor]) -> DraftProposal:
        """What was drawn: ids [R, K], from hidden states [R, K, D], with the confidence's logits [R, K] if any."""
        return DraftProposal(
            rows=tuple(rows), ids=ids,
            token_probs=torch.cat(self._at, dim=1) if self._at else torch.ones_like(self._uniforms).float(),
            probs=None if self._probs is None else self._probs[:len(self._at)].transpose(0, 1),
            confidence_logits=None if confidence is None else confidence.float(), hidden=hidden,
            previous_ids=torch.cat([anchors[:, None], ids[:, :-1]], dim=1),
        )


class DraftState:
    """Context keys and values (Eq. 3) of ``rows`` independent sequences, and proposals from them.

    Features of newly verified tokens are buffered by ``append`` and projected when a proposal needs them, all rows in
    one matmul; ``flush_tokens`` bounds what one row may buffer. The context of a proposal is exactly the positions
    before the anchor; with a sliding window W its last W, the only ones kept: position p then lies at slot p mod W.
    Keys carry their position, so their order in memory means nothing.
    """

    def __init__(self, drafter: Any, rows: int, *, tokenizer_size: int, capacity: int = 256,
                 flush_tokens: int = 256) -> None:
        self.drafter = drafter
        self.length: int = drafter.shape.draft_length
        self._window: Optional[int] = drafter.shape.sliding_window
        self.lengths: list[int] = [0] * rows  # projected context
        self._tokenizer_size = tokenizer_size
        self._flush_tokens = flush_tokens
        self._pending: list[list[Tensor]] = [[] for _ in range(rows)]
        self._buffered = [0] * rows
        self._capacity = max(1, capacity)
        self._keys: Optional[Tensor] = None  # [L, S, C, Hkv, hd], made when the first projection shows the shape
        self._values: Optional[Tensor] = None
        self._dtype, self._device = drafter.dtype, next(drafter.parameters()).device

    def context_length(self, row: int) -> int:
        """Tokens of ``row``'s context, projected or buffered."""
        return self.lengths[row] + self._buffered[row]

    def append(self, row: int, features: Tensor, next_ids: Sequence[int] = ()) -> None:
        """Add the features [n, M*D] of the next n verified tokens of ``row``; the ids that follow them are not needed.
        """
        self._pending[row].append(features)
        self._buffered[row] += len(features)

    def _kept(self, tokens: int) -> int:
        """How many of the last ``tokens`` of a context are kept."""
        return tokens if self._window is None else min(tokens, self._window)

    def settle(self) -> None:
        """Project rows that buffer more than the bound, so that a long stretch without drafting costs no memory."""
        full = [row for row, count in enumerate(self._buffered) if count > self._flush_tokens]
        if full:
            self._flush(full)

    def drop(self, row: int) -> None:
        """Forget ``row``; it can be used for another sequence at once."""
        self._pending[row].clear()
        self._buffered[row] = 0
        self.lengths[row] = 0

    def reserve(self, capacity: int) -> None:
        """Room for ``capacity`` tokens per row, doubling, or for the window."""
        capacity = self._kept(capacity)
        if self._keys is None or self._values is None or capacity <= self._keys.shape[2]:
            self._capacity = max(self._capacity, capacity)
            return
        self._capacity = max(capacity, self._kept(2 * self._keys.shape[2]))
        used = self._kept(max(self.lengths))
        grown = []
        for old in (self._keys, self._values):
            new = old.new_zeros(*old.shape[:2], self._capacity, *old.shape[3:])
            new[:, :, :used] = old[:, :, :used]
            grown.append(new)
        self._keys, self._values = grown

    @torch.no_grad()
    def _flush(self, rows: Sequence[int]) -> None:
        """Project the buffered features of ``rows`` (Eqs. 2 and 3) and store their keys and values."""
        rows = [row for row in rows if self._buffered[row]]
        if not rows:
            return
        ends = [self.context_length(row) for row in rows]
        counts = [self._kept(self._buffered[row]) for row in rows]
        parts = [torch.cat(self._pending[row])[-count:] for row, count in zip(rows, counts)]
        positions = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts)]).to(self._device)
        keys, values = self._project(torch.cat(parts).to(self._device, self._dtype), positions, rows, counts)
        self.reserve(max(ends))
        if self._keys is None or self._values is None:
            width = -(-self._kept(self._capacity) // _CONTEXT_STEP) * _CONTEXT_STEP
            shape = (keys.shape[0], len(self.lengths), width, *keys.shape[2:])
            # Zeros, not empty: masked slots still meet a multiplication.
            self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
        slots = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts)).to(self._device)
        places = positions if self._window is None else positions % self._window
        self._keys[:, slots, places] = keys
        self._values[:, slots, places] = values
        for row, end in zip(rows, ends):
            self._pending[row].clear()
            self._buffered[row] = 0
            self.lengths[row] = end

    def _project(self, features: Tensor, positions: Tensor, rows: Sequence[int],
                 counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values [L, n, Hkv, hd] of features [n, M*D]; ``counts[i]`` of them belong to ``rows[i]``."""
        return self.drafter.context_kv(self.drafter.project_context(features), positions)

    def _context(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [L, R, C, Hkv, hd] and how many are real [R]; views while the rows are neighbours."""
        assert self._keys is not None and self._values is not None
        lengths = [self._kept(self.lengths[row]) for row in rows]
        width = min(-(-max(lengths) // _CONTEXT_STEP) * _CONTEXT_STEP, self._keys.shape[2])
        chosen: Any = slice(rows[0], rows[-1] + 1)
        if list(rows) != list(range(rows[0], rows[-1] + 1)):
            chosen = torch.tensor(rows, device=self._device)
        counts = torch.tensor(lengths, device=self._device)
        return self._keys[:, chosen, :width], self._values[:, chosen, :width], counts

    @torch.no_grad()
    def propose(self, rows: Sequence[int], anchor_ids: Sequence[int], uniforms: Tensor,
                sampling: Sampling) -> DraftProposal:
        """Draft K tokens for each of ``rows`` after its anchor, whose position is the length of the row's context.

        ``uniforms`` [R, K] choose the tokens; ``sampling`` is the one verification will use, so that the distributions
        kept are those the tokens were drawn from.
        """
        self._flush(rows)
        keys, values, lengths = self._context(rows)
        anchors = torch.tensor(anchor_ids, device=self._device)
        positions = torch.tensor([self.lengths[row] for row in rows], device=self._device)
        hidden = self.drafter.block_hidden(anchors, positions, keys, values, lengths)  # [R, K, D]
        return self._sample_block(tuple(rows), anchors, hidden, uniforms.to(self._device), sampling)

    def _sample_block(self, rows: tuple[int, ...], anchors: Tensor, hidden: Tensor, uniforms: Tensor,
                      sampling: Sampling) -> DraftProposal:
        """Draw x_1..x_K one after the other, each from base logits plus the bias of its predecessor (Eq. 4)."""
        choose = TokenChooser(uniforms, sampling, self._tokenizer_size)
        fused = greedy_drafting(hidden.device, self._tokenizer_size) if sampling.temperature == 0 else None
        block = sample_block(self.drafter, anchors, hidden, choose, fused)
        return choose.proposal(rows, anchors, block.token_ids, hidden, block.confidence_logits)
