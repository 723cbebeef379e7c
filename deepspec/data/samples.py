"""Training samples from stored token ids. Nothing is rendered or tokenised again, so no boundary can shift.

The loss mask covers what the target itself produced and nothing else. An answer cut at ``max_tokens`` ends without a
stop token, so no stop that never happened is taught. T tokens of a sample.
"""

import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

import numpy as np
import torch

from deepspec.data.batch import Sample
from deepspec.data.responses import RESPONSES_FILE, ResponseRow, read_responses
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenRun:
    """A sample before it becomes tensors."""

    sample_id: str
    domain: str
    ids: np.ndarray  # [T] integers
    mask: np.ndarray  # [T] bool


class SampleSet(Sequence[Sample]):
    """Samples kept as one flat array (5 bytes per token); tensors are made when one is asked for."""

    def __init__(self, runs: Iterable[TokenRun], dropped: Optional[dict[str, int]] = None) -> None:
        runs = [TokenRun(run.sample_id, run.domain, run.ids.astype(np.int32), run.mask) for run in runs]
        self.sample_ids = [run.sample_id for run in runs]
        self.domains = [run.domain for run in runs]
        self.offsets = np.cumsum([0] + [len(run.ids) for run in runs])
        self._ids = np.concatenate([np.empty(0, np.int32), *(run.ids for run in runs)])
        self._mask = np.concatenate([np.empty(0, bool), *(run.mask for run in runs)])
        self.dropped = dict(dropped or {})

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return np.diff(self.offsets).tolist()

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        index = range(len(self))[index]
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return Sample(
            sample_id=self.sample_ids[index],
            domain=self.domains[index],
            input_ids=torch.from_numpy(self._ids[rows].astype(np.int64)),
            loss_mask=torch.from_numpy(self._mask[rows].copy()),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


def sample_runs(row: ResponseRow) -> list[TokenRun]:
    """Samples of one row: turns share a sample as long as each prompt continues exactly what came before.

    A template that rewrites history (drops earlier reasoning, say) breaks the prefix; such a turn becomes a sample of
    its own, with the history as it was served. A row with several samples names them ``id#0``, ``id#1``, ...
    """
    groups: list[tuple[list[int], list[bool]]] = []
    for turn in row.turns:
        prompt, response = list(turn.prompt_ids), list(turn.response_ids)
        if groups and prompt[:len(groups[-1][0])] == groups[-1][0]:
            ids, mask = groups[-1]
            mask += [False] * (len(prompt) - len(ids))
            ids[:] = prompt
        else:
            ids, mask = prompt, [False] * len(prompt)
            groups.append((ids, mask))
        ids += response
        mask += [True] * len(response)
    names = [row.id] if len(groups) == 1 else [f"{row.id}#{index}" for index in range(len(groups))]
    return [
        TokenRun(name, row.domain, np.asarray(ids, dtype=np.int64), np.asarray(mask, dtype=bool))
        for name, (ids, mask) in zip(names, groups)
    ]


def check_ids(run: TokenRun, where: str, vocab_size: Optional[int], mask_token_id: Optional[int]) -> None:
    """Raise InputRefused for a token the target has no row for, and for the filler of the block slots."""
    if vocab_size is not None and (bad := (run.ids < 0) | (run.ids >= vocab_size)).any():
        raise InputRefused(
            f"{where}: row {run.sample_id!r} has token id {int(run.ids[bad][0])}, but the target's embedding has only "
            f"{vocab_size} rows. It comes from another tokenizer: make responses and features again for this target."
        )
    if mask_token_id is not None and (run.ids == mask_token_id).any():
        raise InputRefused(
            f"{where}: row {run.sample_id!r} contains token id {mask_token_id} at position "
            f"{int(np.flatnonzero(run.ids == mask_token_id)[0])}, which target.mask_token_id reserves for empty block "
            f"slots. Choose an id that text never contains, or remove the row."
        )


def load_samples(directory: os.PathLike | str, split: str, max_length: int, *, vocab_size: Optional[int] = None,
                 mask_token_id: Optional[int] = None) -> SampleSet:
    """Samples of one split, cut at ``max_length`` tokens, in prompt order.

    Samples without a place for a block are dropped and counted (``.dropped``). Raises InputRefused naming the row for
    ids outside ``vocab_size``, for ``mask_token_id`` in the text, and when nothing is left to train on.
    """
    if max_length < 2:
        raise InputRefused(f"data.max_length={max_length} leaves no room for an anchor and a label; give at least 2")
    path = Path(directory) / RESPONSES_FILE
    dropped: Counter[str] = Counter()
    kept: list[TokenRun] = []
    for row in read_responses(directory, split):
        for run in sample_runs(row):
            cut = TokenRun(run.sample_id, run.domain, run.ids[:max_length], run.mask[:max_length])
            check_ids(cut, str(path), vocab_size, mask_token_id)
            if not (cut.mask[:-1] & cut.mask[1:]).any():
                dropped["no anchors: cut by max_length" if len(run.ids) > max_length else "no anchors"] += 1
                continue
            kept.append(cut)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    log.info("%s: %d %s samples, %d tokens%s", path, len(kept), split, sum(len(run.ids) for run in kept),
             f"; dropped {reasons}" if dropped else "")
    if not kept and split == "train":
        raise InputRefused(f"{path}: no usable {split} sample ({reasons or 'no rows'}). Raise data.max_length or add "
                           "prompts.")
    return SampleSet(kept, dropped)
