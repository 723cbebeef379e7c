"""The drafter's side of decoding for autoregressive drafters: rows of verified positions, and chains of K steps.

S decoder rows, R rows of one proposal, K draft tokens, C context capacity, D width, V vocabulary.
"""

from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from deepspec.decoding.draft import DraftState, TokenChooser
from deepspec.decoding.types import DraftProposal
from deepspec.targets.sampling import Sampling


class RecurrentDraftState(DraftState):
    """``DraftState`` of a drafter whose rows also need the ids that follow them (drafters/autoregressive.py).

    Keys and values of verified positions always come from the target's features: what a chain computed from its own
    hidden states is thrown away with the chain, as engines do. The last row of a context is step 0 of the next chain.
    """

    def __init__(self, drafter: Any, rows: int, **options: Any) -> None:
        super().__init__(drafter, rows, **options)
        self._next_ids: list[list[int]] = [[] for _ in range(rows)]
        self._last: Optional[Tensor] = None  # [S, D] state of each context's last row

    def append(self, row: int, features: Tensor, next_ids: Sequence[int] = ()) -> None:
        """Add the features [n, M*D] of the next n verified tokens of ``row`` and the n ids one position later."""
        if len(next_ids) != len(features):
            raise ValueError(f"{len(features)} rows of features need as many ids that follow them, not {len(next_ids)}")
        super().append(row, features)
        self._next_ids[row].extend(next_ids)

    def drop(self, row: int) -> None:
        """Forget ``row``; it can be used for another sequence at once."""
        super().drop(row)
        self._next_ids[row].clear()

    def _project(self, features: Tensor, positions: Tensor, rows: Sequence[int],
                 counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([token for row in rows for token in self._next_ids[row]], device=self._device)
        states = self.drafter.project_context(features)
        keys, values = self.drafter.context_kv(states, ids, positions)
        if self._last is None:
            self._last = states.new_zeros(len(self.lengths), states.shape[1])
        ends = torch.tensor(counts, device=self._device).cumsum(0) - 1
        self._last[torch.tensor(rows, device=self._device)] = states[ends]
        for row in rows:
            self._next_ids[row].clear()
        return keys[None], values[None]

    @torch.no_grad()
    def propose(self, rows: Sequence[int], anchor_ids: Sequence[int], uniforms: Tensor,
                sampling: Sampling) -> DraftProposal:
        """Draft K tokens for each of ``rows`` after its anchor, one pass of the drafter per token.

        The anchor follows the row's last feature. ``uniforms`` [R, K] choose the tokens; ``sampling`` is the one
        verification will use, so that the distributions kept are those the tokens were drawn from.
        """
        self._flush(rows)
        keys, values, lengths = self._context(rows)
        assert self._last is not None
        anchors = previous = torch.tensor(anchor_ids, device=self._device)
        states = self._last[torch.tensor(rows, device=self._device)]
        chains = self.drafter.open_chains(keys[0], values[0], lengths - 1)
        choose = TokenChooser(uniforms.to(self._device), sampling, self._tokenizer_size)
        tokens: list[Tensor] = []
        hidden: list[Tensor] = []
        for step in range(self.length):
            hidden_k, states = self.drafter.draft_step(chains, step, states, previous)
            previous = choose(step, self.drafter.base_logits(hidden_k))
            tokens.append(previous)
            hidden.append(hidden_k)
        return choose.proposal(rows, anchors, torch.stack(tokens, dim=1), torch.stack(hidden, dim=1), None)


def draft_state(drafter: Any, rows: int, *, tokenizer_size: int, capacity: int) -> DraftState:
    """The state of ``rows`` sequences that ``drafter``'s algorithm needs."""
    kind = RecurrentDraftState if drafter.shape.autoregressive else DraftState
    return kind(drafter, rows, tokenizer_size=tokenizer_size, capacity=capacity)
