"""Sequential heads: a prefix-dependent bias B_k on the base logits U_k (Eqs. 4-6), all of the form transition @ W_2^T.

N blocks or R requests, K draft tokens, D width, r rank, V vocabulary. Training calls ``transitions`` on all positions
(teacher forced), drafting calls ``step`` token by token; both give the same numbers.
"""

from dataclasses import dataclass
from typing import Callable, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterShape

State = Optional[Tensor]


class OutputFactor(nn.Linear):
    """W_2. Called without an argument it returns the weight, so that ZeRO-3 has gathered it for whoever reads it."""

    def forward(self, transition: Optional[Tensor] = None) -> Tensor:
        """Bias [..., V] of ``transition`` [..., r], or the weight [V, r]."""
        if transition is not None:
            return functional.linear(transition, self.weight)
        # A partitioned parameter is emptied again after this call; the copy stays.
        return self.weight.clone() if hasattr(self.weight, "ds_id") else self.weight


class MarkovHead(nn.Module):
    """Memoryless head: the bias depends on the previous token only."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = OutputFactor(rank, vocab_size, bias=False)

    def initial_state(self, count: int) -> State:
        """State before the first draft token of ``count`` requests."""
        return None

    def embed(self, previous_ids: Tensor) -> Tensor:
        """``W_1[x_{k-1}]`` [..., r] of int64 ids [...]."""
        return self.markov_w1(previous_ids)

    def step(self, state: State, previous_ids: Tensor, hidden_k: Tensor) -> tuple[Tensor, State]:
        """Transition [R, r] and next state from previous ids [R] and h_k [R, D]."""
        return self.embed(previous_ids), state

    def transitions(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced transitions [N, K, r] of previous ids [N, K] and hidden states [N, K, D]."""
        return self.step(None, previous_ids, hidden)[0]

    def bias(self, transition: Tensor) -> Tensor:
        """``B_k`` [..., V], float32 at least, of ``transition`` [..., r]."""
        return exact(self.markov_w2(transition))

    def transition_bias(self, previous_ids: Tensor) -> Tensor:
        """``B(x_{k-1}, .) = W_1[x_{k-1}] W_2`` (Eq. 5): [..., V] of ids [...]."""
        return self.bias(self.embed(previous_ids))

    def output_factor(self) -> Tensor:
        """W_2 [V, r] for a caller that does the product itself."""
        return self.markov_w2()


