"""The training objective (Eqs. 8-12). One equation, one function; sums over slots, divided once by window totals.

N blocks, K draft tokens, V vocabulary, D width. ``weights`` [N, K] are w_k where a slot is supervised, else 0.
"""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import AnchorBlocks, TrainingBatch
from deepspec.drafters.precision import exact, exact_dtype
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights
from deepspec.drafters.vocabulary import outside
from deepspec.errors import ConfigError
from deepspec.kernels import require_kernels, why_not
from deepspec.objective.chunked import NEVER, ChunkedPass, LossInputs, slot_losses
from deepspec.objective.plan import plan_slots
from deepspec.objective.soft_labels import TINY, SoftLabelPass


def position_weights(draft_length: int, decay: Optional[float]) -> Tensor:
    """``w_k = exp(-(k - 1) / decay)``, k = 1..K (Sec. 3, training): float64 [K]; decay null means the draft length."""
    positions = torch.arange(draft_length, dtype=torch.float64)
    return torch.exp(-positions / (draft_length if decay is None else decay))


def slot_weights(blocks: AnchorBlocks, decay: Optional[float], draft_length: int) -> Tensor:
    """w_k of every supervised slot, 0 elsewhere: float64 [N, K] on the blocks' device."""
    return blocks.mask * position_weights(draft_length, decay).to(blocks.mask.device)


