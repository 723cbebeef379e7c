"""Packs of a fixed size: what is missing is filled up with weight 0, so that every pack has the same shapes."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from deepspec.data.batch import AnchorBlocks, TrainingBatch


def weightless_blocks(count: int, row: int, first_id: Tensor, draft_length: int) -> AnchorBlocks:
    """``count`` blocks at packed ``row``, the first token of its document: no context, no label, weight 0.

    They see their own slots, so their attention is finite, and nothing flows back from them. ``first_id`` [1].
    """
    rows = torch.full((count,), row, dtype=torch.int64)
    none = torch.zeros(count, draft_length, dtype=torch.int64)
    ids = first_id.expand(count)
    return AnchorBlocks(
        anchor_rows=rows, context_starts=rows, anchor_positions=torch.zeros_like(rows), anchor_ids=ids,
        label_ids=none, previous_ids=torch.cat([ids[:, None], none[:, 1:]], dim=1),
        target_rows=rows[:, None].expand(-1, draft_length), mask=torch.zeros(count, draft_length, dtype=torch.bool),
    )


def _join(blocks: AnchorBlocks, more: AnchorBlocks) -> AnchorBlocks:
    return AnchorBlocks(**{f.name: torch.cat([getattr(blocks, f.name), getattr(more, f.name)]) for f in fields(blocks)})


def _longer(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])


def pad(batch: TrainingBatch, *, tokens: int, blocks: int) -> TrainingBatch:
    """``batch`` with exactly ``tokens`` tokens and ``blocks`` blocks; more than that is an error.

    The padding is a document of its own behind the others, which no block of theirs sees. All its positions are 0: the
    rotary table need not reach further than a sample does.
    """
    missing, missing_blocks = tokens - len(batch.input_ids), blocks - len(batch.blocks)
    if missing < 0 or missing_blocks < 0:
        raise ValueError(
            f"a pack of {len(batch.input_ids)} tokens and {len(batch.blocks)} blocks does not fit into {tokens} tokens "
            f"and {blocks} blocks"
        )
    starts = batch.document_starts + ((tokens,) if missing else ())
    ids = _longer(batch.input_ids, missing)
    row = starts[-2]
    filler = weightless_blocks(missing_blocks, row, ids[row:row + 1], batch.blocks.mask.shape[1])
    return replace(
        batch, input_ids=ids, positions=_longer(batch.positions, missing), document_starts=starts,
        features=_longer(batch.features, missing), last_hidden=_longer(batch.last_hidden, missing),
        states=None if batch.states is None else batch.states.longer(missing),
        blocks=_join(batch.blocks, filler), padding=batch.padding + missing,
    )
