"""Attention of a stage: low-rank queries and output, one rotated row per position as key and value, sinks.

T context rows, N blocks, S slots, D width, A heads of width hd in G groups. Module names are those of the release.
"""

import torch
from torch import Tensor, nn

from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterShape
from deepspec.drafters.v4.rotary import Angles, turn
from deepspec.drafters.v4.window import WindowPlan, cached_window_attention, window_attention


class GroupedLinear(nn.Linear):
    """Block-diagonal projection: weight [G*o, i] of G groups of i inputs and o outputs each."""

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__(inputs, groups * outputs, bias=False)
        self.groups = groups

    def forward(self, states: Tensor) -> Tensor:
        """[..., G*i] in, [..., G*o] out."""
        grouped = states.unflatten(-1, (self.groups, self.in_features)).flatten(0, -3).transpose(0, 1)
        weight = self.weight.view(self.groups, -1, self.in_features)
        found = torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1)
        return found.reshape(*states.shape[:-1], self.out_features)


class V4Attention(nn.Module):
    """``wq_a``, ``wq_b`` make the queries, ``wkv`` the rows, ``wo_a``, ``wo_b`` the output."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.v4 is not None
        of, width, eps = shape.v4, shape.hidden_size, shape.rms_norm_eps
        inner = shape.num_heads * shape.head_dim
        self.head_dim, self.eps = shape.head_dim, eps
        self.wq_a = nn.Linear(width, of.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(of.q_lora_rank, eps)
        self.wq_b = nn.Linear(of.q_lora_rank, inner, bias=False)
        self.wkv = nn.Linear(width, shape.head_dim, bias=False)
        self.kv_norm = RMSNorm(shape.head_dim, eps)
        self.wo_a = GroupedLinear(of.o_groups, inner // of.o_groups, of.o_lora_rank)
        self.wo_b = nn.Linear(of.o_groups * of.o_lora_rank, width, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(shape.num_heads))

    def queries(self, states: Tensor, angles: Angles) -> Tensor:
        """Queries [..., A, hd] of ``states`` [..., D], each head normalised without a weight, RoPE applied."""
        heads = self.wq_b(self.q_norm(self.wq_a(states))).unflatten(-1, (-1, self.head_dim))
        wide = exact(heads)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return turn(normed.to(heads.dtype), angles)

    def rows(self, states: Tensor, angles: Angles) -> Tensor:
        """Key and value rows [..., hd] of ``states`` [..., D], RoPE applied."""
        return turn(self.kv_norm(self.wkv(states))[..., None, :], angles).squeeze(-2)

    def _output(self, attended: Tensor, angles: Angles) -> Tensor:
        """Output [..., D] of heads [..., A, hd]; the rotation that values carry is turned back to the query's place."""
        return self.wo_b(self.wo_a(turn(attended, angles, -1.0).flatten(-2)))

    def forward(self, states: Tensor, context: Tensor, angles: Angles, plan: WindowPlan) -> Tensor:
        """Training: ``states`` [N, S, D] of the blocks of a pack with context [T, D]; angles of T + N*S positions."""
        count, slots, _ = states.shape
        own = tuple(part[len(context):].unflatten(0, (count, slots)) for part in angles)
        # One call for both halves: a module used twice in a pass costs ZeRO-3 a second gather.
        rows = self.rows(torch.cat((context, states.flatten(0, 1))), angles)
        attended = window_attention(
            self.queries(states, (own[0], own[1])), rows[:len(context)],
            rows[len(context):].view(count, slots, self.head_dim), self.attn_sink, plan)
        return self._output(attended, (own[0], own[1]))

    def draft(self, states: Tensor, angles: Angles, context_rows: Tensor, seen: Tensor) -> Tensor:
        """Drafting: ``states`` [R, S, D] with cached context rows [R, C, hd], of which ``seen`` [R, C] count."""
        attended = cached_window_attention(
            self.queries(states, angles), context_rows, self.rows(states, angles), self.attn_sink, seen)
        return self._output(attended, angles)
