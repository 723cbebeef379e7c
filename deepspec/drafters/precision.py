"""Products in float32 of half-precision operands: a score or logit rounded to bfloat16 is off by up to 0.4 %."""

import torch
from torch import Tensor


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 tensors, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def exact(tensor: Tensor) -> Tensor:
    """``tensor`` in its exact dtype."""
    return tensor.to(exact_dtype(tensor))


def accumulates_natively(tensor: Tensor) -> bool:
    """Whether the device multiplies ``tensor`` in its half precision and returns the float32 sums."""
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.is_cuda and half and "dtype" in torch.ops.aten.bmm.overloads()


def exact_bmm(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * left @ right`` [b, m, n] of equal dtypes, in their exact dtype."""
    if accumulates_natively(left):
        product = torch.bmm(left, right, out_dtype=torch.float32)
        return product if scale == 1.0 else product.mul_(scale)
    left, right = exact(left), exact(right)
    if scale == 1.0:
        return torch.bmm(left, right)
    unread = left.new_empty(1, 1, 1).expand(len(left), left.shape[1], right.shape[2])  # beta = 0 ignores it
    return torch.baddbmm(unread, left, right, beta=0, alpha=scale)
