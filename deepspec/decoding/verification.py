"""The acceptance rule. R requests, K draft tokens, T verified rows (all requests' rows end to end), V vocabulary.

Request r owns rows ``starts[r] .. starts[r] + lengths[r]``: row j of it is the target's distribution for draft token j,
the last one that for the bonus token.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from deepspec.decoding.types import DraftProposal
from deepspec.targets.sampling import Sampling, pick, target_probs


@dataclass(frozen=True)
class Verification:
    """What the target made of the drafts."""

    accepted: Tensor  # [R] int64, 0..l_r
    emitted: Tensor  # [R] int64, bonus token if all were accepted, else the token from the residual
    analytic_rate: Optional[Tensor] = None  # [R, K] float32 Eq. 8, NaN where the target was not asked


def accept_draft(target_at: Tensor, draft_at: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Accept x_k with probability ``min(1, p_t(x_k) / p_d(x_k))``; the first rejection discards the rest (Sec. 2.1).

    Args:
        target_at, draft_at: p_t and p_d of the drafted tokens [R, K]. At temperature 0 both are one-hot: p_d is 1, and
            p_t is 1 for an exact match and 0 otherwise.
        lengths: drafted tokens that were verified [R]; later entries of a row are not looked at.
        uniforms: [R, K] in [0, 1).

    Returns:
        Accepted tokens [R] int64.
    """
    accept = uniforms * draft_at.double() < target_at.double()
    accept &= torch.arange(accept.shape[1], device=accept.device) < lengths[:, None]
    return accept.long().cumprod(dim=1).sum(dim=1)


def sample_residual(target_rows: Tensor, draft_rows: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from ``norm(max(p_t - p_d, 0))``, what the target has left after a rejection (Sec. 2.1).

    A zero row of ``draft_rows`` gives the target's own distribution (the bonus token). [R, V], [R, V], [R] -> [R].
    """
    residual = (target_rows - draft_rows).clamp_(min=0)
    # Equal distributions reject with the probability of a rounding error and leave nothing: then p_t itself.
    empty = residual.sum(dim=1) <= 0
    if bool(empty.any()):
        residual[empty] = target_rows[empty]
    return pick(residual, uniforms)


def _draft_at_emission(proposal: DraftProposal, index: Tensor, accepted: Tensor, rejected: Tensor) -> Tensor:
    """p_d of the rejected position [R, V], zero rows for requests without a rejection."""
    assert proposal.probs is not None
    position = accepted.clamp(max=proposal.ids.shape[1] - 1)
    return proposal.probs[index, position].mul_(rejected[:, None])


def _verify_greedy(logits: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor) -> Verification:
    best = logits.argmax(dim=-1)
    offsets = torch.arange(ids.shape[1], device=ids.device)
    rows = (starts[:, None] + offsets).clamp(max=best.shape[0] - 1)
    match = (best[rows] == ids).float()
    accepted = accept_draft(match, torch.ones_like(match), lengths, torch.zeros_like(match, dtype=torch.float64))
    return Verification(accepted, best[starts + accepted])


def analytic_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """``1 - |p_d - p_t|_1 / 2`` (Eq. 8) of matching rows, in [0, 1]; [.., V] -> [..] float32."""
    return (1.0 - 0.5 * (target - draft).abs_().sum(dim=-1)).clamp_(0.0, 1.0)


def _judge_all(logits: Tensor, starts: Tensor, lengths: Tensor, proposal: DraftProposal, index: Tensor,
               uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Accepted tokens [R], p_t where the target emits [R, V], and Eq. 8 at every verified position [R, K]."""
    assert proposal.probs is not None
    probs, ids = target_probs(logits, sampling), proposal.ids[index]
    offsets = torch.arange(ids.shape[1], device=ids.device)
    rows = (starts[:, None] + offsets).clamp(max=len(probs) - 1)
    accepted = accept_draft(probs[rows, ids], proposal.token_probs[index], lengths, uniforms)
    rate = torch.full(ids.shape, float("nan"), device=ids.device)
    for k in range(ids.shape[1]):  # position by position: the whole [R, K, V] difference would double the memory
        asked = lengths > k
        rate[asked, k] = analytic_acceptance(probs[starts[asked] + k], proposal.probs[index[asked], k])
    return accepted, probs[starts + accepted], rate


def _judge_in_turn(logits: Tensor, starts: Tensor, lengths: Tensor, proposal: DraftProposal, index: Tensor,
                   uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """The same without Eq. 8, position by position: what follows a rejection is never turned into a distribution."""
    ids, drafted = proposal.ids[index], proposal.token_probs[index]
    accepted = torch.zeros_like(lengths)
    emission = logits.new_empty(len(starts), logits.shape[1], dtype=torch.float32)
    alive = torch.arange(len(starts), device=starts.device)
    for k in range(ids.shape[1] + 1):
        probs = target_probs(logits[starts[alive] + k], sampling)
        at = min(k, ids.shape[1] - 1)  # behind the last draft token nothing is judged: lengths say so
        own = probs.gather(1, ids[alive, at][:, None])
        kept = accept_draft(own, drafted[alive, at][:, None], lengths[alive] - k, uniforms[alive, at][:, None]) > 0
        emission[alive[~kept]] = probs[~kept]
        alive = alive[kept]
        accepted[alive] += 1
        if not len(alive):
            break
    return accepted, emission, None


def verify(logits: Tensor, starts: Tensor, lengths: Tensor, proposal: Optional[DraftProposal], index: Tensor,
           accept_uniforms: Tensor, emit_uniforms: Tensor, sampling: Sampling, *,
           analytic: bool = False) -> Verification:
    """Apply the acceptance rule of Sec. 2.1 to many requests at once.

    Args:
        logits: the target's, float32 [T, V].
        starts, lengths: first row and verified tokens of each request [R].
        proposal: the drafts; None if every length is 0.
        index: each request's row in the proposal [R] (any value where the length is 0).
        accept_uniforms: [R, K] random numbers in [0, 1).
        emit_uniforms: [R, K + 1] random numbers for the token the target adds after 0..K accepted ones.
        sampling: the processing that also made the draft's distributions.
        analytic: also compute Eq. 8 at every verified position (temperature above 0; at 0 it is the exact match).
    """
    if sampling.temperature == 0:
        ids = logits.new_zeros((len(starts), 1), dtype=torch.int64) if proposal is None else proposal.ids[index]
        result = _verify_greedy(logits, starts, lengths, ids)
        if not analytic or proposal is None:
            return result
        offsets = torch.arange(ids.shape[1], device=ids.device)
        rows = (starts[:, None] + offsets).clamp(max=len(logits) - 1)
        rate = (logits.argmax(dim=-1)[rows] == ids).float()
        rate = rate.masked_fill(offsets >= lengths[:, None], float("nan"))
        return Verification(result.accepted, result.emitted, rate)
    if proposal is None:
        return Verification(torch.zeros_like(lengths), pick(target_probs(logits[starts], sampling),
                                                            emit_uniforms[:, 0]))
    assert proposal.probs is not None
    judge = _judge_all if analytic else _judge_in_turn
    accepted, emission, judged = judge(logits, starts, lengths, proposal, index, accept_uniforms, sampling)
    draft_rows = _draft_at_emission(proposal, index, accepted, accepted < lengths)
    emitted = sample_residual(emission, draft_rows, emit_uniforms.gather(1, accepted[:, None])[:, 0])
    return Verification(accepted, emitted, judged)
