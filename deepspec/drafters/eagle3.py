"""EAGLE-3: several layers of the target fused into a state, one layer, its output before the final norm fed back.

Names, shapes and arithmetic are those of the checkpoints that vLLM serves (``Eagle3Qwen3ForCausalLM``, every norm flag
false). T rows, M feature layers, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.drafters.autoregressive import AutoregressiveDrafter, RecurrentLayer
from deepspec.drafters.backbone import initialise
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.types import DrafterShape, SharedWeights


class Eagle3Layer(RecurrentLayer):
    """Attention reads ``[RMSNorm(embedding) ; RMSNorm(state)]``; the residual is the state itself."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape, input_size=2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Input of attention [..., 2*D] and residual [..., D]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1), states


class Eagle3Drafter(AutoregressiveDrafter):
    """EAGLE-3 with the full vocabulary, over the target's embedding and LM head."""

    def __init__(self, shape: DrafterShape, shared: SharedWeights, **options: Any) -> None:
        super().__init__(shape, shared, **options)
        width = shape.hidden_size
        self.fc = nn.Linear(len(shape.feature_layers) * shape.target_hidden_size, width, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        initialise(self)

    def project_context(self, features: Tensor) -> Tensor:
        """Fused states [T, D] of features [T, M*D]."""
        return self.fc(features.to(self.dtype))

    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The LM head reads the normed output; the next step takes it as it is."""
        return self.norm(output), output
