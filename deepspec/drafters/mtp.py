"""MTP in the DeepSeek manner: the target's last hidden state and the next token's embedding through one block.

``h'_i = W [RMSNorm(h_i) ; RMSNorm(Emb(x_{i+1}))]``, then a decoder block and a norm of its own; the LM head is the
target's. h_i is the state after the target's final norm, the only feature layer of this drafter (the last layer's id).
More than one token is drafted by running the block again on its own normed output: weights are shared between depths,
as engines run a single module. Names, shapes and arithmetic are those of vLLM's ``MiMoMTP``, the dense class that a
Qwen3 or Llama target can borrow. T rows, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.drafters.autoregressive import AutoregressiveDrafter, RecurrentLayer
from deepspec.drafters.backbone import initialise
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.types import DrafterShape, SharedWeights


class MtpLayer(RecurrentLayer):
    """Two norms and a projection in front of a block with biases on queries, keys and values."""

    def __init__(self, shape: DrafterShape) -> None:
        width, eps = shape.hidden_size, shape.rms_norm_eps
        super().__init__(shape, input_size=width, bias=True)
        self.token_layernorm = RMSNorm(width, eps)
        self.hidden_layernorm = RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = RMSNorm(width, eps)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Input of attention and residual, both [..., D]."""
        joined = self.input_proj(torch.cat((self.hidden_layernorm(states), self.token_layernorm(embedded)), dim=-1))
        return self.input_layernorm(joined), joined


class MtpDrafter(AutoregressiveDrafter):
    """One MTP module, used for every depth."""

    def __init__(self, shape: DrafterShape, shared: SharedWeights, **options: Any) -> None:
        super().__init__(shape, shared, **options)
        self.model = nn.Module()
        self.model.mtp_layers = nn.ModuleList([MtpLayer(shape)])
        initialise(self)

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The one block, under the name that engines load."""
        layers: Any = self.model.mtp_layers
        return layers

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [..., D]; engines leave out that of the row at position 0."""
        return torch.where(positions[..., None] == 0, 0.0, self._embed(ids)).to(self.dtype)

    def project_context(self, features: Tensor) -> Tensor:
        """The last hidden states [T, D] as they are."""
        return features.to(self.dtype)

    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """LM head and next step both take the normed output."""
        layer: Any = self.layer
        hidden = layer.final_layernorm(output)
        return hidden, hidden
