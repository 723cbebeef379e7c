"""Routed and shared experts on one rank, as few matrix products as there are experts with tokens.

M tokens, D width, E experts of width I, k experts per token, R = M*k routed rows. Rows are sorted by expert, each
expert multiplies its own contiguous rows, and the results go back through the inverse order. Memory grows with R alone:
no [M, E, capacity] masks, nothing dropped, nothing padded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspec.drafters.types import DrafterShape


def _fused(rows: Tensor, weight: Tensor) -> bool:
    """Whether one grouped kernel takes these: half precision on a GPU, rows that begin at 16 bytes."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor, fused: bool) -> Tensor:
    """Row blocks times matrices: rows [R, i] of which the first ``counts[0]`` belong to weight[0] [i, o], and so on."""
    if fused:
        return functional.grouped_mm(rows.contiguous(), weight, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    result = rows.new_empty(len(rows), weight.shape[2])
    parts = zip(sizes, rows.split(sizes), result.split(sizes), weight.unbind(), strict=True)
    for size, part, place, matrix in parts:
        if size:
            torch.mm(part, matrix, out=place)
    return result


class _GroupedLinear(torch.autograd.Function):
    """``grouped_product`` with transposed weights. An expert without rows gets a gradient of zeros, like all others:
    every rank then reduces the same parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return grouped_product(rows, weight.transpose(1, 2), counts, _fused(rows, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, counts = ctx.saved_tensors
        sizes, grad = counts.tolist(), grad.contiguous()
        grad_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        for size, part, outer, place in zip(sizes, rows.split(sizes), grad.split(sizes), grad_weight.unbind(),
                                            strict=True):
            if size:
                torch.mm(outer.t(), part, out=place)
        return grouped_product(grad, weight, counts, _fused(grad, weight)), grad_weight, None


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, any shape."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Experts(nn.Module):
    """E gated feed-forwards: gate ``w1`` and up ``w3`` [E, I, D], down ``w2`` [E, D, I], one tensor each."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.v4 is not None
        count, width, inner = shape.v4.num_experts, shape.hidden_size, shape.intermediate_size
        self.limit = shape.v4.swiglu_limit
        self.w1 = nn.Parameter(torch.empty(count, inner, width))
        self.w2 = nn.Parameter(torch.empty(count, width, inner))
        self.w3 = nn.Parameter(torch.empty(count, inner, width))

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum over a token's experts ``chosen`` [M, k], with ``weights`` [M, k], of states [M, D]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.w1))
        rows = states.index_select(0, order // chosen.shape[1])
        gate = _GroupedLinear.apply(rows, self.w1, counts)
        up = _GroupedLinear.apply(rows, self.w3, counts)
        found = _GroupedLinear.apply(clamped_swiglu(gate, up, self.limit), self.w2, counts)
        back = found.index_select(0, order.argsort()).view(*chosen.shape, states.shape[1])
        return (weights[:, None].to(back.dtype) @ back).squeeze(1)


class SharedExpert(nn.Module):
    """The expert that every token goes through, unscaled."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.v4 is not None
        self.limit = shape.v4.swiglu_limit
        self.w1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] in and out."""
        return self.w2(clamped_swiglu(self.w1(states), self.w3(states), self.limit))
