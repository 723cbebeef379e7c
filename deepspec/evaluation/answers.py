"""Acceptance along answers of the target: teacher forced at every token, exact where the answers are drawn from p.

T tokens of a pack, N anchors (every token of an answer but its last), K draft positions, V vocabulary.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepspec.data.batch import FeatureSample, Sample, TrainingBatch
from deepspec.data.collate import collate
from deepspec.data.sources import encode_samples, token_batches
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterOutput
from deepspec.evaluation.analytic import (
    AnchorValues, Floats, Judged, anchor_values, before, draft_probs, judge, rows_at_once, survival,
)
from deepspec.targets.sampling import Sampling, target_probs


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target answered, in one piece."""

    id: str
    domain: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    ended: bool  # the last token is an end-of-turn token, not the last one of the budget
    extra: int = 0  # tokens at the end beyond the budget, which rounds within it may look at

    @property
    def sample(self) -> Sample:
        """The answer's tokens are what blocks are drafted for."""
        ids = torch.tensor(self.prompt_ids + self.token_ids, dtype=torch.int64)
        return Sample(self.id, self.domain, ids, torch.arange(len(ids)) >= len(self.prompt_ids))


def on_device(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    """``batch`` with its blocks and positions where the drafter is."""
    blocks = replace(batch.blocks, **{item.name: getattr(batch.blocks, item.name).to(device)
                                      for item in fields(batch.blocks)})
    return replace(batch, positions=batch.positions.to(device), input_ids=batch.input_ids.to(device), blocks=blocks,
                   features=batch.features.to(device), last_hidden=batch.last_hidden.to(device))


def draft_logits(drafter: Any, output: DrafterOutput, rows: Tensor) -> Tensor:
    """U_k + B_k (Eq. 4) [n, V] at ``rows`` [n] of the flattened [N * K] slots."""
    logits = drafter.head_logits(output.hidden.flatten(0, 1)[rows])
    if output.transition is not None and output.output_factor is not None:
        logits = logits + exact(functional.linear(output.transition.flatten(0, 1)[rows], output.output_factor))
    return logits


def _judged(target: Any, drafter: Any, batch: TrainingBatch, sampling: Sampling) -> Judged:
    """All slots of a pack [N * K]; zeros where there is nothing to be taught."""
    blocks, output = batch.blocks, drafter(batch)
    slots = torch.nonzero(blocks.mask.flatten()).flatten()
    ids, wanted = blocks.label_ids.flatten(), blocks.target_rows.flatten()
    found: Any = {item.name: torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for item in fields(Judged)}
    for rows in slots.split(rows_at_once(target.spec.vocab_size)):
        # Neighbouring blocks ask for the same rows of the target.
        distinct, place = wanted[rows].unique(return_inverse=True)
        expected = target_probs(target.logits(batch.last_hidden[distinct]), sampling)[place]
        drafted = draft_probs(draft_logits(drafter, output, rows), sampling, target.tokenizer_size)
        part = judge(drafted, expected, ids[rows], target.spec.eos_token_ids)
        for name, values in found.items():
            values[rows] = getattr(part, name)
    return Judged(**found)


@torch.no_grad()
def _pack_values(target: Any, drafter: Any, samples: Sequence[FeatureSample], sampling: Sampling, *, num_anchors: int,
                 seed: int, teacher_forced: bool) -> tuple[AnchorValues, Floats]:
    """Values of all blocks of one pack, and how probable it is that each position is kept [N, K]."""
    length = drafter.shape.draft_length
    batch = on_device(collate(samples, num_anchors=num_anchors, draft_length=length, seed=seed, epoch=-1),
                      target.device)
    if not len(batch.blocks):
        return AnchorValues.none(length), np.zeros((0, length))
    mask = batch.blocks.mask.double()
    part = _judged(target, drafter, batch, sampling)
    rate, stop = (values.view(mask.shape).double() * mask for values in (part.rate, part.stop))
    if teacher_forced:
        kept, stop = rate, torch.zeros_like(stop)
    else:
        kept = survival(part.draft_at, part.target_at).view(mask.shape) * mask
    ends = torch.tensor(batch.document_starts[1:], device=batch.blocks.anchor_rows.device)
    owner = torch.bucketize(batch.blocks.anchor_rows, ends, right=True).tolist()
    values = anchor_values([samples[place].sample.sample_id for place in owner],
                           [samples[place].sample.domain for place in owner], batch.blocks.anchor_positions,
                           reach=before(kept) * mask, rate=rate, stop=stop)
    return values, kept.cpu().numpy()


def teacher_forced_values(target: Any, drafter: Any, samples: Iterable[FeatureSample], sampling: Sampling, *,
                          num_anchors: int, seed: int) -> AnchorValues:
    """``teacher_forced`` at up to ``num_anchors`` anchors of each sample, drawn from (seed, sample id).

    Needs the stored hidden states only: at temperature 1 these are the products of 1 - L1/2 that training logs as
    ``acceptance_length_proxy``. Anchors lie in the order of the samples, then of their positions.
    """
    parts = [_pack_values(target, drafter, [item], sampling, num_anchors=num_anchors, seed=seed,
                          teacher_forced=True)[0] for item in samples]
    return AnchorValues.concatenate(parts) if parts else AnchorValues.none(drafter.shape.draft_length)


def round_starts(next_start: Floats) -> Floats:
    """Probability that a round begins at each of n consecutive anchors [n]; one begins at the first.

    ``next_start`` [n, K + 1]: probability that a round at i is followed by one at i + 1, .., i + K + 1. A round keeps
    the answer, so the chance to begin at i is the sum over the rounds that lead there.
    """
    count, width = next_start.shape
    starts = np.zeros(count + width)
    starts[:1] = 1.0
    for place in range(count):
        starts[place + 1:place + 1 + width] += starts[place] * next_start[place]
    return starts[:count]


def continued(target: Any, answers: Sequence[Answer], sampling: Sampling, *, length: int,
              batch_size: int) -> list[Answer]:
    """``answers`` with those that were cut continued by ``length`` - 1 tokens, K for ``length``.

    Decoding counts rounds that begin before the budget ends in full. What they look at is what the target would have
    said next: random numbers belong to (seed, id, position), so these are the tokens of a larger budget.
    """
    cut = [item for item in answers if not item.ended] if length > 1 else []
    requests = [DecodeRequest(item.id, item.prompt_ids + item.token_ids, item.domain) for item in cut]
    decoder = SpeculativeDecoder(target, None, sampling, batch_size=batch_size, max_new_tokens=max(1, length - 1),
                                 mode="none")
    more = {item.id: item for item in decoder.decode(requests)}
    return [item if item.id not in more else replace(
        item, token_ids=item.token_ids + more[item.id].token_ids, extra=len(more[item.id].token_ids),
        ended=more[item.id].finish_reason == "stop") for item in answers]


def _weighted(values: AnchorValues, kept: Floats, answer: Answer) -> AnchorValues:
    """``values`` of all anchors of one answer with the number of rounds that begin at each.

    No round begins at the last token of the budget. Where an answer is cut, rounds that could look past the cut are
    left out.
    """
    length = values.rate.shape[1]
    through = np.cumprod(np.concatenate([np.ones((len(kept), 1)), kept], axis=1), axis=1)  # [n, K + 1] accepted >= k
    exactly = through.copy()
    exactly[:, :-1] -= through[:, 1:]
    weight = round_starts(exactly)
    weight[max(0, len(answer.token_ids) - answer.extra - 1):] = 0.0
    if not answer.ended:
        weight[max(0, len(kept) - length + 1):] = 0.0
    return replace(values, weight=weight)


@torch.no_grad()
def answer_values(target: Any, drafter: Any, answers: Sequence[Answer], sampling: Sampling, *,
                  token_budget: int = 2048) -> AnchorValues:
    """``answers``: every anchor of every answer, weighted with the number of rounds expected to begin there.

    Unbiased for what decoding with ``sampling`` measures if the answers were drawn from the target with ``sampling``:
    the sum of weight x length over the sum of weights is the acceptance length. ``token_budget`` tokens are read at
    once.
    """
    kept = [answer for answer in answers if len(answer.token_ids) > 1]
    parts = [AnchorValues.none(drafter.shape.draft_length)]
    for chunk in token_batches([len(item.prompt_ids) + len(item.token_ids) for item in kept], token_budget):
        texts = [kept[place] for place in chunk]
        samples = encode_samples(target, [item.sample for item in texts])
        everywhere = max(len(item.token_ids) for item in texts)
        values, survives = _pack_values(target, drafter, samples, sampling, num_anchors=everywhere, seed=0,
                                        teacher_forced=False)
        for item in texts:
            own = values.sample == item.id
            parts.append(_weighted(values.select(own), survives[own], item))
    return AnchorValues.concatenate(parts)
