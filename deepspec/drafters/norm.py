"""Root-mean-square norm that keeps its input and one number per row for the backward pass, not the normalised copy."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspec.drafters.precision import exact


def _plain(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = exact(states)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(states.dtype)


def unit_norm(states: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm without weights: [..., width] in, the same shape and dtype out."""
    wide = exact(states)
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(states.dtype)


class _Normalise(torch.autograd.Function):
    """``_plain`` in fewer passes over memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = exact(states)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(states.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(states, weight, scale)
        return (wide * scale).to(states.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weight, scale = ctx.saved_tensors
        width = states.shape[-1]
        normed, grad, wide_weight = exact(states) * scale, exact(grad), exact(weight)
        product = grad * normed
        grad_weight = product.reshape(-1, width).sum(dim=0)  # as many key heads as query heads: a transposed gradient
        mean = (product @ wide_weight).div_(width)[..., None]  # of the gradient along the row itself
        grad_states = (grad * wide_weight).addcmul_(normed, mean, value=-1.0).mul_(scale)
        return grad_states.to(states.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] in, the same shape and dtype out."""
        if torch.compiler.is_compiling() or states.dtype != self.weight.dtype:
            return _plain(states, self.weight, self.eps)
        return _Normalise.apply(states, self.weight, self.eps)
