"""Confidence head: how likely is draft token k to survive verification, given that all before it did."""

from typing import Optional

import torch
from torch import Tensor, nn

from deepspec.drafters.precision import exact


class ConfidenceHead(nn.Module):
    """One linear unit on the hidden state, and on the previous token's Markov embedding if ``rank`` > 0."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden_k: Tensor, embedded: Optional[Tensor]) -> Tensor:
        """Logit of ``c_k = sigma(w^T [h_k ; W_1[x_{k-1}]])`` (Eq. 7), float32 [...]; h_k [..., D], W_1[x] [..., r]."""
        inputs = hidden_k if embedded is None else torch.cat((hidden_k, embedded.to(hidden_k.dtype)), dim=-1)
        logits = self.proj(inputs).squeeze(-1)
        return exact(logits)
