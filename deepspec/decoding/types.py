"""What goes into decoding and what comes out. R rows, K draft tokens of a block, V vocabulary, D drafter width."""

from dataclasses import dataclass
from typing import Optional

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class DecodeRequest:
    """One prompt. ``id`` also selects its random numbers, so it must be unique within a run."""

    id: str
    prompt_ids: tuple[int, ...]
    domain: str = "chat"
    max_new_tokens: Optional[int] = None  # None: the decoder's


@dataclass(frozen=True)
class BlockDetail:
    """What the confidence stage needs of one drafted block; kept only when the decoder records."""

    analytic_rate: NDArray[np.float32]  # [K] Eq. 8 at the drafted prefix, NaN where the target has no distribution
    hidden: NDArray[np.float16]  # [K, D] h_k
    previous_ids: NDArray[np.int64]  # [K] x_{k-1}: the anchor, then the drafted tokens


@dataclass(frozen=True)
class RoundRecord:
    """One round of one request: propose, verify, keep. The prefill, which yields the first token, is not a round.

    A draft token that ends the answer is the last one that counts: what follows it is neither accepted nor known, and
    there is no bonus token.
    """

    drafted: int  # tokens proposed, 0 if the drafter was not run
    verified: int  # of these, tokens sent to the target, l_r
    known: int  # leading positions whose outcome counts: verified, or up to an accepted end-of-turn token
    accepted: int  # draft tokens kept
    bonus: int  # 1: the target added a token (bonus or residual); 0: an accepted end-of-turn token ended the answer
    confidence_logits: Optional[NDArray[np.float32]] = None  # [K] before the sigmoid of Eq. 7
    detail: Optional[BlockDetail] = None


@dataclass(frozen=True)
class DecodeResult:
    """A finished answer."""

    id: str
    domain: str
    prompt_tokens: int
    token_ids: tuple[int, ...]  # generated, with the end-of-turn token if there was one
    finish_reason: str  # stop | length
    rounds: tuple[RoundRecord, ...]
    seconds: float  # from the row's first prefill step to its last token


@dataclass(frozen=True)
class DraftProposal:
    """Draft tokens of one round, with the distributions they were drawn from."""

    rows: tuple[int, ...]  # decoder rows, in the order of the first axis
    ids: Tensor  # [R, K] int64
    token_probs: Tensor  # [R, K] float32, p_d of the drawn token; 1 at temperature 0
    probs: Optional[Tensor]  # [R, K, V] float32 p_d after temperature, top-k and top-p; None at temperature 0 (one-hot)
    confidence_logits: Optional[Tensor]  # [R, K] float32; None without a confidence head
    hidden: Tensor  # [R, K, D]
    previous_ids: Tensor  # [R, K] int64


@dataclass
class DecodeTimings:
    """Where the time of one ``decode`` call went (s), and what it bought. Updated after every step."""

    draft_seconds: float = 0.0  # proposals and the choice of lengths
    verify_seconds: float = 0.0  # forward passes of the target and the acceptance rule
    total_seconds: float = 0.0  # all rounds; what the two above leave is bookkeeping on the host
    tokens: int = 0  # generated tokens, prefill's included
    steps: int = 0  # forward passes of the target
    draft_steps: int = 0  # of these, with a proposal
