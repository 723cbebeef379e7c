"""Cross-entropy and L1 of all slots in one pass over row chunks, with their gradients, without ever holding the logits.

n supervised slots, D width, V vocabulary, r rank, P distinct transitions, Q distinct target rows.

With ``p`` the drafter's and ``q`` the target's distribution, ``s = sign(p - q)``, the gradients by the logits are
``p - onehot`` for the cross-entropy and ``p * (s - sum(p * s))`` for ``|p - q|_1``, so the forward pass makes them
while the logits of a chunk are at hand and the backward pass only scales. Slots are sorted by previous token and target
row: target logits are made once per distinct row, and a bias that depends on the previous token alone once per token.
"""

import math
from dataclasses import dataclass
from typing import Any, Iterator, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.drafters.precision import exact_dtype
from deepspec.objective.plan import SlotPlan
from deepspec.objective.products import project, pull_back
from deepspec.objective.rows import over_rows, workers_of

TILE_BYTES = {"cpu": 3 << 20, "cuda": 1 << 28}  # of the element-wise part: stays in the cache on a CPU
LOG2_E = math.log2(math.e)  # exp2 of a scaled number is three times as fast as exp on some CPUs
NEVER = -1e30  # logit of a token that is never proposed: its probability is 0, its products with 0 are


@dataclass(frozen=True)
class LossInputs:
    """What the pass needs besides the three tensors it differentiates by."""

    lm_head: Tensor  # [V, D]
    last_hidden: Tensor  # [T, D]
    labels: Tensor  # [n] int64 in the plan's order
    ce_scales: Tensor  # [n]: weight of each slot's cross-entropy in the returned loss
    tv_scales: Tensor  # [n]: of its L1
    plan: SlotPlan
    softcap: Optional[float]
    budget: int  # bytes for the logits of one chunk
    differentiate: bool
    unknown: Optional[Tensor] = None  # [V] bool: tokens that the drafter never proposes


