"""Where blocks start and what they are taught. T tokens of a document, N blocks, K draft tokens.

An anchor p is the last verified token: it and its successor are both tokens the target wrote. The block at p is taught
the tokens p+1, p+2, ... up to the first one the target did not write.
"""

from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.data.batch import AnchorBlocks, Sample
from deepspec.data.order import keyed_uint64


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """Positions p with both p and p+1 supervised, ascending: ``[T] bool -> [n] int64``, at most T-2."""
    mask = loss_mask.bool()
    return torch.nonzero(mask[:-1] & mask[1:]).flatten()


def sample_anchors(loss_mask: Tensor, num_anchors: int, *, seed: int, epoch: int, sample_id: str) -> Tensor:
    """Up to ``num_anchors`` valid anchors, uniform without replacement, ascending: ``[T] bool -> [n] int64``.

    Depends on (seed, epoch, sample id) alone: the same after a resume, in any pack and on any number of ranks.
    """
    valid = valid_anchors(loss_mask)
    if num_anchors < 0:
        raise ValueError(f"num_anchors={num_anchors} must not be negative")
    if valid.numel() <= num_anchors:
        return valid
    if num_anchors == 0:
        return valid[:0]
    keys = keyed_uint64(valid.numel(), "anchors", seed, epoch, sample_id)
    # The smallest of independent keys are a uniform subset; unlike Generator.choice this stream never changes.
    chosen = np.sort(np.argpartition(keys, num_anchors - 1)[:num_anchors])
    return valid[torch.from_numpy(chosen)]


def build_blocks(samples: Sequence[Sample], anchors: Sequence[Tensor], draft_length: int) -> AnchorBlocks:
    """Blocks of documents laid end to end. ``anchors[i]`` are positions within document i, in any order.

    No block looks past the end of its document, so a pack's blocks are those of its documents taken one by one.
    """
    if len(samples) != len(anchors):
        raise ValueError(f"{len(samples)} samples but {len(anchors)} lists of anchors")
    if draft_length < 1:
        raise ValueError(f"draft_length={draft_length} must be at least 1")
    lengths = torch.tensor([len(sample.input_ids) for sample in samples], dtype=torch.int64)
    ends = lengths.cumsum(0)
    counts = torch.tensor([len(positions) for positions in anchors], dtype=torch.int64)
    anchor_positions = torch.cat([*anchors, torch.empty(0, dtype=torch.int64)]).long()
    starts, block_ends = (ends - lengths).repeat_interleave(counts), ends.repeat_interleave(counts)
    anchor_rows = starts + anchor_positions
    if bool(((anchor_positions < 0) | (anchor_rows >= block_ends)).any()):
        raise ValueError("an anchor lies outside its document")
    all_ids = torch.cat([*(sample.input_ids for sample in samples), torch.empty(0, dtype=torch.int64)])
    all_masks = torch.cat([*(sample.loss_mask.bool() for sample in samples), torch.empty(0, dtype=torch.bool)])

    steps = torch.arange(draft_length)
    label_rows = anchor_rows[:, None] + 1 + steps  # [N, K]
    inside = label_rows < block_ends[:, None]
    label_rows = torch.where(inside, label_rows, anchor_rows[:, None])
    # A cumulative product makes the prefix contiguous: nothing after the first foreign token is taught.
    mask = (inside & all_masks[label_rows]).cumprod(dim=1).bool()
    label_ids = torch.where(mask, all_ids[label_rows], 0)
    anchor_ids = all_ids[anchor_rows]
    return AnchorBlocks(
        anchor_rows=anchor_rows,
        context_starts=starts,
        anchor_positions=anchor_positions,
        anchor_ids=anchor_ids,
        label_ids=label_ids,
        previous_ids=torch.cat([anchor_ids[:, None], label_ids[:, :-1]], dim=1),
        target_rows=torch.where(mask, anchor_rows[:, None] + steps, anchor_rows[:, None]),
        mask=mask,
    )
