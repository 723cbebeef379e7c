"""Expected rounds along what the drafter drafts itself, at fixed anchors of given texts.

R rows read side by side, K draft positions, V vocabulary.
"""

from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.data.anchors import sample_anchors
from deepspec.data.batch import Sample
from deepspec.decoding.draft import draft_uniforms
from deepspec.decoding.recurrent import draft_state
from deepspec.decoding.types import DraftProposal
from deepspec.evaluation.analytic import AnchorValues, Judged, anchor_values, before, judge, rows_at_once, survival
from deepspec.targets.sampling import Sampling, target_probs


def fixed_anchors(samples: Sequence[Sample], num_anchors: int, seed: int) -> list[list[int]]:
    """Up to ``num_anchors`` anchors of each sample, drawn from (seed, sample id): the same for every drafter."""
    return [sample_anchors(item.loss_mask, num_anchors, seed=seed, epoch=-1, sample_id=item.sample_id).tolist()
            for item in samples]


def anchors_per_sample(samples: Sequence[Sample], total: int) -> int:
    """How many anchors of each sample make at least ``total`` together, as far as the samples have them."""
    valid = sorted(int((item.loss_mask[:-1] & item.loss_mask[1:]).sum()) for item in samples)
    each = 0
    for place, count in enumerate(valid):
        left = len(valid) - place
        if total <= left * (count - each):
            return each + -(-total // left)
        total -= left * (count - each)
        each = count
    return each


class _Reader:
    """Reads texts side by side up to one anchor after another; the drafter drafts there, the target reads the draft.

    Each row's cache holds its text up to the anchor; what was drafted there is forgotten before the text goes on.
    """

    def __init__(self, target: Any, drafter: Any, samples: Sequence[Sample], sampling: Sampling) -> None:
        self._target, self._samples, self._sampling = target, samples, sampling
        self._length: int = drafter.shape.draft_length
        longest = max(len(item.input_ids) for item in samples)
        self._cache = target.new_cache(len(samples), longest + self._length)
        self._drafts = draft_state(drafter, len(samples), tokenizer_size=target.tokenizer_size, capacity=longest)
        lengths = [len(item.input_ids) for item in samples]
        encoded = target.encode(torch.cat([item.input_ids for item in samples]), lengths)
        self._features = encoded.features.split(lengths)

    def at(self, rows: list[int], anchors: list[int]) -> tuple[DraftProposal, Tensor]:
        """Blocks of ``rows`` at their ``anchors`` (each behind the row's last one), and the target's logits
        [R * K, V] after the anchor and after each drafted token but the last."""
        for row, anchor in zip(rows, anchors):
            known = self._drafts.context_length(row)
            following = self._samples[row].input_ids[known + 1:anchor + 1].tolist()
            self._drafts.append(row, self._features[row][known:anchor], following)
        ids = [int(self._samples[row].input_ids[anchor]) for row, anchor in zip(rows, anchors)]
        uniforms = draft_uniforms(self._sampling.seed, [self._samples[row].sample_id for row in rows], anchors,
                                  [0] * len(rows), self._length)
        proposal = self._drafts.propose(rows, ids, uniforms, self._sampling)
        flat: list[int] = []
        counts: list[int] = []
        wanted: list[int] = []
        for row, anchor, drafted in zip(rows, anchors, proposal.ids.tolist()):
            text = self._samples[row].input_ids[self._cache.lengths[row]:anchor + 1].tolist()
            flat += text + drafted[:-1]
            counts.append(len(text) + self._length - 1)
            wanted += range(len(flat) - self._length, len(flat))
        hidden = self._target.step(torch.tensor(flat), rows, counts, self._cache, features=False).last_hidden
        for row, anchor in zip(rows, anchors):
            self._cache.truncate(row, anchor + 1)
        return proposal, self._target.logits(hidden[torch.tensor(wanted, device=hidden.device)])


def _judged(proposal: DraftProposal, logits: Tensor, sampling: Sampling, stop_ids: Sequence[int]) -> Judged:
    """All slots of the blocks [R * K]."""
    ids, size = proposal.ids.flatten(), logits.shape[-1]
    parts = []
    for rows in torch.arange(len(ids), device=ids.device).split(rows_at_once(size)):
        if proposal.probs is None:  # greedy: all mass on the drafted token
            drafted = torch.zeros(len(rows), size, device=ids.device).scatter_(1, ids[rows, None], 1.0)
        else:
            drafted = proposal.probs.flatten(0, 1)[rows]
        parts.append(judge(drafted, target_probs(logits[rows], sampling), ids[rows], stop_ids))
    return Judged(*(torch.cat([getattr(part, name) for part in parts]) for name in Judged.__dataclass_fields__))


@torch.no_grad()
def drafted_values(target: Any, drafter: Any, samples: Sequence[Sample], sampling: Sampling, *, num_anchors: int,
                   seed: int = 0, batch_size: int = 16) -> AnchorValues:
    """``drafted`` (analytic.py) at up to ``num_anchors`` anchors of each sample, drawn from (seed, sample id).

    Drafts are drawn from (``sampling.seed``, sample id, position) and nothing else, so two drafters meet the same
    numbers at the same anchors, whatever the batch. Anchors lie in the order of the samples, then of their positions.
    """
    stop_ids = target.spec.eos_token_ids
    ends = torch.tensor(sorted(stop_ids))
    chosen = fixed_anchors(samples, num_anchors, seed)
    found, order = [AnchorValues.none(drafter.shape.draft_length)], []
    used = [place for place, anchors in enumerate(chosen) if anchors]
    for group in (used[start:start + batch_size] for start in range(0, len(used), batch_size)):
        reader = _Reader(target, drafter, [samples[place] for place in group], sampling)
        for turn in range(max(len(chosen[place]) for place in group)):
            rows = [row for row, place in enumerate(group) if turn < len(chosen[place])]
            owners = [group[row] for row in rows]
            proposal, logits = reader.at(rows, [chosen[place][turn] for place in owners])
            part = _judged(proposal, logits, sampling, stop_ids)
            shape = proposal.ids.shape
            kept = survival(part.target_at, part.draft_at).view(shape)
            kept = kept.masked_fill(torch.isin(proposal.ids, ends.to(kept.device)), 0.0)  # an answer ends there
            found.append(anchor_values(
                [samples[place].sample_id for place in owners], [samples[place].domain for place in owners],
                torch.tensor([chosen[place][turn] for place in owners]), reach=before(kept),
                rate=part.rate.view(shape), stop=part.stop.view(shape)))
            order += [(place, turn) for place in owners]
    ranked = sorted(range(len(order)), key=order.__getitem__)
    return AnchorValues.concatenate(found).select(np.array(ranked, dtype=np.int64))
