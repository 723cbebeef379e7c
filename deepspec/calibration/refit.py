"""Refit of the confidence head on blocks the drafter drafted itself. n rows, F inputs of the head.

Training is teacher forced: the head sees the data's previous token. When serving it sees the drafter's own. The refit
learns from the latter, with the backbone and everything else left as it is.
"""

from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspec.calibration.metrics import Floats, sigmoid
from deepspec.calibration.records import ConfidenceRecords, split_conversations

_BATCH = 512
_VALIDATION_SHARE = 0.25  # of the refit conversations: early stopping and the choice between the heads


@dataclass(frozen=True)
class LinearHead:
    """``c = sigmoid(w x + b)`` (Eq. 7) over the head's input ``[h_k ; W_1[x_{k-1}]]``."""

    weight: NDArray[np.float32]  # [F]
    bias: Optional[float]  # None: the layout has no bias, and a refit does not add one

    def logits(self, inputs: NDArray[np.float16]) -> NDArray[np.float32]:
        """[..., F] -> [...], computed in float32 in pieces (inputs are kept in half precision)."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        pieces = [flat[i:i + 4096].astype(np.float32) @ self.weight for i in range(0, len(flat), 4096)]
        return (np.concatenate(pieces) + np.float32(self.bias or 0.0)).reshape(inputs.shape[:-1])


@dataclass(frozen=True)
class RefitResult:
    """The refitted head and how it was chosen."""

    head: LinearHead
    chosen: str  # joint | refit
    epoch: int  # of the kept weights; 0 = the jointly trained ones were never improved on
    validation_loss: tuple[float, ...]  # cross-entropy with the analytic rate per epoch, epoch 0 first
    brier_joint: float  # on the validation conversations, see ``choose``
    brier_refit: float
    train_rows: int
    validation_rows: int


def _cross_entropy(logits: NDArray[np.float32], rate: Floats) -> float:
    exact = logits.astype(np.float64)
    return float((np.logaddexp(0.0, exact) - rate * exact).mean())


def _inputs(records: ConfidenceRecords) -> NDArray[np.float16]:
    if records.inputs is None:
        raise ValueError("the refit needs records with inputs; they are only kept while the confidence stage runs")
    return records.inputs


def _rows(records: ConfidenceRecords) -> tuple[NDArray[np.float16], Floats]:
    """Inputs [n, F] and analytic rates [n] of the positions that were reached (the condition of Eq. 7)."""
    mask = records.reached & np.isfinite(records.analytic_rate)
    return _inputs(records)[mask], np.clip(records.analytic_rate[mask].astype(np.float64), 0.0, 1.0)


def outcome_brier(records: ConfidenceRecords, logits: NDArray[np.float32]) -> float:
    """Mean of ``(c_k - [token k was accepted])^2`` over all positions that were reached; NaN without any."""
    reached = records.reached
    if not reached.any():
        return float("nan")
    return float(np.square(sigmoid(logits[reached]) - records.survived[reached]).mean())


def fit_head(inputs: NDArray[np.float16], rate: Floats, validation: tuple[NDArray[np.float16], Floats],
             start: LinearHead, *, epochs: int, lr: float, seed: int) -> tuple[LinearHead, list[float]]:
    """Logistic regression on soft labels by AdamW, starting from ``start``; keeps the epoch of lowest validation loss.

    Inputs are standardised for the fit and divided by sqrt(F / 100), so that one learning rate suits every width; the
    returned weights are for the raw inputs. Returns the head and the validation losses, epoch 0 (= ``start``) first.
    """
    values = inputs.astype(np.float32)
    mean, deviation = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
    if start.bias is None:
        mean = np.zeros_like(mean)  # moved inputs would need a bias
    scale = (np.maximum(deviation, 1e-6) * np.sqrt(values.shape[1] / 100.0)).astype(np.float32)
    features = torch.from_numpy((values - mean.astype(np.float32)) / scale)
    labels = torch.from_numpy(rate.astype(np.float32))
    weight = torch.from_numpy(start.weight * scale).requires_grad_(True)
    bias = torch.tensor((start.bias or 0.0) + float(start.weight @ mean), dtype=torch.float32)
    trained = [weight] if start.bias is None else [weight, bias.requires_grad_(True)]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    steps = max(1, epochs * -(-len(labels) // _BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)

    def raw(weight: Tensor, bias: Tensor) -> LinearHead:
        raw_weight = weight.detach().numpy() / scale
        return LinearHead(raw_weight, None if start.bias is None else float(bias.detach()) - float(raw_weight @ mean))

    best, losses = start, [_cross_entropy(start.logits(validation[0]), validation[1])]
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(_BATCH):
            logits = features[batch] @ weight + bias
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        head = raw(weight, bias)
        losses.append(_cross_entropy(head.logits(validation[0]), validation[1]))
        if losses[-1] < min(losses[:-1]):
            best = head
    return best, losses


def refit_head(records: ConfidenceRecords, start: LinearHead, *, epochs: int, lr: float, seed: int) -> RefitResult:
    """Refit ``start`` on ``records`` (the refit part only) and choose between the two.

    Label: the analytic acceptance rate (Eq. 8) at the prefix that was drafted; rows: positions that were reached.
    A quarter of the conversations is kept aside. On it the epoch is chosen (lowest cross-entropy), and the rule is
    applied: **the refitted head is used if its Brier score against the actual outcomes is lower than the jointly
    trained head's**; a tie keeps the latter. Neither the fit nor the report part of the calibration is looked at, so
    the comparison on the report part stays honest. Without two conversations nothing is fitted.
    """
    part = split_conversations(records.conversation, records.domain, refit_fraction=0.0,
                               fit_fraction=1.0 - _VALIDATION_SHARE)
    train, validation = records.select(part == "fit"), records.select(part == "report")
    inputs, rate = _rows(train)
    held_inputs, held_rate = _rows(validation)
    if not len(rate) or not len(held_rate):
        return RefitResult(start, "joint", 0, (), float("nan"), float("nan"), len(rate), len(held_rate))
    head, losses = fit_head(inputs, rate, (held_inputs, held_rate), start, epochs=epochs, lr=lr, seed=seed)
    before = outcome_brier(validation, start.logits(_inputs(validation)))
    after = outcome_brier(validation, head.logits(_inputs(validation)))
    return RefitResult(
        head=head, chosen="refit" if after < before else "joint", epoch=int(np.argmin(losses)),
        validation_loss=tuple(losses), brier_joint=before, brier_refit=after, train_rows=len(rate),
        validation_rows=len(held_rate),
    )
