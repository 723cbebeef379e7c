"""Bytes of prompts and answers on disk, with the temporary files that collecting needs; torch-free, seconds at most.

Collecting keeps the text of every valid row, and its signature where near duplicates are looked for, until it has
chosen: for a large data set of which few rows are taken that is far more than what stays.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from deepspec.config.schema import MISSING, Config, SourceConfig
from deepspec.data.jsonl import dump_row
from deepspec.data.prompt_rows import RowRefused, conversation, from_column
from deepspec.data.prompt_sources import DEFAULT_EMBEDDED, source_paths
from deepspec.data.request_logs import unwrap_request
from deepspec.planning.samples import SampleLength

SAMPLED_LINES, SAMPLED_PLACES = 40, 12  # of a file, evenly spread
SIGNATURE_WORD = 4  # bytes of each of data.near_duplicate_num_perm values
EMBEDDED_ROW = 290  # bytes of a row in the pool: mean of the three embedded sources
HUB_ROW = 1200  # assumed: questions of Open-PerfectBlend, whose answers are not kept
SPLIT_AND_SOURCE = 35  # what a chosen row has besides
# Digits of the vocabulary size -> (bytes of a token id in JSON, comma included; bytes of text per token).
TOKEN_BYTES = {4: (3.8, 2.85), 5: (4.3, 3.8), 6: (5.4, 4.2)}
ANSWER_FIELDS = 95  # bytes of an answered row that are neither those nor its prompt's


@dataclass(frozen=True)
class Rows:
    """Valid rows of a source and the bytes of one while it waits."""

    count: float
    each: float


@dataclass(frozen=True)
class TextBytes:
    """What the stages prompts and responses write."""

    pool: int  # temporary, of the stage prompts
    prompts: int
    responses: int  # twice: as they come in, and joined


def _sampled_lines(path: Path) -> list[bytes]:
    size, lines = path.stat().st_size, []
    with open(path, "rb") as handle:
        for place in range(SAMPLED_PLACES):
            handle.seek(size * place // SAMPLED_PLACES)
            if place:
                handle.readline()  # the rest of a line whose beginning was not seen
            lines += [line for line, _ in zip(handle, range(SAMPLED_LINES)) if line.strip()]
    return lines


def _pooled(source: SourceConfig, line: bytes) -> int:
    """Bytes the row takes in the pool; 0 if it is refused."""
    try:
        row = json.loads(line)
        row = unwrap_request(row) if source.kind == "requests" else row
        messages, tools = conversation(from_column(row, source.prompt_column) if source.prompt_column else row)
        kept = {"id": str(row.get("id", "0" * 20)), "domain": source.domain, "messages": messages}
        return len(dump_row(kept | ({"tools": tools} if tools else {})))
    except (ValueError, TypeError, AttributeError, RowRefused):
        return 0


def _file_rows(source: SourceConfig) -> Rows:
    """From some lines of every file, without reading them whole."""
    count = total = 0.0
    for path in source_paths(source):
        lines = _sampled_lines(path)
        if not lines:
            continue
        sizes = [_pooled(source, line) for line in lines]
        rows = path.stat().st_size / (sum(map(len, lines)) / len(lines))
        count += rows * sum(size > 0 for size in sizes) / len(lines)
        total += rows * sum(sizes) / len(lines)
    return Rows(count, total / count if count else 0.0)


def _parquet_rows(source: SourceConfig) -> Rows:
    try:
        from pyarrow import parquet

        found = [parquet.read_metadata(path) for path in source_paths(source)]
    except (ImportError, OSError, ValueError):
        return Rows(0.0, 0.0)
    count = sum(data.num_rows for data in found)
    total = sum(data.row_group(group).total_byte_size for data in found for group in range(data.num_row_groups))
    return Rows(count, total / count if count else 0.0)


def rows_of(source: SourceConfig, limit: Optional[int]) -> Rows:
    """What is known of a source before it is read; ``limit`` is what embedded ones are asked for and a hub's at least
    has."""
    if source.kind in ("jsonl", "requests"):
        return _file_rows(source)
    if source.kind == "parquet":
        return _parquet_rows(source)
    asked = source.cap or limit or (DEFAULT_EMBEDDED if source.kind == "embedded" else 0)
    return Rows(asked, EMBEDDED_ROW if source.kind == "embedded" else HUB_ROW)


def answer_bytes(config: Config, length: SampleLength) -> float:
    """Bytes of an answered row besides its prompt."""
    vocabulary = config.target.shape.vocab_size
    digits = 6 if vocabulary == MISSING else min(6, max(4, len(str(vocabulary))))
    per_id, per_token = TOKEN_BYTES[digits]
    return length.tokens * per_id + length.answer * per_token + ANSWER_FIELDS


def text_bytes(config: Config, prompts: Optional[int], length: SampleLength) -> TextBytes:
    """Of a run with so many prompts (None: all that the sources have)."""
    sources = [rows_of(source, config.data.max_prompts) for source in config.data.sources]
    count, total = sum(rows.count for rows in sources), sum(rows.count * rows.each for rows in sources)
    each = total / count if count else HUB_ROW
    kept = min(prompts, count) if prompts is not None and count else prompts or count
    signature = SIGNATURE_WORD * config.data.near_duplicate_num_perm
    pool = total + (count * signature if config.data.near_duplicate_threshold is not None else 0)
    return TextBytes(round(pool), round(kept * (each + SPLIT_AND_SOURCE)),
                     round(2 * kept * (each + answer_bytes(config, length))))


def peak(texts: TextBytes, cache: int, due: set[str]) -> int:
    """Most bytes below ``run.data_root`` at a time, of the stages in ``due``: the pool is gone before answers come."""
    stays = texts.prompts if "prompts" in due else 0
    collecting = stays + (texts.pool if "prompts" in due else 0)
    return max(collecting, stays + (texts.responses if "responses" in due else 0) + cache)
