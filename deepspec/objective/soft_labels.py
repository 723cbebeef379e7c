"""Cross-entropy against the target's distribution (``objective.ce_labels=target``), in chunks; see chunked.py."""

import torch
from torch import Tensor

from deepspec.objective.chunked import ChunkedPass

TINY = 1e-30


class SoftLabelPass(ChunkedPass):
    """For ``slot_losses``: ``CE = logsumexp(z) - sum(q * z)`` with target q, whose gradient is ``p - q``.

    With a reduced draft vocabulary q is the target's distribution given that the token is inside.
    """

    def label_logits(self, logits: Tensor, labels: Tensor, target: Tensor, rows: Tensor, work: Tensor) -> Tensor:
        """``sum(q * z)`` of each slot, [m]."""
        torch.index_select(target, 0, rows, out=work)
        if self.inputs.unknown is not None:
            work.masked_fill_(self.inputs.unknown, 0.0)
            work.div_(work.sum(dim=-1, keepdim=True).clamp_(min=TINY))
        return torch.bmm(logits[:, None], work[:, :, None]).flatten()

    def subtract_labels(self, grads: Tensor, scales: Tensor, labels: Tensor, target: Tensor, rows: Tensor) -> None:
        """``scales * q`` from every row; a slot of weight 0 keeps its zeros."""
        unknown, inside = self.inputs.unknown, None
        if unknown is not None:
            target = target.masked_fill(unknown, 0.0)
            inside = target.sum(dim=-1).clamp_(min=TINY).tolist()
        for grad, scale, row in zip(grads, scales.tolist(), rows.tolist(), strict=True):
            if scale:
                grad.sub_(target[row], alpha=scale if inside is None else scale / inside[row])
