"""Matrix products of the chunked loss with exact accumulation, whatever the weights' dtype and device."""

from typing import Iterator

import torch
from torch import Tensor

from deepspec.drafters.precision import accumulates_natively

SLAB_ROWS = 8192  # rows of a half-precision weight that are widened at a time on the CPU


def _slabs(weight: Tensor, exact: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """``weight`` [V, *] in the exact dtype, whole where it has that dtype, else a few rows at a time."""
    if weight.dtype == exact:
        yield slice(None), weight
        return
    for first in range(0, len(weight), SLAB_ROWS):
        rows = slice(first, min(first + SLAB_ROWS, len(weight)))
        yield rows, weight[rows].to(exact)


def project(rows: Tensor, weight: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out`` [m, V] = (or +=) ``rows`` [m, d] @ ``weight`` [V, d]^T, in out's dtype."""
    if accumulates_natively(weight):
        rows = rows.to(weight.dtype)
        if accumulate:
            torch.addmm(out, rows, weight.t(), out_dtype=out.dtype, out=out)
        else:
            torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        return
    rows = rows.to(out.dtype)
    for columns, slab in _slabs(weight, out.dtype):
        if accumulate:
            out[:, columns].addmm_(rows, slab.t())
        else:
            torch.mm(rows, slab.t(), out=out[:, columns])


def pull_back(grads: Tensor, weight: Tensor) -> Tensor:
    """``grads`` [m, V] @ ``weight`` [V, d] in the dtype of ``grads``."""
    if accumulates_natively(weight):
        return torch.mm(grads.to(weight.dtype), weight, out_dtype=grads.dtype)
    total = grads.new_zeros(len(grads), weight.shape[1])
    for columns, slab in _slabs(weight, grads.dtype):
        total.addmm_(grads[:, columns], slab)
    return total