def acceptance_rate(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Probability that a draft token survives verification, ``c* = 1 - |p_d - p_t|_1 / 2`` (Eq. 8): [..., V] to [...].

    Clamped to [0, 1], which rounding can leave.
    """
    return (1.0 - 0.5 * (draft_probs - target_probs).abs().sum(dim=-1)).clamp(0.0, 1.0)


def cross_entropy_loss(draft_logits: Tensor, label_ids: Tensor, weights: Tensor) -> Tensor:
    """``L_ce = -sum_k w_k log p_d(x*_k)`` (Eq. 9): logits [N, K, V], data tokens [N, K]; a sum, not a mean."""
    log_probs = functional.log_softmax(exact(draft_logits), dim=-1)
    return -(log_probs.gather(-1, label_ids[..., None]).squeeze(-1) * weights.to(log_probs.dtype)).sum()


def soft_cross_entropy_loss(draft_logits: Tensor, target_probs: Tensor, weights: Tensor) -> Tensor:
    """``-sum_k w_k sum_v p_t(v) log p_d(v)``, EAGLE-3's in place of Eq. 9: logits, probabilities [N, K, V]; a sum."""
    log_probs = functional.log_softmax(exact(draft_logits), dim=-1)
    return -((log_probs * target_probs).sum(dim=-1) * weights.to(log_probs.dtype)).sum()


def total_variation_loss(draft_probs: Tensor, target_probs: Tensor, weights: Tensor) -> Tensor:
    """``L_tv = sum_k w_k |p_d - p_t|_1`` (Eq. 10): probabilities [N, K, V]; the full L1 norm, a sum, not a mean."""
    return ((draft_probs - target_probs).abs().sum(dim=-1) * weights.to(draft_probs.dtype)).sum()


def confidence_loss(confidence_logits: Tensor, rate: Tensor, weights: Tensor) -> Tensor:
    """``L_conf``: binary cross-entropy of ``c_k`` on ``c*_k`` (Eq. 11): logits and rate [N, K]; a sum, not a mean."""
    logits = exact(confidence_logits)
    losses = functional.binary_cross_entropy_with_logits(logits, rate.detach().to(logits.dtype), reduction="none")
    return (losses * weights.to(logits.dtype)).sum()


@dataclass(frozen=True)
class Denominators:
    """Sums of weights over the whole optimizer window: all ranks, all accumulation steps."""

    ce: float
    tv: float
    confidence: float


@dataclass(frozen=True)
class LossTerms:
    """Result of one micro-step. ``sums`` are detached float64 numerators and denominators of this batch alone:

    loss_ce, loss_tv, loss_confidence with weight_ce, weight_tv, weight_confidence (scalars); acceptance_rate [K] with
    acceptance_rate_count [K]; acceptance_length_proxy with acceptance_length_proxy_count (scalars).
    """

    loss: Tensor
    sums: dict[str, Tensor]


def window_weights(blocks: AnchorBlocks, objective: ObjectiveConfig, draft_length: int) -> Denominators:
    """This batch's share of the denominators, known before the pass; the trainer adds them up over the window."""
    total = float(slot_weights(blocks, objective.decay, draft_length).sum())
    return Denominators(ce=total, tv=total, confidence=total)


def _ratio(weight: float, denominator: float) -> float:
    return weight / denominator if denominator > 0.0 else 0.0


@dataclass(frozen=True)
class _TokenTerms:
    loss: Tensor  # differentiable: weighted and normalised CE + TV
    ce: Tensor  # detached numerator
    tv: Tensor
    rate: Tensor  # [N, K] detached, 0 where unsupervised


def _capped(logits: Tensor, softcap: Optional[float]) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _eager(
    output: DrafterOutput, batch: TrainingBatch, shared: SharedWeights, weights: Tensor, scales: tuple[float, float],
    softcap: Optional[float], soft: bool, unknown: Optional[Tensor] = None,
) -> _TokenTerms:
    """Reference: every logit in memory, gradients by autograd. ``soft`` labels are the target's distribution."""
    dtype = exact_dtype(output.hidden)
    lm_head = shared.lm_head.to(dtype)
    logits = _capped(functional.linear(output.hidden.to(dtype), lm_head), softcap)
    if output.transition is not None and output.output_factor is not None:
        logits = logits + functional.linear(output.transition.to(dtype), output.output_factor.to(dtype))
    if unknown is not None:
        logits = logits.masked_fill(unknown, NEVER)
    rows = batch.last_hidden[batch.blocks.target_rows].to(dtype)
    target_probs = torch.softmax(_capped(functional.linear(rows, lm_head), softcap), dim=-1)
    draft_probs = torch.softmax(logits, dim=-1)
    if soft:
        inside = target_probs if unknown is None else target_probs.masked_fill(unknown, 0.0)
        ce = soft_cross_entropy_loss(logits, inside / inside.sum(dim=-1, keepdim=True).clamp(min=TINY), weights)
    else:
        ce = cross_entropy_loss(logits, batch.blocks.label_ids, weights * sayable(batch.blocks.label_ids, unknown))
    tv = total_variation_loss(draft_probs, target_probs, weights)
    rate = acceptance_rate(draft_probs.detach(), target_probs) * batch.blocks.mask
    return _TokenTerms(scales[0] * ce + scales[1] * tv, ce.detach(), tv.detach(), rate)


def _chunked(
    output: DrafterOutput, batch: TrainingBatch, shared: SharedWeights, weights: Tensor, scales: tuple[float, float],
    softcap: Optional[float], by_token: bool, budget: int, kind: type[ChunkedPass], unknown: Optional[Tensor] = None,
) -> _TokenTerms:
    """The same numbers in bounded memory; see chunked.py; triton_losses.py and soft_labels.py have other kinds of pass.
    """
    blocks, hidden = batch.blocks, output.hidden.flatten(0, 1)
    plan = plan_slots(blocks.mask, blocks.previous_ids, blocks.target_rows, by_token)
    transitions = None if output.transition is None else output.transition.flatten(0, 1)[plan.first_of]
    chosen = weights.flatten()[plan.slots].to(exact_dtype(hidden))
    tracked = (hidden, transitions, output.output_factor)
    labels = blocks.label_ids.flatten()[plan.slots]
    known = torch.ones_like(labels, dtype=torch.bool) if issubclass(kind, SoftLabelPass) else sayable(labels, unknown)
    inputs = LossInputs(
        lm_head=shared.lm_head, last_hidden=batch.last_hidden, labels=labels, unknown=unknown,
        ce_scales=chosen * scales[0] * known, tv_scales=chosen * scales[1], plan=plan, softcap=softcap, budget=budget,
        differentiate=torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in tracked),
    )
    loss, ce, l1 = slot_losses(*tracked, inputs, kind)
    rate = torch.zeros(hidden.shape[0], dtype=ce.dtype, device=ce.device)
    rate[plan.slots] = (1.0 - 0.5 * l1).clamp(0.0, 1.0)
    ce_sum, tv_sum = (torch.where(known, ce.double(), 0.0) * chosen).sum(), (l1.double() * chosen).sum()
    return _TokenTerms(loss, ce_sum, tv_sum, rate.view(blocks.mask.shape))


def teacher_forced_lengths(rate: Tensor) -> Tensor:
    """Tokens per round that acceptance rates [N, K] along the data promise, bonus included: [N].

    ``1 + sum_k prod_{j<=k} c*_j``; rates are 0 behind the last supervised slot. The best checkpoint is chosen by it.
    """
    return 1.0 + rate.cumprod(dim=1).sum(dim=1)


def sayable(label_ids: Tensor, unknown: Optional[Tensor]) -> Tensor:
    """Whether the drafter can propose each of ``label_ids`` [...]: bool [...]."""
    return torch.ones_like(label_ids, dtype=torch.bool) if unknown is None else ~unknown[label_ids]


def _coverage(blocks: AnchorBlocks, unknown: Optional[Tensor]) -> dict[str, Tensor]:
    """Of the labels, how many the drafter can propose: the share is a ceiling on its acceptance. Nothing where it knows
    all tokens."""
    if unknown is None:
        return {}
    return {"draft_vocab_coverage": (sayable(blocks.label_ids, unknown) & blocks.mask).sum().double(),
            "draft_vocab_coverage_count": blocks.mask.sum().double()}


