"""The mask of the drafter's attention, defined once: which context rows a block sees."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


def visible(rows: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """Whether context ``rows`` are seen by blocks with these ``Bounds``: bool, shapes broadcast."""
    return (rows >= first) & (rows < stop)


@dataclass(frozen=True)
class Bounds:
    """Context rows ``first[n] .. stop[n] - 1`` are seen by every slot of block n; besides those a slot sees exactly the
    slots of its own block, before and behind it. The window is counted from the anchor, not from the slot."""

    first: Tensor  # [N] int64
    stop: Tensor  # [N] int64, the anchor's row

    @classmethod
    def of(cls, anchor_rows: Tensor, context_starts: Tensor, window: Optional[int]) -> "Bounds":
        """Rows ``max(start, p - window) .. p - 1`` for anchors p [N] in documents that begin at ``start`` [N]."""
        if window is None:
            return cls(context_starts, anchor_rows)
        return cls(torch.maximum(context_starts, anchor_rows - window), anchor_rows)
