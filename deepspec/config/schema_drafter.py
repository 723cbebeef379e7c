"""Options of the drafter. See schema.py."""

from dataclasses import dataclass, field
from typing import Optional

from deepspec.config.schema_v4 import V4Config

AUTOREGRESSIVE = ("eagle3", "mtp")
ALGORITHMS = ("dspark", "dspark_v4", "dflash", "medusa", *AUTOREGRESSIVE)
ON_LAST_HIDDEN = ("mtp", "medusa")  # their only feature is the target's last hidden state
WITH_HEADS = ("dspark", "dspark_v4")  # sequential and confidence head


@dataclass
class DrafterConfig:
    """Architecture of the drafter (PAPER: parallel backbone, sequential head, confidence head)."""

    algorithm: str = "dspark"  # dspark | dspark_v4 | dflash | eagle3 | mtp | medusa
    block: str = "qwen3"  # decoder layers of dspark and dflash: qwen3 (any target) | gemma4 (Gemma 4 targets)
    num_layers: int = 5  # medusa: residual blocks of a head; eagle3 and mtp are one layer, whatever this says
    block_size: int = 7  # input slots of a block; with sample_from_anchor also the number of draft tokens
    sample_from_anchor: bool = True  # false: slot 0 predicts nothing, block_size - 1 draft tokens (published DFlash)
    head: str = "vanilla"  # none | vanilla (Markov, Eq. 5) | gated | rnn (Eq. 6)
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True  # Eq. 7 reads [h_k ; W_1[x_{k-1}]]; false reads h_k alone
    intermediate_size: Optional[int] = None  # null: the target's
    sliding_window: Optional[int] = None  # context tokens before its anchor that a block sees; null: all of them
    # tokens it may propose, the most frequent of the training data (vocabulary.py); null: all of the target's
    draft_vocab_size: Optional[int] = None
    warm_start: bool = False  # copy the target's last layers into the drafter's, and select the last feature in W_c
    init_from: Optional[str] = None  # folder of an exported drafter in DeepSpec layout to continue from
    # eagle3 and mtp: steps of its own hidden states that training unrolls from an anchor; null: block_size
    unroll: Optional[int] = None
    v4: V4Config = field(default_factory=V4Config)  # dspark_v4 only


def is_autoregressive(algorithm: str) -> bool:
    """Whether a drafter of this algorithm makes its draft tokens one pass after the other."""
    return algorithm in AUTOREGRESSIVE


def drafter_layers(drafter: DrafterConfig) -> int:
    """Decoder layers of the drafter."""
    return 1 if is_autoregressive(drafter.algorithm) else drafter.num_layers


def draft_length(drafter: DrafterConfig) -> int:
    """Number of draft tokens of one block, gamma."""
    return drafter.block_size if drafter.sample_from_anchor else drafter.block_size - 1
