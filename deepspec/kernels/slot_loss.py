"""Cross-entropy and L1 of rows of logits with their gradient, written over the logits. One program per row.

V vocabulary, m slots, q distinct target rows, g distinct biases. With ``z`` a slot's logits, ``p = softmax(z)``, ``y``
its label, ``t`` the target's distribution and ``s = sign(p - t)``, the losses ``CE = logsumexp(z) - z_y`` and
``L1 = sum_v |p_v - t_v|`` have, with ``dp_v/dz_w = p_v (1[v = w] - p_w)``, the gradients

    dCE/dz_w = p_w - 1[w = y]
    dL1/dz_w = sum_v s_v dp_v/dz_w = p_w (s_w - S),   S = sum_v p_v s_v        (s is constant wherever p != t)

so that ``ce_scale * CE + tv_scale * L1`` has ``p_w (ce_scale + tv_scale (s_w - S)) - ce_scale 1[w = y]``.

Reads of device memory. A row of 151,936 float32 logits is 608 KB, more than one multiprocessor can hold, and three sums
over it depend on each other: ``p`` needs the sum of exponentials, ``S`` needs the sign of ``p - t`` and with it the
finished ``p``, and the gradient needs the finished ``S``. One read cannot do: no element's gradient is known before the
last element was seen twice. So the slot's logits (and its bias) are read three times, the target's twice, and the
gradient is written once; without a gradient the third sweep falls away. What makes this cheaper than it sounds: the
target's statistics are made once per distinct row, slots that share a target row or a bias run side by side and find
it in the L2 cache, and the sweeps alternate in direction, so that each starts on what the one before read last.
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits per step of a sweep: 8 per thread, so that three operands and two sums stay in registers
WARPS = 8


@triton.jit
def _load_logits(row, bias, columns, vocab, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr):
    """Logits of some columns, -inf outside the vocabulary."""
    logits = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(EXACT)
    if HAS_BIAS:
        logits += tl.load(bias + columns, mask=columns < vocab, other=0.0).to(EXACT)
    return logits


@triton.jit
def _online_softmax(row, bias, vocab, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Largest logit of a row and the sum of ``exp(logit - largest)``, in one sweep."""
    top = tl.full((), float("-inf"), EXACT)
    total = tl.full((), 0.0, EXACT)
    for start in range(0, vocab, BLOCK):
        logits = _load_logits(row, bias, start + tl.arange(0, BLOCK), vocab, HAS_BIAS, EXACT)
        higher = tl.maximum(top, tl.max(logits, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far: no inf - inf
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift), axis=0)
        top = higher
    return top, total


