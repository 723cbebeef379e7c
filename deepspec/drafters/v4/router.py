"""Which experts a token goes to, how evenly they are used, and the bias that evens it out.

M tokens, D width, E experts, k experts per token. The bias takes part in the choice alone, has no gradient, and is
moved once per optimizer step by the loads of the whole window over all ranks; balance is not forced by a loss term.
"""

from typing import Any, Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterShape


class Router(nn.Module):
    """Scores ``sqrt(softplus(W x))``; ``weight`` [E, D] is trained, ``bias`` [E] float32 is a buffer."""

    bias: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.v4 is not None
        self.experts_per_token, self.scaling = shape.v4.experts_per_token, shape.v4.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(shape.v4.num_experts, shape.hidden_size))
        self.register_buffer("bias", torch.zeros(shape.v4.num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A cast of the module leaves the bias in float32: its steps are far below bfloat16's resolution."""
        kept = self.bias
        super()._apply(fn, recurse)
        if kept.device != self.bias.device:
            kept = kept.to(self.bias.device) if not kept.is_meta else torch.empty_like(kept, device=self.bias.device)
        self.bias = kept
        return self

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [M, k] and their weights [M, k], float32 at least, of states [M, D].

        Chosen by score plus bias; weights are the scores without it, over their sum, times the scaling factor.
        """
        wide = exact(states)
        logits = functional.linear(wide, self.weight.to(wide.dtype))
        # The root's slope is infinite at 0, where softplus ends up for very small logits of whatever expert.
        scores = functional.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
        chosen = torch.topk(scores.detach() + self.bias, self.experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(dim=-1, keepdim=True) * self.scaling


def expert_load(chosen: Tensor, counted: Tensor, experts: int) -> Tensor:
    """Tokens of each expert [E] float64, of choices [M, k] of the tokens that are ``counted`` [M] bool."""
    load = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
    return load.index_add_(0, chosen.flatten(), counted.double().repeat_interleave(chosen.shape[1]))


@torch.no_grad()
def move_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """``bias += rate * sign(mean load - load)`` in place; loads [E] are those of the whole optimizer window."""
    load = load.to(bias.device)
    bias += rate * torch.sign(load.mean() - load).to(bias.dtype)


def load_statistics(load: Sequence[float], bias: Tensor) -> dict[str, float]:
    """How evenly one stage's experts are used.

    ``max_load``: tokens of the busiest expert over the mean; ``effective``: exp of the entropy of the shares, a number
    of experts; ``used``: share of experts with a token; ``bias_range``: largest minus smallest bias.
    """
    loads = torch.tensor(load, dtype=torch.float64)
    total = float(loads.sum())
    if total == 0.0:
        return {"max_load": 0.0, "effective": 0.0, "used": 0.0, "bias_range": float(bias.max() - bias.min())}
    shares = loads / total
    return {
        "max_load": float(loads.max() * len(loads) / total),
        "effective": float(torch.special.entr(shares).sum().exp()),
        "used": float((loads > 0).double().mean()), "bias_range": float(bias.max() - bias.min()),
    }
