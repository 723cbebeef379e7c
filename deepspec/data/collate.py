"""Samples laid end to end as one pack, with their anchors drawn. No padding and no state."""

from itertools import accumulate
from typing import Sequence

import torch

from deepspec.data.anchors import build_blocks, sample_anchors
from deepspec.data.batch import FeatureSample, TrainingBatch


def collate(samples: Sequence[FeatureSample], *, num_anchors: int, draft_length: int, seed: int,
            epoch: int) -> TrainingBatch:
    """One pack of ``samples``; anchors per sample, never per pack, so that short conversations keep their share.

    With ``num_anchors=0`` the pack has N = 0 blocks, whose loss and gradient are zero. Tensors of hidden states keep
    their dtype and device; everything else is int64 or bool on the CPU.
    """
    if not samples:
        raise ValueError("a pack needs at least one sample; use num_anchors=0 for one that must not count")
    for item in samples:
        _check_rows(item)
    documents = [item.sample for item in samples]
    lengths = [len(document.input_ids) for document in documents]
    anchors = [
        sample_anchors(document.loss_mask, num_anchors, seed=seed, epoch=epoch, sample_id=document.sample_id)
        for document in documents
    ]
    return TrainingBatch(
        sample_ids=tuple(document.sample_id for document in documents),
        input_ids=torch.cat([document.input_ids for document in documents]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        document_starts=tuple(accumulate(lengths, initial=0)),
        features=torch.cat([item.features for item in samples]),
        last_hidden=torch.cat([item.last_hidden for item in samples]),
        blocks=build_blocks(documents, anchors, draft_length),
        epoch=epoch,
    )


def _check_rows(item: FeatureSample) -> None:
    rows = (len(item.sample.loss_mask), len(item.features), len(item.last_hidden))
    if any(count != len(item.sample.input_ids) for count in rows):
        raise ValueError(
            f"sample {item.sample.sample_id!r} has {len(item.sample.input_ids)} tokens but {rows[0]} mask entries, "
            f"{rows[1]} feature rows and {rows[2]} last-hidden rows"
        )
