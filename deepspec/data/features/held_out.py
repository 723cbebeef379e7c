"""Held-out samples of an imported store as answers to prompts, so that the stages after training have something to
decode: confidence, evaluation and export read prompts, which a cache of hidden states has only as token ids.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Optional

import numpy as np

from deepspec import artifacts
from deepspec.config.paths import GIVEN_RESPONSES
from deepspec.data.batch import Sample
from deepspec.data.jsonl import dump_row
from deepspec.data.responses import RESPONSES_FILE, ResponseRow, Turn


class HeldOutRows:
    """Writes ``responses/responses.jsonl`` of a store; it is complete when the block ends without an error."""

    def __init__(self, store: Path, fingerprint: str) -> None:
        self._directory = store / GIVEN_RESPONSES
        self._manifest = artifacts.begin(self._directory, "responses", fingerprint)
        self._file = open(self._directory / RESPONSES_FILE, "wb")
        self._rows = 0

    def __enter__(self) -> "HeldOutRows":
        return self

    def add(self, sample: Sample) -> None:
        """One row; an answer for every supervised stretch of tokens. A sample without a prompt makes none."""
        row = response_row(sample)
        if row.turns:
            self._file.write(dump_row(row.to_json()))
            self._rows += 1

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self._file.close()
        if kind is None and self._rows:
            artifacts.complete(self._directory, self._manifest, [RESPONSES_FILE])
        elif kind is None:
            shutil.rmtree(self._directory)  # ours alone


def response_row(sample: Sample) -> ResponseRow:
    """The sample's tokens as prompt and answer; what the target saw and said is all that is known of it."""
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.numpy().astype(np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    turns = tuple(
        Turn(tuple(ids[:begin]), tuple(ids[begin:end]), "stop", "")
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist()) if begin > 0
    )
    return ResponseRow(sample.sample_id, sample.domain, "held_out", (), turns)
