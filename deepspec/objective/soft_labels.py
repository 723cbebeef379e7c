"""Cross-entropy against the target's distribution (``objective.ce_labels=target``), in chunks; see chunked.py."""

import torch
from torch import Tensor

from deepspec.objective.chunked import ChunkedPass


class SoftLabelPass(ChunkedPass):
    """For ``slot_losses``: ``CE = logsumexp(z) - sum(q * z)`` with target q, whose gradient is ``p - q``."""

    def label_logits(self, logits: Tensor, labels: Tensor, target: Tensor, rows: Tensor, work: Tensor) -> Tensor:
        """``sum(q * z)`` of each slot, [m]."""
        torch.index_select(target, 0, rows, out=work)
        return torch.bmm(logits[:, None], work[:, :, None]).flatten()

    def subtract_labels(self, grads: Tensor, scales: Tensor, labels: Tensor, target: Tensor, rows: Tensor) -> None:
        """``scales * q`` from every row; a slot of weight 0 keeps its zeros."""
        for grad, scale, row in zip(grads, scales.tolist(), rows.tolist(), strict=True):
            if scale:
                grad.sub_(target[row], alpha=scale)
