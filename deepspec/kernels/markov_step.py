"""One drafting step of a sequential head: base logits plus ``transition @ W_2^T``, and the token they choose.

R requests, V vocabulary, r rank, B vocabulary blocks. The biased logits [R, V] never reach memory: the first kernel
makes them block by block (W_2 is read once for up to 64 requests) and keeps of each block its largest logit and either
that logit's id or the sum of exponentials; the second one, a program per request, settles on a block and a token.

The token is the one the steps apart would choose. Greedy: the largest logit, the lowest id among equals. Sampling: the
inverse CDF of ``sampling.pick`` with the same uniform number. The bias is rounded to the weights' dtype, as the head's
own ``bias`` is. What is left is the order of summation: a token can differ only where the two largest logits, or the
number and a step of the CDF, are within rounding of each other.
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # columns of the vocabulary per program
RANK_STEP = 32  # of the rank, per multiplication
WARPS = 4


@triton.jit
def _rounded(values, like: tl.constexpr):
    """float32 ``values`` rounded to what dtype ``like`` holds, still float32."""
    if like == tl.bfloat16:
        # By hand: to nearest, ties to even, which the interpreter's conversion does not do.
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return values.to(like).to(tl.float32)


@triton.jit
def block_kernel(
    logits_ptr, logits_stride, table_ptr, row_ptr, factor_ptr, best_ptr, other_ptr, requests, vocab, limit, rank,
    temperature, SAMPLE: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    RANK_STEP: tl.constexpr,
):
    """Per request and vocabulary block: largest logit, and its id or the sum of exponentials relative to it.

    ``best`` and ``other`` are [R, B]. ``temperature`` divides the logits when sampling. ``WIDEN`` multiplies in
    float32, with the same result: the interpreter takes bfloat16 operands for the integers their bits are.
    """
    blocks = tl.num_programs(1)
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = request < requests
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + request, mask=there, other=0).to(tl.int64)
    bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, rank, RANK_STEP):
        at = first + tl.arange(0, RANK_STEP)
        left = tl.load(
            table_ptr + row[:, None] * rank + at[None, :], mask=there[:, None] & (at < rank)[None, :], other=0.0,
        )
        right = tl.load(
            factor_ptr + token[:, None].to(tl.int64) * rank + at[None, :],
            mask=(token < vocab)[:, None] & (at < rank)[None, :], other=0.0,
        )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        bias = tl.dot(left, tl.trans(right), bias, input_precision="ieee")
    bias = _rounded(bias, factor_ptr.dtype.element_ty)
    start = request.to(tl.int64) * logits_stride
    inside = there[:, None] & (token < limit)[None, :]
    logits = tl.load(logits_ptr + start[:, None] + token[None, :], mask=inside, other=0.0).to(tl.float32) + bias
    if SAMPLE:
        logits = logits / temperature
    logits = tl.where(inside, logits, float("-inf"))
    best = tl.max(logits, axis=1)
    at = request * blocks + tl.program_id(1)
    tl.store(best_ptr + at, best, mask=there)
    if SAMPLE:
        shift = tl.where(best == float("-inf"), 0.0, best)
        tl.store(other_ptr + at, tl.sum(tl.exp(logits - shift[:, None]), axis=1), mask=there)
    else:
        ids = tl.where(logits == best[:, None], token[None, :], vocab)
        tl.store(other_ptr + at, tl.min(ids, axis=1), mask=there)


@triton.jit
def greedy_kernel(best_ptr, id_ptr, token_ptr, blocks, BLOCKS: tl.constexpr):
    """The lowest id among the blocks with the largest logit."""
    request, block = tl.program_id(0), tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + request * blocks + block, mask=block < blocks, other=float("-inf"))
    ids = tl.load(id_ptr + request * blocks + block, mask=block < blocks, other=2147483647)
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), ids, 2147483647), axis=0)
    tl.store(token_ptr + request, chosen.to(tl.int64))


@triton.jit
def sample_kernel(
    logits_ptr, logits_stride, table_ptr, row_ptr, factor_ptr, best_ptr, total_ptr, uniform_ptr, token_ptr, prob_ptr,
    blocks, limit, rank, temperature, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, RANK_STEP: tl.constexpr,
):
    """First token whose cumulative probability exceeds the request's uniform number, sums in float64."""
    request, block = tl.program_id(0), tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + request * blocks + block, mask=block < blocks, other=float("-inf"))
    totals = tl.load(total_ptr + request * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(best, axis=0)
    cumulative = tl.cumsum((totals * tl.exp(best - top)).to(tl.float64), axis=0)
    whole = tl.max(cumulative, axis=0)
    wanted = tl.load(uniform_ptr + request) * whole
    # Rounding must not step past the last block: at most as many blocks are passed as do not reach the whole.
    passed = tl.sum(((cumulative <= wanted) & (cumulative < whole)).to(tl.int32), axis=0)
    rest = wanted - tl.sum(tl.where(block == passed - 1, cumulative, 0.0), axis=0)

    # The chosen block once more, this time kept.
    column = tl.arange(0, BLOCK)
    token = passed * BLOCK + column
    row = tl.load(row_ptr + request).to(tl.int64)
    bias = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rank, RANK_STEP):
        at = first + tl.arange(0, RANK_STEP)
        left = tl.load(table_ptr + row * rank + at, mask=at < rank, other=0.0).to(tl.float32)
        right = tl.load(
            factor_ptr + token[:, None].to(tl.int64) * rank + at[None, :],
            mask=(token < limit)[:, None] & (at < rank)[None, :], other=0.0,
        ).to(tl.float32)
        bias += tl.sum(right * left[None, :], axis=1)
    bias = _rounded(bias, factor_ptr.dtype.element_ty)
    start = request.to(tl.int64) * logits_stride
    logits = tl.load(logits_ptr + start + token, mask=token < limit, other=float("-inf")).to(tl.float32) + bias
    weight = tl.exp(logits / temperature - top).to(tl.float64)
    below = tl.sum((tl.cumsum(weight, axis=0) <= rest).to(tl.int32), axis=0)
    last = tl.max(tl.where(weight > 0.0, column, 0), axis=0)
    chosen = tl.minimum(below, last)
    tl.store(token_ptr + request, (passed * BLOCK + chosen).to(tl.int64))
    tl.store(prob_ptr + request, (tl.sum(tl.where(column == chosen, weight, 0.0), axis=0) / whole).to(tl.float32))


