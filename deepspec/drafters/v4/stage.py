"""One stage of the backbone: attention and experts, each inside a site of hyper-connections.

T context rows, N blocks, S slots, n streams, D width, E experts. Names are those of the release, ``mtp.{i}.`` left out.
"""

from typing import Callable

import torch
from torch import Tensor, nn

from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.types import DrafterShape
from deepspec.drafters.v4.attention import V4Attention
from deepspec.drafters.v4.experts import Experts, SharedExpert
from deepspec.drafters.v4.rotary import Angles
from deepspec.drafters.v4.router import Router, expert_load
from deepspec.drafters.v4.streams import collapse, expand, mixing
from deepspec.drafters.v4.window import WindowPlan


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and the shared one."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = SharedExpert(shape)

    def forward(self, states: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Output [..., D] of states [..., D], and the loads [E] that the ``counted`` [...] of them make."""
        flat = states.flatten(0, -2)
        chosen, weights = self.gate(flat)
        found = self.experts(flat, chosen, weights).view(states.shape) + self.shared_experts(states)
        return found, expert_load(chosen, counted.flatten(), len(self.gate.bias))


class V4Stage(nn.Module):
    """``X -> X'`` around attention, then around the experts. The context enters attention without a norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.v4 is not None
        self.of, self.eps = shape.v4, shape.rms_norm_eps
        count, width = shape.v4.hc_mult, shape.hidden_size
        weights = (2 + count) * count
        self.attn = V4Attention(shape)
        self.attn_norm = RMSNorm(width, self.eps)
        self.ffn = MixtureOfExperts(shape)
        self.ffn_norm = RMSNorm(width, self.eps)
        self.hc_attn_fn = nn.Parameter(torch.empty(weights, count * width))
        self.hc_attn_base = nn.Parameter(torch.zeros(weights))
        self.hc_attn_scale = nn.Parameter(torch.ones(3))
        self.hc_ffn_fn = nn.Parameter(torch.empty(weights, count * width))
        self.hc_ffn_base = nn.Parameter(torch.zeros(weights))
        self.hc_ffn_scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor, context: Tensor, angles: Angles, plan: WindowPlan,
                counted: Tensor) -> tuple[Tensor, Tensor]:
        """Training: streams [N, S, n, D] and loads [E] of ``counted`` [N, S] slots; see ``V4Attention.forward``."""
        return self._run(streams, lambda states: self.attn(states, context, angles, plan), counted)

    def draft(self, streams: Tensor, angles: Angles, rows: Tensor, seen: Tensor) -> Tensor:
        """Drafting: streams [R, S, n, D]; see ``V4Attention.draft``."""
        counted = torch.zeros(streams.shape[:2], dtype=torch.bool, device=streams.device)
        return self._run(streams, lambda states: self.attn.draft(states, angles, rows, seen), counted)[0]

    def _run(self, streams: Tensor, attend: Callable[[Tensor], Tensor], counted: Tensor) -> tuple[Tensor, Tensor]:
        site = mixing(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.of, self.eps)
        streams = expand(streams, attend(self.attn_norm(collapse(streams, site.pre))), site)
        site = mixing(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.of, self.eps)
        branch, load = self.ffn(self.ffn_norm(collapse(streams, site.pre)), counted)
        return expand(streams, branch, site), load
