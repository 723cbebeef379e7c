"""Types shared by all drafters. N blocks, K draft tokens, D width, R rank of the sequential head, V vocabulary."""

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

from torch import Tensor

from deepspec.config.schema import is_autoregressive
from deepspec.drafters.v4.shape import V4Shape

QWEN3, GEMMA4 = "qwen3", "gemma4"
BLOCKS = (QWEN3, GEMMA4)


@dataclass(frozen=True)
class DrafterShape:
    """Everything that decides a drafter's parameters and arithmetic; written to checkpoints and exports."""

    algorithm: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    block_size: int
    sample_from_anchor: bool
    head: str
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool
    mask_token_id: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    target_model_type: str
    final_logit_softcap: Optional[float] = None
    embed_scale: float = 1.0  # factor on embeddings (Gemma: sqrt of the width)
    logit_scale: float = 1.0  # factor on the LM head's logits, before any softcap (Granite)
    sliding_window: Optional[int] = None  # context tokens before its anchor that a block sees; None: all
    unroll: Optional[int] = None  # steps an autoregressive drafter is trained for; None: the draft length
    block: str = "qwen3"  # kind of decoder layers: qwen3 | gemma4
    keys_are_values: bool = False  # gemma4: values are made of the keys' projection
    draft_ids: Optional[tuple[int, ...]] = None  # target ids that it proposes, ascending; None: all
    v4: Optional[V4Shape] = None  # dspark_v4: sizes of its stages

    @property
    def draft_length(self) -> int:
        """Draft tokens per block, gamma."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def trained_length(self) -> int:
        """Tokens of a block that training teaches, K: gamma, unless a chain is unrolled by another number of steps."""
        return self.draft_length if self.unroll is None else self.unroll

    @property
    def attention_scale(self) -> Optional[float]:
        """Factor on the scores of the drafter's attention; None: 1 / sqrt(head_dim)."""
        return 1.0 if self.block == GEMMA4 else None

    @property
    def autoregressive(self) -> bool:
        """Whether draft tokens come one pass of the drafter after the other, from its own hidden states."""
        return is_autoregressive(self.algorithm)


@dataclass(frozen=True)
class SharedWeights:
    """The target's embedding and LM head, used frozen. Plain tensors, not parameters: no optimizer state, no
    ZeRO partition, not in checkpoints."""

    embed: Tensor  # [V, D]
    lm_head: Tensor  # [V, D]
    fingerprint: str  # of the target they come from
    tokens: Optional[int] = None  # rows from here on have no token (padding) and no probability; None: all have one


@dataclass(frozen=True)
class DrafterOutput:
    """What a teacher-forced training pass returns; logits are never part of it."""

    hidden: Tensor  # [N, K, D] h_k, after the drafter's final norm, of the slots that predict
    transition: Optional[Tensor]  # [N, K, R]: B_k = transition @ W_2^T (Eqs. 4-6); None without a head
    output_factor: Optional[Tensor]  # [V, R] W_2
    confidence_logits: Optional[Tensor]  # [N, K] before the sigmoid of Eq. 7
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # detached, of this pack; added up over the window