def _blocks(
    logits: Tensor, table: Tensor, rows: Tensor, factor: Tensor, limit: int, temperature: float, other: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run the first kernel: best [R, B] and, in dtype ``other``, ids or sums [R, B]."""
    requests, vocab = logits.shape
    blocks = triton.cdiv(limit, BLOCK)
    best = torch.empty(requests, blocks, dtype=torch.float32, device=logits.device)
    found = torch.empty(requests, blocks, dtype=other, device=logits.device)
    size = min(64, max(16, triton.next_power_of_2(requests)))
    block_kernel[(triton.cdiv(requests, size), blocks)](
        logits, logits.stride(0), table, rows, factor, best, found, requests, vocab, limit, factor.shape[1],
        temperature, SAMPLE=other.is_floating_point, WIDEN=logits.device.type == "cpu", ROWS=size, BLOCK=BLOCK,
        RANK_STEP=RANK_STEP, num_warps=WARPS,
    )
    return best, found


def greedy_step(logits: Tensor, table: Tensor, rows: Tensor, factor: Tensor, limit: int) -> Tensor:
    """Ids [R] int64 of the largest ``logits + table[rows] @ factor^T`` among the first ``limit`` tokens.

    logits [R, V] with contiguous rows; contiguous table [*, r] and factor W_2 [V, r] of one dtype: W_1 with previous
    ids [R] int64 as ``rows``, or the transitions of a head with rows 0..R-1.
    """
    token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            best, ids = _blocks(logits, table, rows, factor, limit, 1.0, torch.int32)
            blocks = best.shape[1]
            greedy_kernel[(len(logits),)](
                best, ids, token, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=WARPS,
            )
    return token


def greedy_transition(logits: Tensor, transition: Tensor, factor: Tensor, limit: int) -> Tensor:
    """``greedy_step`` with the transitions [R, r] of the requests themselves, in the dtype of W_2 as ``bias`` has them.
    """
    rows = torch.arange(len(transition), device=transition.device)
    return greedy_step(logits, transition.to(factor.dtype).contiguous(), rows, factor, limit)


def sample_step(
    logits: Tensor, table: Tensor, rows: Tensor, factor: Tensor, limit: int, temperature: float, uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Ids [R] int64 drawn at ``temperature`` > 0 with ``uniforms`` [R] float64, and their probabilities [R] float32.

    The other arguments are those of ``greedy_step``.
    """
    token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    prob = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            best, totals = _blocks(logits, table, rows, factor, limit, temperature, torch.float32)
            blocks = best.shape[1]
            sample_kernel[(len(logits),)](
                logits, logits.stride(0), table, rows, factor, best, totals, uniforms, token, prob, blocks, limit,
                factor.shape[1], temperature, BLOCKS=triton.next_power_of_2(blocks), BLOCK=BLOCK,
                RANK_STEP=RANK_STEP, num_warps=WARPS,
            )
    return token, prob
