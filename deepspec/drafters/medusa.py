"""Medusa: K residual heads on the target's last hidden state, each in front of the target's own LM head.

``h_k = h + SiLU(W_k h + b_k)`` (once per residual block of a head); head k predicts the token k places behind the
anchor from the state that made the anchor, h of the position before it. No head knows what another one drafts, and none
reads the anchor: the simplest drafter, a baseline. Names and arithmetic are those that vLLM's ``MedusaModel`` loads
with ``original_lm_head``. T rows, N blocks, R requests, K draft tokens, C padded context length, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.base import Drafter
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights


class MedusaHead(nn.Module):
    """Residual blocks of one draft token; they start as the identity, as the published heads do."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        for weights in self.layers.parameters():
            nn.init.zeros_(weights)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] in and out."""
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class MedusaDrafter(Drafter):
    """One head for each draft token. The context is the last verified position alone (``sliding_window`` 1)."""

    sequential = markov_head = confidence_head = None

    def __init__(self, shape: DrafterShape, shared: SharedWeights, *, confidence_detach: bool = False,
                 **options: Any) -> None:
        """``confidence_detach`` is taken, like every drafter's options, and has nothing to detach."""
        super().__init__(shape, shared, **options)
        self.blocks = nn.ModuleList([MedusaHead(shape.hidden_size, shape.num_layers) for _ in range(shape.block_size)])

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The heads, under the name that engines load."""
        return self.blocks

    def forward(self, batch: TrainingBatch) -> DrafterOutput:
        """Heads of all blocks of a pack; makes no logits. An anchor at the very first token starts from zeros."""
        blocks = batch.blocks
        begins = blocks.anchor_rows > blocks.context_starts
        rows = torch.where(begins, blocks.anchor_rows - 1, blocks.context_starts)
        states = self.project_context(batch.features)[rows] * begins[:, None].to(self.dtype)
        return DrafterOutput(self._heads(states), None, None, None)

    def project_context(self, features: Tensor) -> Tensor:
        """The last hidden states [T, D] as they are."""
        return features.to(self.dtype)

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What decoding keeps of a context: the states, [1, T, 1, D], twice."""
        kept = context[None, :, None]
        return kept, kept

    def block_hidden(
        self, anchor_ids: Tensor, anchor_positions: Tensor, keys: Tensor, values: Tensor, context_lengths: Tensor,
    ) -> Tensor:
        """h_k [R, K, D] of one block per request, from the last real row of ``values`` [1, R, C, 1, D]."""
        rows = torch.arange(len(context_lengths), device=values.device)
        known = (context_lengths > 0)[:, None].to(values.dtype)
        return self._heads(values[0, rows, (context_lengths - 1).clamp(min=0), 0] * known)

    def _heads(self, states: Tensor) -> Tensor:
        """[N, D] to [N, K, D]."""
        return torch.stack([head(states) for head in self.blocks], dim=1)
