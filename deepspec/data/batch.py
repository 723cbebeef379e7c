"""What travels from the data to the drafter. Shapes: T packed tokens, N blocks, K draft tokens, M feature layers,
D target width.

A micro-batch is a *pack*: documents laid end to end on one token axis, no padding between them. Everything about a
token is addressed by its packed index, so a block can never reach into a neighbour.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from torch import Tensor

if TYPE_CHECKING:
    from deepspec.data.encoded import StoredStates


@dataclass(frozen=True)
class Sample:
    """One training conversation as the target saw it."""

    sample_id: str
    domain: str
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool: tokens the target generated


@dataclass(frozen=True)
class FeatureSample:
    """A sample with the target's hidden states."""

    sample: Sample
    features: Tensor  # [T, M*D] outputs of the chosen layers, side by side in ascending layer order
    last_hidden: Tensor  # [T, D] after the final norm; row t predicts token t+1; rows nobody needs may be zero


@dataclass(frozen=True)
class AnchorBlocks:
    """Blocks of one pack. Draft token j (0-based) at anchor p is the token at p+1+j."""

    anchor_rows: Tensor  # [N] int64, packed index of the anchor token
    context_starts: Tensor  # [N] int64, packed index of the first token of the anchor's document
    anchor_positions: Tensor  # [N] int64, position of the anchor within its document (absolute RoPE position)
    anchor_ids: Tensor  # [N] int64
    label_ids: Tensor  # [N, K] int64; 0 where mask is False
    previous_ids: Tensor  # [N, K] int64: [anchor, label_0, .., label_{K-2}], teacher forcing of the sequential head
    target_rows: Tensor  # [N, K] int64: packed row of last_hidden that predicts label j (p+j); p where mask is False
    mask: Tensor  # [N, K] bool: contiguous supervised prefix

    def __len__(self) -> int:
        return self.anchor_rows.shape[0]


@dataclass(frozen=True)
class TrainingBatch:
    """One pack of one micro-step."""

    sample_ids: tuple[str, ...]
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, within the document
    document_starts: tuple[int, ...]  # packed index of each document's first token (padding is one, too), then T
    features: Tensor  # [T, M*D]
    last_hidden: Tensor  # [T, D]
    blocks: AnchorBlocks
    epoch: int = 0
    states: Optional["StoredStates"] = None  # not decoded yet; then features and last_hidden are [T, 0]
    padding: int = 0  # tokens at the end that belong to no sample
