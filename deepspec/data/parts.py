"""Answers while they are being made: one append-only file per rank, keyed by prompt id, joined at the end.

A row counts once it is in a part file; nothing depends on order or on how many ranks there were before. Failures lie
in files of their own and are tried again by the next run.
"""

import json
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from deepspec import artifacts
from deepspec.data.jsonl import DurableWriter, dump_row, read_rows, repair_tail
from deepspec.data.prompt_rows import content_id
from deepspec.data.prompts import PromptRow
from deepspec.data.responses import ERRORS_FILE, RESPONSES_FILE, ResponseRow, response_from_json, truncate_at_length

log = logging.getLogger(__name__)

FOLDER = "parts"


def _owned(directory: Path, pattern: str, rank: int, world_size: int) -> list[Path]:
    files = sorted((directory / FOLDER).glob(pattern))
    return [path for path in files if int(path.stem.split("-")[-1]) % world_size == rank]


def prepare_parts(directory: os.PathLike | str, rank: int = 0, world_size: int = 1) -> None:
    """Before a resume: cut torn tails of this rank's share of the files and forget earlier failures."""
    folder = Path(directory)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for path in _owned(folder, "part-*.jsonl", rank, world_size):
        repair_tail(path)
    for path in _owned(folder, "errors-*.jsonl", rank, world_size):
        path.unlink(missing_ok=True)


def _key(row: dict[str, Any]) -> tuple[str, str]:
    """Id and content: an answer to an earlier wording of a prompt with the same id is not its answer."""
    return row["id"], content_id(list(row["messages"]), list(row.get("tools") or ()))


def prompt_key(row: PromptRow) -> tuple[str, str]:
    """What identifies the answer of a prompt row."""
    return row.id, content_id(list(row.messages), list(row.tools or ()))


def answered(directory: os.PathLike | str) -> set[tuple[str, str]]:
    """Keys (``prompt_key``) of all rows that are answered, whichever rank answered them."""
    return set(_locate(Path(directory)))


class PartWriter:
    """This rank's answers and failures."""

    def __init__(self, directory: os.PathLike | str, rank: int = 0) -> None:
        folder = Path(directory) / FOLDER
        self._rows = DurableWriter(folder / f"part-{rank:05d}.jsonl")
        self._errors = DurableWriter(folder / f"errors-{rank:05d}.jsonl")
        self.counts: Counter[str] = Counter()

    def answer(self, row: ResponseRow) -> None:
        """Store a finished row."""
        self._rows.write(row.to_json())
        self.counts["answered"] += 1
        self.counts["tokens"] += sum(len(turn.response_ids) for turn in row.turns)

    def fail(self, prompt_id: str, reason: str, *, skipped: bool = False) -> None:
        """Record that a row was not answered, and why; it is not done. ``skipped``: by a stated rule, no failure."""
        log.warning("row %r: %s", prompt_id, reason)
        self._errors.write({"id": prompt_id, "reason": reason, "skipped": skipped})
        self.counts["skipped" if skipped else "failed"] += 1

    def close(self) -> None:
        """Make everything durable."""
        self._rows.close()
        self._errors.close()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locate(directory: Path) -> dict[tuple[str, str], tuple[Path, int, int]]:
    """Where each answered row lies: file, offset, size. The first of two equal keys wins."""
    places: dict[tuple[str, str], tuple[Path, int, int]] = {}
    for path in sorted((directory / FOLDER).glob("part-*.jsonl")):
        with open(path, "rb") as handle:
            offsets, position = [], 0
            for line in handle:
                offsets.append((position, len(line)))
                position += len(line)
        for number, row in read_rows(path, torn_tail=True):
            places.setdefault(_key(row), (path, *offsets[number - 1]))
    return places


def _failures(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        row["id"]: row for path in sorted((directory / FOLDER).glob("errors-*.jsonl"))
        for _, row in read_rows(path, torn_tail=True)
    }


def join_parts(directory: os.PathLike | str, prompts: Sequence[PromptRow], *, drop_truncated: bool) -> dict[str, int]:
    """Write ``responses.jsonl`` in prompt order and ``errors.jsonl``; returns counts for the manifest.

    The same parts always give the same bytes, however many ranks and resumes they took.
    """
    folder = Path(directory)
    places = _locate(folder)
    failed = _failures(folder)
    counts: Counter[str] = Counter(missing=0, dropped_truncated=0, truncated=0, tokens=0, rows=0)
    listed = []
    temporary = folder / f".{RESPONSES_FILE}.tmp"
    temporary.unlink(missing_ok=True)
    with DurableWriter(temporary, sync_rows=10**9, sync_seconds=1e9) as writer:
        for prompt in prompts:
            place = places.get(prompt_key(prompt))
            if place is None:
                counts["missing"] += prompt.id not in failed
                listed += [failed[prompt.id]] if prompt.id in failed else []
                continue
            answer = replace(_read_place(*place), domain=prompt.domain, split=prompt.split)
            row = _kept(answer, drop_truncated, counts)
            if row is not None:
                writer.write(row.to_json())
    os.replace(temporary, folder / RESPONSES_FILE)
    artifacts.fsync_directory(folder)
    artifacts.atomic_write_bytes(folder / ERRORS_FILE, b"".join(map(dump_row, listed)))
    skipped = sum(bool(row.get("skipped")) for row in listed)
    return {**counts, "failed": len(listed) - skipped, "skipped": skipped}


def _read_place(path: Path, offset: int, size: int) -> ResponseRow:
    with open(path, "rb") as handle:
        handle.seek(offset)
        return response_from_json(json.loads(handle.read(size)), f"{path} at byte {offset}")


def _kept(row: ResponseRow, drop_truncated: bool, counts: Counter[str]) -> Optional[ResponseRow]:
    cut = any(turn.finish_reason == "length" for turn in row.turns)
    kept = truncate_at_length(row) if drop_truncated else row
    counts["truncated"] += cut and not drop_truncated
    counts["dropped_truncated"] += cut and drop_truncated
    if kept is not None:
        counts["rows"] += 1
        counts["tokens"] += sum(len(turn.response_ids) for turn in kept.turns)
    return kept


def mine(rows: Sequence[PromptRow], done: set[tuple[str, str]], rank: int, world_size: int) -> Iterator[PromptRow]:
    """Rows of this rank that are not answered yet. Dealt by position among all rows, not among the remaining ones:
    another rank's progress must not change who has which row."""
    return (row for row in rows[rank::world_size] if prompt_key(row) not in done)
