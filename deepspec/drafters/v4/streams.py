"""Manifold-constrained hyper-connections: n residual streams, mixed around every branch. All of it in float32 at least.

n streams, D width, any leading dimensions of tokens. A site has a projection ``fn`` [(2 + n) n, n D] of the flattened
and normalised streams, split as pre n | post n | comb n x n, a ``scale`` per part [3] and a ``base`` [(2 + n) n].
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.drafters.precision import exact
from deepspec.drafters.v4.shape import V4Shape


@dataclass(frozen=True)
class Mixing:
    """Weights of one site for every token."""

    pre: Tensor  # [..., n] of the streams in the branch's input
    post: Tensor  # [..., n] of the branch's output in the streams
    comb: Tensor  # [..., n, n] doubly stochastic; comb[j, k] is the part of stream j in new stream k


def _normalised(streams: Tensor, eps: float) -> Tensor:
    """Flattened streams [..., n*D] by their root mean square, without a weight."""
    flat = exact(streams).flatten(-2)
    return flat * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Columns first, then ``iterations - 1`` times rows and columns divided by their sums: [..., n, n]."""
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mixing(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, of: V4Shape, norm_eps: float) -> Mixing:
    """Weights of a site from the streams [..., n, D] that enter it."""
    count, eps = of.hc_mult, of.hc_eps
    flat = _normalised(streams, norm_eps)
    projected = functional.linear(flat, fn.to(flat.dtype))
    parts = (count, count, count * count)
    pre, post, comb = (part * factor + shift for part, factor, shift in zip(
        projected.split(parts, dim=-1), scale.to(flat.dtype).unbind(), base.to(flat.dtype).split(parts), strict=True))
    comb = torch.softmax(comb.unflatten(-1, (count, count)), dim=-1) + eps
    return Mixing(torch.sigmoid(pre) + eps, 2.0 * torch.sigmoid(post), sinkhorn(comb, of.hc_sinkhorn_iters, eps))


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """``sum_j w_j X_j`` [..., D] in the dtype of the streams [..., n, D]; the weights [..., n] need not sum to 1."""
    return (weights[..., None, :] @ exact(streams)).squeeze(-2).to(streams.dtype)


def expand(streams: Tensor, branch: Tensor, weights: Mixing) -> Tensor:
    """``X'_k = post_k y + sum_j C_jk X_j``: streams [..., n, D] and a branch's output y [..., D] to new streams."""
    mixed = weights.comb.transpose(-1, -2) @ exact(streams)
    return torch.addcmul(mixed, weights.post[..., None], exact(branch)[..., None, :]).to(streams.dtype)


class StreamHead(nn.Module):
    """The last streams to h: ``w = sigmoid(s (fn z) + b) + eps``, fn [n, n*D], b [n], s [1]."""

    def __init__(self, of: V4Shape, width: int, norm_eps: float) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.empty(of.hc_mult, of.hc_mult * width))
        self.base = nn.Parameter(torch.zeros(of.hc_mult))
        self.scale = nn.Parameter(torch.ones(1))
        self.eps, self.norm_eps = of.hc_eps, norm_eps

    def forward(self, streams: Tensor) -> Tensor:
        """h [..., D] of streams [..., n, D]."""
        flat = _normalised(streams, self.norm_eps)
        projected = functional.linear(flat, self.fn.to(flat.dtype))
        weights = torch.sigmoid(projected * self.scale.to(flat.dtype) + self.base.to(flat.dtype)) + self.eps
        return collapse(streams, weights)