@triton.jit
def statistics_kernel(logits_ptr, top_ptr, total_ptr, vocab, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Softmax statistics of each row of [q, V]."""
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * vocab
    top, total = _online_softmax(start, start, vocab, False, BLOCK, EXACT)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)


@triton.jit
def slot_loss_kernel(
    draft_ptr, bias_ptr, bias_of_ptr, target_ptr, target_of_ptr, target_top_ptr, target_total_ptr, label_ptr,
    ce_scale_ptr, tv_scale_ptr, ce_ptr, l1_ptr, vocab, HAS_BIAS: tl.constexpr, DIFFERENTIATE: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):
    """Losses of one slot and, over its logits, their scaled gradient. See the top of the file."""
    slot = tl.program_id(0)
    draft = draft_ptr + slot.to(tl.int64) * vocab
    bias = bias_ptr
    if HAS_BIAS:
        bias += tl.load(bias_of_ptr + slot).to(tl.int64) * vocab
    target_of = tl.load(target_of_ptr + slot).to(tl.int64)
    target = target_ptr + target_of * vocab
    target_top = tl.load(target_top_ptr + target_of)
    target_factor = 1.0 / tl.load(target_total_ptr + target_of)
    label = tl.load(label_ptr + slot)
    ce_scale, tv_scale = tl.load(ce_scale_ptr + slot), tl.load(tv_scale_ptr + slot)

    top, total = _online_softmax(draft, bias, vocab, HAS_BIAS, BLOCK, EXACT)
    factor = 1.0 / total
    chosen = _load_logits(draft, bias, label, vocab, HAS_BIAS, EXACT)
    tl.store(ce_ptr + slot, tl.log(total) + top - chosen)

    distance = tl.zeros((BLOCK,), EXACT)
    signed = tl.zeros((BLOCK,), EXACT)
    steps = tl.cdiv(vocab, BLOCK)
    for step in range(0, steps):
        columns = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)  # backwards: the cache holds the end of the row
        p = tl.exp(_load_logits(draft, bias, columns, vocab, HAS_BIAS, EXACT) - top) * factor
        t = tl.exp(_load_logits(target, target, columns, vocab, False, EXACT) - target_top) * target_factor
        distance += tl.abs(p - t)
        signed += tl.where(p > t, p, tl.where(p < t, -p, 0.0))  # p * s
    mass = tl.sum(signed, axis=0)  # S
    tl.store(l1_ptr + slot, tl.sum(distance, axis=0))

    if DIFFERENTIATE:
        if (ce_scale == 0.0) & (tv_scale == 0.0):
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                nothing = tl.zeros((BLOCK,), draft_ptr.dtype.element_ty)  # whatever the logits are, NaN included
                tl.store(draft + columns, nothing, mask=columns < vocab)
        else:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                p = tl.exp(_load_logits(draft, bias, columns, vocab, HAS_BIAS, EXACT) - top) * factor
                t = tl.exp(_load_logits(target, target, columns, vocab, False, EXACT) - target_top) * target_factor
                sign = tl.where(p > t, 1.0, tl.where(p < t, -1.0, 0.0))
                grad = p * (ce_scale + tv_scale * (sign - mass)) - tl.where(columns == label, ce_scale, 0.0)
                tl.store(draft + columns, grad.to(draft_ptr.dtype.element_ty), mask=columns < vocab)


@triton.jit
def softcap_kernel(
    logits_ptr, slope_ptr, size, sloped, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):
    """``c tanh(x / c)`` over ``size`` logits, in place, and its derivative for the first ``sloped`` of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(logits_ptr + at, mask=at < size, other=0.0).to(EXACT) / SOFTCAP
    # With e = exp(-2 |x|): tanh |x| = (1 - e) / (1 + e), and 1 - tanh^2 = 4 e / (1 + e)^2 without a cancellation.
    e = tl.exp(-2.0 * tl.abs(scaled))
    tanh = (1.0 - e) / (1.0 + e)
    capped = tl.where(scaled < 0.0, -tanh, tanh) * SOFTCAP
    slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    tl.store(logits_ptr + at, capped.to(logits_ptr.dtype.element_ty), mask=at < size)
    tl.store(slope_ptr + at, slope.to(slope_ptr.dtype.element_ty), mask=at < sloped)


def _exact(tensor: Tensor) -> tuple[torch.dtype, tl.dtype]:
    double = tensor.dtype == torch.float64
    return (torch.float64, tl.float64) if double else (torch.float32, tl.float32)


def _block(vocab: int) -> int:
    return min(BLOCK, max(32, triton.next_power_of_2(vocab)))


def row_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit and sum of ``exp(logit - largest)`` of each row of contiguous ``logits`` [q, V]: [q], [q]."""
    torch_exact, exact = _exact(logits)
    top, total = (torch.empty(len(logits), dtype=torch_exact, device=logits.device) for _ in range(2))
    if len(logits):
        vocab = logits.shape[1]
        with torch.cuda.device_of(logits):
            statistics_kernel[(len(logits),)](
                logits, top, total, vocab, BLOCK=_block(vocab), EXACT=exact, num_warps=WARPS,
            )
    return top, total


def slot_losses_(
    draft: Tensor, bias: Tensor, bias_of: Tensor, target: Tensor, target_of: Tensor, statistics: tuple[Tensor, Tensor],
    labels: Tensor, ce_scales: Tensor, tv_scales: Tensor, ce: Tensor, l1: Tensor, differentiate: bool,
) -> None:
    """Fill ``ce`` and ``l1`` [m]; with ``differentiate`` also write the scaled gradient over ``draft`` [m, V].

    Logits of a slot are ``draft[i] + bias[bias_of[i]]``, bias [g, V] with g = 0 for none; ``target[target_of[i]]``
    [q, V] are logits whose ``row_statistics`` are given. labels, bias_of, target_of [m] int64; scales, losses and
    statistics [m] or [q] in float32 (float64 for float64 logits). A slot whose scales are both zero gets a gradient of
    exact zeros, even from logits that are not finite, while its losses are still measured.
    """
    if not len(draft):
        return
    vocab = draft.shape[1]
    with torch.cuda.device_of(draft):
        slot_loss_kernel[(len(draft),)](
            draft, bias if len(bias) else draft, bias_of, target, target_of, *statistics, labels, ce_scales, tv_scales,
            ce, l1, vocab, HAS_BIAS=len(bias) > 0, DIFFERENTIATE=differentiate, BLOCK=_block(vocab),
            EXACT=_exact(draft)[1], num_warps=WARPS,
        )


def softcap_(logits: Tensor, slope: Tensor, softcap: float) -> None:
    """Cap contiguous ``logits`` [n, V] in place; ``slope`` [s, V], s from 0 to n, gets the first s rows' derivative."""
    block = 1024
    with torch.cuda.device_of(logits):
        softcap_kernel[(triton.cdiv(logits.numel(), block),)](
            logits, slope if len(slope) else logits, logits.numel(), slope.numel(), SOFTCAP=softcap, BLOCK=block,
            EXACT=_exact(logits)[1], num_warps=4,
        )
