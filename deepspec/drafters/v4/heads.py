"""The two heads as the release has them: W_2 and the confidence weight in float32 beside a bfloat16 backbone."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.drafters.precision import exact
from deepspec.drafters.sequential import MarkovHead


class V4MarkovHead(MarkovHead):
    """Markov head whose two matrices need not have one dtype."""

    def bias(self, transition: Tensor) -> Tensor:
        """``B_k`` [..., V], float32 at least, of ``transition`` [..., r]."""
        return exact(self.markov_w2(transition.to(self.markov_w2.weight.dtype)))


class ExactLinear(nn.Linear):
    """A linear unit that computes in its input's dtype, whatever its weight's is."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(inputs, self.weight.to(inputs.dtype))


class PlainConfidenceHead(nn.Module):
    """One linear unit without bias on h_k before the last norm, and on the previous token's Markov embedding."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = ExactLinear(hidden_size + rank, 1, bias=False)

    def forward(self, hidden_k: Tensor, embedded: Optional[Tensor]) -> Tensor:
        """Logit of ``c_k = sigma(w^T [h_k ; W_1[x_{k-1}]])`` (Eq. 7), float32 [...]; h_k [..., D], W_1[x] [..., r]."""
        inputs = exact(hidden_k)
        if embedded is not None:
            inputs = torch.cat((inputs, embedded.to(inputs.dtype)), dim=-1)
        return self.proj(inputs).squeeze(-1)