class GatedHead(MarkovHead):
    """Markov head whose transition is gated by the hidden state: ``sigmoid(W [h_k ; W_1[x]]) * W_1[x]``."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, state: State, previous_ids: Tensor, hidden_k: Tensor) -> tuple[Tensor, State]:
        """Transition [..., r] from previous ids [...] and h_k [..., D]; keeps no state."""
        embedded = self.embed(previous_ids)
        return torch.sigmoid(self.gate_proj(torch.cat((hidden_k, embedded), dim=-1))) * embedded, state

    def transition_bias(self, previous_ids: Tensor) -> Tensor:
        """Not a function of the previous token alone, so Eq. 5 does not apply: use ``step`` and ``bias``."""
        raise TypeError("the gated head's bias depends on the hidden state: call step(), then bias()")


class RNNHead(MarkovHead):
    """Recurrent head: a gated state of the whole prefix."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)  # W_g, W_c, W_o

    def initial_state(self, count: int) -> State:
        """s_0 = 0, [count, r]."""
        weight = self.markov_w1.weight
        return torch.zeros(count, self.rank, dtype=weight.dtype, device=weight.device)

    def step(self, state: State, previous_ids: Tensor, hidden_k: Tensor) -> tuple[Tensor, State]:
        """``s_k = g * s_{k-1} + (1 - g) * tanh(W_c z)``, ``B_k = W_2^T tanh(W_o z)``, ``g = sigma(W_g z)`` (Eq. 6).

        ``z = [s_{k-1} ; W_1[x_{k-1}] ; h_k]``. Returns ``tanh(W_o z)`` [R, r] and s_k [R, r].
        """
        assert state is not None  # of initial_state
        joint = torch.cat((state, self.embed(previous_ids), hidden_k), dim=-1)
        gate, candidate, output = self.joint_proj(joint).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def transitions(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced transitions [N, K, r], unrolled over the K positions."""
        state, found = self.initial_state(len(hidden)), []
        for position in range(hidden.shape[1]):
            transition, state = self.step(state, previous_ids[:, position], hidden[:, position])
            found.append(transition)
        return torch.stack(found, dim=1)

    def transition_bias(self, previous_ids: Tensor) -> Tensor:
        """Not a function of the previous token alone, so Eq. 5 does not apply: use ``step`` and ``bias``."""
        raise TypeError("the RNN head's bias depends on the whole prefix: call step(), then bias()")


HEADS: dict[str, Optional[type[MarkovHead]]] = {
    "none": None, "vanilla": MarkovHead, "gated": GatedHead, "rnn": RNNHead,
}


def build_head(shape: DrafterShape) -> Optional[MarkovHead]:
    """The sequential head ``shape.head`` names, None for "none"."""
    head = HEADS[shape.head]
    return None if head is None else head(shape.vocab_size, shape.markov_rank, shape.hidden_size)


def block_log_probs(base_logits: Tensor, bias: Optional[Tensor]) -> Tensor:
    """``log p_k(v | x_0, x_<k) = log softmax(U_k + B_k(x_0, x_<k, .))`` (Eq. 4): [..., V], float32 at least."""
    logits = base_logits if bias is None else base_logits + bias
    return functional.log_softmax(exact(logits), dim=-1)


class BlockDrafter(Protocol):
    """What ``sample_block`` needs of a drafter."""

    @property
    def sequential(self) -> Optional[MarkovHead]:
        """The sequential head."""

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U_k."""

    def confidence(self, hidden_k: Tensor, previous_ids: Tensor) -> Optional[Tensor]:
        """Logit of c_k."""


@dataclass(frozen=True)
class DraftBlock:
    """Drafted tokens of R requests."""

    token_ids: Tensor  # [R, K] int64
    confidence_logits: Optional[Tensor]  # [R, K] float32


def sample_block(
    drafter: BlockDrafter, anchor_ids: Tensor, hidden: Tensor, choose: Callable[[int, Tensor], Tensor],
    fused: Optional[Callable[[Tensor, Tensor, Tensor], Tensor]] = None,
) -> DraftBlock:
    """Draft K tokens one after another from ``hidden`` [R, K, D] of one parallel pass.

    ``choose(k, logits)`` gets the logits U_k + B_k [R, V] (float32, temperature 1) of draft token k (0-based) and
    returns the ids [R] to go on with; it is where temperature, padded ids and random numbers come in.
    ``fused(U_k, transition [R, r], W_2)`` takes the place of bias and choice where there is a sequential head.
    """
    head, previous = drafter.sequential, anchor_ids
    state = None if head is None else head.initial_state(len(anchor_ids))
    # One product over all positions reads the LM head once; for many requests its result is what costs memory.
    together = drafter.base_logits(hidden) if len(anchor_ids) <= 64 else None
    tokens, confidences = [], []
    for position in range(hidden.shape[1]):
        hidden_k = hidden[:, position]
        logits = drafter.base_logits(hidden_k) if together is None else together[:, position]
        confidences.append(drafter.confidence(hidden_k, previous))
        if head is not None:
            transition, state = head.step(state, previous, hidden_k)
            if fused is None:
                logits = logits + head.bias(transition)
        if head is not None and fused is not None:
            previous = fused(logits, transition, head.output_factor())
        else:
            previous = choose(position, logits)
        tokens.append(previous)
    known = [logits for logits in confidences if logits is not None]  # all of them, or none
    return DraftBlock(torch.stack(tokens, dim=1), torch.stack(known, dim=1) if known else None)
