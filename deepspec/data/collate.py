"""Samples laid end to end as one pack, with their anchors drawn. No padding and no state."""

from itertools import accumulate
from typing import Optional, Sequence

import torch
from torch import Tensor

from deepspec.data.anchors import build_blocks, sample_anchors
from deepspec.data.batch import FeatureSample, TrainingBatch
from deepspec.data.encoded import StoredSample, StoredStates, join, join_decoded


def collate(samples: Sequence[FeatureSample | StoredSample], *, num_anchors: int, draft_length: int, seed: int,
            epoch: int, decode: bool = True) -> TrainingBatch:
    """One pack of ``samples``; anchors per sample, never per pack, so that short conversations keep their share.

    With ``num_anchors=0`` the pack has N = 0 blocks, whose loss and gradient are zero. Tensors of hidden states keep
    their dtype and device; everything else is int64 or bool on the CPU. Samples as they lie in a store are decoded into
    the pack, or with ``decode=False`` stay as they are, for the device to decode them.
    """
    if not samples:
        raise ValueError("a pack needs at least one sample; use num_anchors=0 for one that must not count")
    states, features, last_hidden = _joined(samples, decode)
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
        features=features,
        last_hidden=last_hidden,
        blocks=build_blocks(documents, anchors, draft_length),
        epoch=epoch,
        states=states,
    )


def _joined(samples: Sequence[FeatureSample | StoredSample],
            decode: bool) -> tuple[Optional[StoredStates], Tensor, Tensor]:
    """(states that stay encoded, features, last hidden) of the pack."""
    stored = [item for item in samples if isinstance(item, StoredSample)]
    if len(stored) < len(samples):
        made = [item.decoded() if isinstance(item, StoredSample) else item for item in samples]
        for item in made:
            _check_rows(item)
        return None, torch.cat([item.features for item in made]), torch.cat([item.last_hidden for item in made])
    features, last_hidden = ([getattr(item.states, name) for item in stored] for name in ("features", "last_hidden"))
    if decode:
        return None, join_decoded(features), join_decoded(last_hidden)
    states = StoredStates(join(features), join(last_hidden))
    nothing = torch.empty(len(states.features), 0, dtype=states.features.dtype)
    return states, nothing, nothing


def _check_rows(item: FeatureSample) -> None:
    rows = (len(item.sample.loss_mask), len(item.features), len(item.last_hidden))
    if any(count != len(item.sample.input_ids) for count in rows):
        raise ValueError(
            f"sample {item.sample.sample_id!r} has {len(item.sample.input_ids)} tokens but {rows[0]} mask entries, "
            f"{rows[1]} feature rows and {rows[2]} last-hidden rows"
        )
