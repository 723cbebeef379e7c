"""Parallel backbone of the drafter: context projection and Qwen3-style decoder layers.

T context rows, N blocks, S slots, D width, M feature layers, Hq / Hkv heads of width hd. Module names are those of the
published checkpoints.
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspec.drafters.attention import ContextPlan, inject_cached_context, inject_context
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.rope import rotate
from deepspec.drafters.types import DrafterShape

Angles = tuple[Tensor, Tensor]  # cos and sin of RotaryTable


@dataclass(frozen=True)
class ContextProjection:
    """Eq. 2 on two modules that the drafter owns under their published names."""

    fc: nn.Linear
    hidden_norm: RMSNorm

    def forward(self, features: Tensor) -> Tensor:
        """``H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)])`` (Eq. 2): features [T, M*D] to context [T, D]."""
        return self.hidden_norm(self.fc(features))


class DraftAttention(nn.Module):
    """Attention whose K/V projections serve context and block alike; norms on heads as in Qwen3.

    ``input_size`` of the projections is the drafter's width if not given, ``bias`` gives queries, keys and values one.
    """

    def __init__(self, shape: DrafterShape, input_size: Optional[int] = None, bias: bool = False) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = shape.head_dim, shape.sliding_window, shape.attention_scale
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        width = shape.hidden_size if input_size is None else input_size
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, states: Tensor, angles: Angles) -> Tensor:
        """Queries [..., Hq, hd] of ``states`` [..., D], RoPE applied."""
        return rotate(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), angles)

    def keys_values(self, states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys (RoPE applied) and values [..., Hkv, hd] of ``states`` [..., D]."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, angles), self.v_proj(states).unflatten(-1, (-1, self.head_dim))

    def forward(self, states: Tensor, context: Tensor, angles: Angles, plan: ContextPlan) -> Tensor:
        """Training: ``states`` [N, S, D] of the blocks of a pack with context [T, D]; angles of T + N*S positions."""
        count, slots, _ = states.shape
        cos, sin = (part[len(context):].unflatten(0, (count, slots)) for part in angles)
        # One call for both halves: a module used twice in a pass costs ZeRO-3 a second gather.
        keys, values = self.keys_values(torch.cat((context, states.flatten(0, 1))), angles)
        attended = inject_context(self.queries(states, (cos, sin)), keys, values, plan)
        return self.o_proj(attended.flatten(-2))

    def draft(self, states: Tensor, angles: Angles, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Drafting: ``states`` [R, S, D] with cached context keys and values [R, C, Hkv, hd]."""
        own_keys, own_values = self.keys_values(states, angles)
        attended = inject_cached_context(
            self.queries(states, angles), keys, values, own_keys, own_values, lengths, self.window, self.scale,
        )
        return self.o_proj(attended.flatten(-2))


class _Gate(torch.autograd.Function):
    """``silu(gate) * up``, keeping the two factors alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), functional.silu(gate).mul_(grad)


class DraftMLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] in and out."""
        gate, up = self.gate_proj(states), self.up_proj(states)
        return self.down_proj(functional.silu(gate) * up if torch.compiler.is_compiling() else _Gate.apply(gate, up))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer. The context enters attention as it is, without the layer's input norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape)
        self.mlp = DraftMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, states: Tensor, context: Tensor, angles: Angles, plan: ContextPlan) -> Tensor:
        """Training pass over ``states`` [N, S, D]; see ``DraftAttention.forward``."""
        attended = self.self_attn(self.input_layernorm(states), context, angles, plan)
        return self._feed_forward(states + attended)

    def draft(self, states: Tensor, angles: Angles, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Drafting pass over ``states`` [R, S, D]; see ``DraftAttention.draft``."""
        attended = self.self_attn.draft(self.input_layernorm(states), angles, keys, values, lengths)
        return self._feed_forward(states + attended)

    def _feed_forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(self.post_attention_layernorm(states))


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Initial values as Hugging Face gives them: matrices normal(0, std), biases 0, norms 1."""
    for child in module.modules():
        if isinstance(child, (nn.Linear, nn.Embedding)):
            nn.init.normal_(child.weight, std=std)
            if isinstance(child, nn.Linear) and child.bias is not None:
                nn.init.zeros_(child.bias)
        elif isinstance(child, RMSNorm):
            nn.init.ones_(child.weight)