def _chunks(inputs: LossInputs, vocab: int, item: int) -> Iterator[tuple[slice, slice, slice]]:
    """Ranges of slots, rows and groups whose logits together fit the budget (at least one slot each)."""
    plan = inputs.plan
    row_of, group_of = plan.row_of.tolist(), plan.group_of.tolist()
    limit = max(3, inputs.budget // (vocab * item))
    per_slot = 1 if inputs.softcap is None else 2
    first = 0
    while first < len(row_of):
        last = first + 1
        while last < len(row_of):
            groups = group_of[last] - group_of[first] + 1 if plan.shared_bias else 0
            if per_slot * (last + 1 - first) + row_of[last] - row_of[first] + 1 + groups > limit:
                break
            last += 1
        yield (
            slice(first, last), slice(row_of[first], row_of[last - 1] + 1),
            slice(group_of[first], group_of[last - 1] + 1),
        )
        first = last


def _add_rows(table: Tensor, index: Tensor, rows: Tensor, scale: Optional[Tensor], out: Tensor, work: Tensor) -> None:
    """``out = table[index] + scale * rows``, [m, V]; scale [m] or None (1); ``work`` scratch; ``out`` may be rows."""
    if rows.is_cuda:
        gathered = torch.index_select(table, 0, index, out=work)
        torch.addcmul(gathered, rows, torch.ones_like(rows[:, :1]) if scale is None else scale[:, None], out=out)
        return
    # Row by row: gathering rows this wide costs the CPU many times the addition.
    factors = [1.0] * len(rows) if scale is None else scale.tolist()
    for other, factor, one, result in zip(index.tolist(), factors, rows, out, strict=True):
        torch.add(table[other], one, alpha=factor, out=result)


class ChunkedPass:
    """One run over the chunks: buffers, results and gradients.

    Another implementation of what happens to the logits of a chunk (triton_losses.py) overrides ``scratch_rows``,
    ``cap``, ``targets`` and ``elementwise``; other labels (soft_labels.py) override
    ``label_logits`` and ``subtract_labels``.
    """

    def __init__(self, hidden: Tensor, transitions: Optional[Tensor], factor: Optional[Tensor], inputs: LossInputs):
        self.hidden, self.transitions, self.factor, self.inputs = hidden, transitions, factor, inputs
        self.exact = exact_dtype(hidden)
        self.vocab = len(inputs.lm_head)
        count, device = len(inputs.plan.slots), hidden.device
        self.ce = torch.zeros(count, dtype=self.exact, device=device)
        self.l1 = torch.zeros(count, dtype=self.exact, device=device)
        self.chunks = list(_chunks(inputs, self.vocab, self.hidden.new_empty(0, dtype=self.exact).element_size()))
        self.grad_hidden: Optional[Tensor] = None
        self.grad_transitions: Optional[Tensor] = None
        self.grad_factor: Optional[Tensor] = None
        if inputs.differentiate:
            self.grad_hidden = torch.zeros(hidden.shape, dtype=self.exact, device=device)
            if transitions is not None and factor is not None:
                self.grad_transitions = torch.zeros(transitions.shape, dtype=self.exact, device=device)
                self.grad_factor = torch.zeros(factor.shape, dtype=self.exact, device=device)

    def _buffer(self, rows: int) -> Tensor:
        return torch.empty(rows, self.vocab, dtype=self.exact, device=self.hidden.device)

    def run(self) -> None:
        """Fill the results. One workspace, as large as the largest chunk, serves all of them."""
        shared = self.inputs.plan.shared_bias and self.transitions is not None
        sloped = self.inputs.softcap is not None and self.inputs.differentiate
        parts = [
            (m, rows.stop - rows.start, groups.stop - groups.start if shared else 0, m if sloped else 0)
            for slots, rows, groups in self.chunks for m in (slots.stop - slots.start,)
        ]
        if not parts:
            return
        workspace = self._buffer(max(sum(part) for part in parts))
        largest = max(part[0] for part in parts)
        scratch = self._buffer(self.scratch_rows(largest) * workers_of(self.hidden.device))
        for (slots, rows, groups), part in zip(self.chunks, parts, strict=True):
            draft, target, bias, slope = workspace[:sum(part)].split(part)
            self._logits(slots, rows, groups, workspace[:part[0] + part[1]], target, bias, slope)
            self.elementwise(slots, draft, target, bias, scratch)
            if self.inputs.differentiate:
                self._gradients(slots, groups, draft, bias, slope)

    def _logits(
        self, slots: slice, rows: slice, groups: slice, both: Tensor, target: Tensor, bias: Tensor, slope: Tensor,
    ) -> None:
        """Base logits of the drafter and, behind them in ``both``, what ``targets`` makes of the target's.

        ``bias`` gets the bias of each distinct token, ``slope`` the softcap's derivative.
        """
        inputs, plan = self.inputs, self.inputs.plan
        drafter_rows, target_rows = self.hidden[plan.slots[slots]], inputs.last_hidden[plan.rows[rows]]
        project(torch.cat((drafter_rows.to(self.exact), target_rows.to(self.exact))), inputs.lm_head, both)
        if inputs.softcap is not None:
            self.cap(both, slope, inputs.softcap)
        if inputs.unknown is not None:
            both[:len(drafter_rows)].masked_fill_(inputs.unknown, NEVER)
        self.targets(target)
        if self.transitions is None or self.factor is None:
            return
        if len(bias):
            project(self.transitions[groups], self.factor, bias)
        else:
            project(self.transitions[slots], self.factor, both[:len(drafter_rows)], accumulate=True)

    def scratch_rows(self, most: int) -> int:
        """Rows, at most ``most``, that a worker of the element-wise part has in hand at a time."""
        tile = TILE_BYTES.get(self.hidden.device.type, 1 << 28) // (self.vocab * self.ce.element_size())
        return min(most, max(1, tile))

    def cap(self, logits: Tensor, slope: Tensor, softcap: float) -> None:
        """Cap ``logits`` in place; ``slope`` [s, V], s may be 0, gets the derivative of the first s rows."""
        logits.div_(softcap).tanh_()
        if len(slope):
            torch.square(logits[:len(slope)], out=slope).neg_().add_(1.0)
        logits.mul_(softcap)

    def targets(self, target: Tensor) -> None:
        """Turn the target's logits of a chunk into probabilities, in place."""
        def softmax(rows: slice, worker: int) -> None:
            torch.softmax(target[rows], dim=-1, out=target[rows])

        over_rows(len(target), self.scratch_rows(len(target)), target.device, softmax)

    def elementwise(self, slots: slice, draft: Tensor, target: Tensor, bias: Tensor, scratch: Tensor) -> None:
        """Losses of the slots; afterwards ``draft`` holds the gradient by the logits, where one is wanted.

        ``|p - q|_1 = 2 sum(relu(q - p))``, since both sum to 1. The softmax stays unnormalised, its sum goes into the
        factors that follow: every pass over V counts here.
        """
        inputs, plan = self.inputs, self.inputs.plan
        rows = plan.row_of[slots] - plan.row_of[slots.start]
        groups = plan.group_of[slots] - plan.group_of[slots.start]
        labels = inputs.labels[slots]
        tile = self.scratch_rows(len(draft))

        def losses(part: slice, worker: int) -> None:
            whole = slice(slots.start + part.start, slots.start + part.stop)
            exps, work = draft[part], scratch[worker * tile:][:part.stop - part.start]
            if len(bias):
                _add_rows(bias, groups[part], exps, None, exps, work)
            top = exps.amax(dim=-1)
            chosen = self.label_logits(exps, labels[part], target, rows[part], work)
            total = exps.sub_(top[:, None]).mul_(LOG2_E).exp2_().sum(dim=-1)
            self.ce[whole] = total.log() + top - chosen
            _add_rows(target, rows[part], exps, -1.0 / total, work, work)
            self.l1[whole] = 2.0 * work.clamp_(min=0.0).sum(dim=-1)
            if inputs.differentiate:
                # The clamp leaves a sign of 1 where q > p, else 0: (1 - s) / 2.
                ce, tv = inputs.ce_scales[whole], -2.0 * inputs.tv_scales[whole]
                mass = torch.bmm(exps[:, None], work.sign_()[:, :, None]).flatten() / total
                exps.mul_(work.mul_((tv / total)[:, None]).add_(((ce - tv * mass) / total)[:, None]))

        over_rows(len(draft), tile, draft.device, losses)
        if inputs.differentiate:
            self.subtract_labels(draft, inputs.ce_scales[slots], labels, target, rows)

    def label_logits(self, logits: Tensor, labels: Tensor, target: Tensor, rows: Tensor, work: Tensor) -> Tensor:
        """What the cross-entropy subtracts from the log-sum-exp of ``logits`` [m, V]: the label's logit, [m].

        ``target`` has the target's probabilities, those of slot i in row ``rows[i]``; ``work`` [m, V] is scratch.
        """
        return logits.gather(1, labels[:, None]).squeeze(1)

    def subtract_labels(self, grads: Tensor, scales: Tensor, labels: Tensor, target: Tensor, rows: Tensor) -> None:
        """The label's part of the cross-entropy's gradient by the logits, subtracted from ``grads`` [m, V]."""
        at_label = (torch.arange(len(grads), device=grads.device), labels)
        grads[at_label] = grads[at_label] - scales

    def _gradients(self, slots: slice, groups: slice, draft: Tensor, bias: Tensor, slope: Tensor) -> None:
        """Pull the gradient by the logits back to hidden states, transitions and W_2."""
        plan = self.inputs.plan
        assert self.grad_hidden is not None
        if self.transitions is not None and self.factor is not None:
            assert self.grad_transitions is not None and self.grad_factor is not None
            grads = draft
            if len(bias):
                # The chunk's biases are used up: their buffer takes the gradient by each of them.
                local = plan.group_of[slots] - plan.group_of[slots.start]
                grads = bias.zero_().index_add_(0, local, draft)
            self.grad_transitions[groups] += pull_back(grads, self.factor)
            self.grad_factor.addmm_(grads.t(), self.transitions[groups].to(self.exact))
        if len(slope):
            draft.mul_(slope)
        self.grad_hidden[plan.slots[slots]] = pull_back(draft, self.inputs.lm_head)


def _weighted(losses: Tensor, scales: Tensor) -> Tensor:
    """Weighted sum in float64; a slot of weight 0 counts for nothing, whatever its loss is."""
    return torch.where(scales == 0, 0.0, losses.double() * scales).sum()


class _SlotLoss(torch.autograd.Function):
    """Scalar loss with the gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, transitions: Optional[Tensor], factor: Optional[Tensor], inputs: LossInputs,
        kind: type[ChunkedPass],
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = kind(hidden, transitions, factor, inputs)
        work.run()
        loss = (_weighted(work.ce, inputs.ce_scales) + _weighted(work.l1, inputs.tv_scales)).to(work.exact)
        pairs = zip((work.grad_hidden, work.grad_transitions, work.grad_factor), (hidden, transitions, factor))
        ctx.save_for_backward(*(None if grad is None or like is None else grad.to(like.dtype)
                                for grad, like in pairs))
        ctx.mark_non_differentiable(work.ce, work.l1)
        return loss, work.ce, work.l1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _ce: Tensor, _l1: Tensor) -> tuple[Optional[Tensor], ...]:
        return (*(None if grad is None else grad * upstream.to(grad.dtype) for grad in ctx.saved_tensors), None, None)


def slot_losses(
    hidden: Tensor, transitions: Optional[Tensor], factor: Optional[Tensor], inputs: LossInputs,
    kind: type[ChunkedPass] = ChunkedPass,
) -> tuple[Tensor, Tensor, Tensor]:
    """``sum(ce_scales * ce + tv_scales * l1)``, differentiable, and ce, l1 [n] of the slots, detached.

    hidden [N*K, D] flattened; transitions [P, r] in the plan's group order with factor W_2 [V, r], or both None.
    All results are float32 (float64 for float64 hidden states), whatever the inputs are.
    """
    return _SlotLoss.apply(hidden, transitions, factor, inputs, kind)