def _measures(blocks: AnchorBlocks, rate: Tensor) -> dict[str, Tensor]:
    """Metrics as sum and count: analytic acceptance by position, and the length it promises per block."""
    rate = rate.double() * blocks.mask
    supervised = blocks.mask.any(dim=1)
    lengths = teacher_forced_lengths(rate)
    return {
        "acceptance_rate": rate.sum(dim=0), "acceptance_rate_count": blocks.mask.sum(dim=0).double(),
        "acceptance_length_proxy": (lengths * supervised).sum(),
        "acceptance_length_proxy_count": supervised.sum().double(),
    }


def _chunked_pass(implementation: str, device: torch.device, soft: bool = False) -> type[ChunkedPass]:
    """What ``auto``, ``chunked`` and ``triton`` mean on ``device``. Raises ConfigError for kernels that cannot run."""
    if soft:
        if implementation == "triton":
            raise ConfigError("objective.implementation=triton has no kernel for objective.ce_labels=target. Use "
                              "objective.implementation=auto, which then takes chunked.")
        return SoftLabelPass
    if implementation == "triton":
        require_kernels("objective.implementation", device, "chunked")
    elif implementation == "chunked" or device.type != "cuda" or why_not(device):
        return ChunkedPass
    from deepspec.objective.triton_losses import TritonPass  # importing it needs Triton

    return TritonPass


def of_known_tokens(
    output: DrafterOutput, batch: TrainingBatch, shared: SharedWeights,
) -> tuple[DrafterOutput, TrainingBatch, SharedWeights]:
    """The same without the rows of the LM head that no token has: the target never samples them (verification masks
    them), so they have no probability here either. A slot whose label is such an id, which only another sampler can
    have drawn, is not supervised.
    """
    tokens = shared.tokens
    if tokens is None or tokens >= len(shared.lm_head):
        return output, batch, shared
    blocks = batch.blocks
    blocks = replace(blocks, label_ids=blocks.label_ids.clamp(max=tokens - 1),
                     mask=blocks.mask & (blocks.label_ids < tokens))
    factor = None if output.output_factor is None else output.output_factor[:tokens]
    return (replace(output, output_factor=factor), replace(batch, blocks=blocks),
            replace(shared, lm_head=shared.lm_head[:tokens]))


def scaled_logits(output: DrafterOutput, batch: TrainingBatch, scale: float) -> tuple[DrafterOutput, TrainingBatch]:
    """States whose logits are ``scale`` times as large, where the target scales what its LM head gives."""
    if scale == 1.0:
        return output, batch
    return replace(output, hidden=output.hidden * scale), replace(batch, last_hidden=batch.last_hidden * scale)


def drafter_loss(
    output: DrafterOutput, batch: TrainingBatch, shared: SharedWeights, objective: ObjectiveConfig,
    denominators: Denominators, shape: DrafterShape,
) -> LossTerms:
    """``L = 0.1 L_ce + 0.9 L_tv + 1.0 L_conf`` (Eq. 12), each term over its own window total.

    The loss is this batch's additive share: the shares of a window add up to the weighted mean over the window. A term
    whose denominator is 0 is 0. Everything in ``output`` gets a gradient, exactly zero where nothing depends on it.
    """
    if objective.implementation not in ("auto", "eager", "chunked", "triton"):
        raise ConfigError(
            f"objective.implementation={objective.implementation!r} is unknown: use auto, eager, chunked or "
            "triton."
        )
    output, batch, shared = of_known_tokens(output, batch, shared)
    output, batch = scaled_logits(output, batch, shape.logit_scale)
    weights = slot_weights(batch.blocks, objective.decay, shape.trained_length)
    scales = (_ratio(objective.ce_weight, denominators.ce), _ratio(objective.tv_weight, denominators.tv))
    soft = objective.ce_labels == "target"
    unknown = outside(shape, output.hidden.device)
    unknown = None if unknown is None else unknown[:len(shared.lm_head)]
    common = (output, batch, shared, weights, scales, shape.final_logit_softcap)
    if objective.implementation == "eager":
        terms = _eager(*common, soft=soft, unknown=unknown)
    else:
        terms = _chunked(*common, by_token=shape.head == "vanilla", budget=objective.chunk_megabytes << 20,
                         kind=_chunked_pass(objective.implementation, output.hidden.device, soft), unknown=unknown)
    loss, confidence = terms.loss, torch.zeros((), dtype=torch.float64, device=weights.device)
    if output.confidence_logits is not None:
        term = confidence_loss(output.confidence_logits, terms.rate, weights)
        loss = loss + _ratio(objective.confidence_weight, denominators.confidence) * term
        confidence = term.detach().double()
    total = weights.sum()
    return LossTerms(loss, {
        "loss_ce": terms.ce.double(), "loss_tv": terms.tv.double(), "loss_confidence": confidence,
        "weight_ce": total, "weight_tv": total,
        "weight_confidence": total if output.confidence_logits is not None else torch.zeros_like(total),
        **_measures(batch.blocks, terms.rate), **_coverage(batch.blocks, unknown),
    })
