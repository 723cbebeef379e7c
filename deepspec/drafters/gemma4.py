"""Decoder layers of the Gemma4-shaped drafter (``Gemma4DSparkModel``), for targets of that family.

Other than in the Qwen3-shaped layers: norms before and after attention and feed-forward, scores that are not divided
by the root of the head width, values normalised without weights and (``keys_are_values``) made of the keys' own
projection, GELU. Norm weights are plain factors, not ``1 + w``. Heads have the width and the number of the target's
full-attention layers. The published layers end in a factor ``layer_scalar`` that no training changes from 1, so there
is none here; exports hold it and imports check it (export/layout_gemma4.py).
"""

from torch import Tensor, nn
from torch.nn import functional

from deepspec.drafters.attention import ContextPlan
from deepspec.drafters.backbone import Angles, DraftAttention, DraftLayer, DraftMLP
from deepspec.drafters.norm import RMSNorm, unit_norm
from deepspec.drafters.rope import rotate
from deepspec.drafters.types import DrafterShape


class Gemma4Attention(DraftAttention):
    """Norms on queries, keys and values of each head; scores as they are (``DrafterShape.attention_scale``)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        self.keys_are_values = shape.keys_are_values
        if self.keys_are_values:
            del self.v_proj

    def keys_values(self, states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys (RoPE applied) and values (without RoPE) [..., Hkv, hd] of ``states`` [..., D]."""
        keys = self.k_proj(states).unflatten(-1, (-1, self.head_dim))
        values = keys if self.keys_are_values else self.v_proj(states).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(keys), angles), unit_norm(values, self.k_norm.eps)


class Gemma4MLP(DraftMLP):
    """Feed-forward gated by GELU in its tanh form."""

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] in and out."""
        return self.down_proj(functional.gelu(self.gate_proj(states), approximate="tanh") * self.up_proj(states))


class Gemma4Layer(DraftLayer):
    """Norms on both sides of attention and feed-forward. The context enters attention without the layer's norm."""

    def __init__(self, shape: DrafterShape) -> None:
        nn.Module.__init__(self)
        self.self_attn = Gemma4Attention(shape)
        self.mlp = Gemma4MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, states: Tensor, context: Tensor, angles: Angles, plan: ContextPlan) -> Tensor:
        """Training pass over ``states`` [N, S, D]; see ``DraftAttention.forward``."""
        attended = self.self_attn(self.input_layernorm(states), context, angles, plan)
        return self._feed_forward(states + self.post_attention_layernorm(attended))

    def draft(self, states: Tensor, angles: Angles, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Drafting pass over ``states`` [R, S, D]; see ``DraftAttention.draft``."""
        attended = self.self_attn.draft(self.input_layernorm(states), angles, keys, values, lengths)
        return self._feed_forward(states + self.post_attention_layernorm(attended))

    def _feed_forward(self, states: Tensor) -> Tensor:
        return states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
