"""The prompts of a run: read, checked, without duplicates, mixed by weight, split into train and held-out.

Everything is decided by hashes of prompt ids, never by order or count: adding data moves no row across the split
(except rows held out only to reach ``min_held_out``), and a larger ``max_prompts`` keeps every prompt of a smaller one.
"""

import hashlib
import heapq
import logging
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.jsonl import read_rows
from deepspec.data.prompt_rows import RowRefused, content_id, conversation
from deepspec.data.prompt_sources import read_source
from deepspec.errors import ConfigError, InputRefused

log = logging.getLogger(__name__)

PROMPTS_FILE = "prompts.jsonl"
SPLITS = ("train", "held_out")
DEFAULT_EMBEDDED = 1000  # prompts of an embedded source that names no limit
_SHOWN_REFUSALS = 5


@dataclass(frozen=True)
class PromptRow:
    """One conversation to be answered; see prompt_rows for its slots."""

    id: str
    domain: str
    split: str  # train | held_out
    source: str
    messages: tuple[dict[str, Any], ...]
    tools: Optional[tuple[dict[str, Any], ...]] = None

    def to_json(self) -> dict[str, Any]:
        """The row as it is written."""
        row = {"id": self.id, "domain": self.domain, "split": self.split, "source": self.source,
               "messages": list(self.messages)}
        return row | ({"tools": list(self.tools)} if self.tools else {})


@dataclass
class SourceCounts:
    """What became of the rows of one source."""

    read: int = 0
    valid: int = 0
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason

    def __str__(self) -> str:
        reasons = "".join(f", {reason} {count}" for reason, count in sorted(self.refused.items()))
        return f"read {self.read}, valid {self.valid}, kept {self.kept}{reasons}"


def hash_fraction(purpose: str, prompt_id: str) -> float:
    """A number in [0, 1) that depends on the id and on what it is for."""
    digest = hashlib.sha256(f"{purpose}\x1f{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _Seen:
    """Ids and contents so far, over all sources."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}  # id -> source
        self.contents: set[str] = set()

    def claim(self, given: Any, content: str, source: str) -> str:
        """The id of a new row. Raises RowRefused for one that is there already."""
        if content in self.contents:
            raise RowRefused("duplicate")
        prompt_id = str(given) if isinstance(given, (str, int)) and str(given) else content
        owner = self.ids.get(prompt_id)
        if owner is not None and owner != source:
            prompt_id = f"{source}/{prompt_id}"  # two sources that both count from 1
        if prompt_id in self.ids:
            raise RowRefused("duplicate id", repr(prompt_id))
        self.ids[prompt_id] = source
        self.contents.add(content)
        return prompt_id


def _read(source: SourceConfig, seen: _Seen, limit: Optional[int], seed: int) -> tuple[list[PromptRow], SourceCounts]:
    counts, rows = SourceCounts(), []
    for where, raw in read_source(source, limit=limit, seed=seed):
        counts.read += 1
        try:
            messages, tools = conversation(raw)
            prompt_id = seen.claim(raw.get("id"), content_id(messages, tools), source.name)
        except RowRefused as refusal:
            counts.refused[refusal.reason] += 1
            if counts.refused.total() <= _SHOWN_REFUSALS:
                log.warning("%s: skipped, %s", where, refusal)
            continue
        given = raw.get("domain")
        domain = given if isinstance(given, str) else source.domain
        kept_tools = tuple(tools) if tools else None
        rows.append(PromptRow(prompt_id, domain, "train", source.name, tuple(messages), kept_tools))
    counts.valid = len(rows)
    if source.kind != "embedded":  # those come in an order of their own, whose beginning does not depend on the limit
        rows.sort(key=lambda row: hash_fraction("order", row.id))
    return rows[:source.cap], counts


def apportion(available: Sequence[int], weights: Sequence[float], total: Optional[int]) -> list[int]:
    """How many rows each source gives: highest averages (D'Hondt), so no share falls when ``total`` grows."""
    if total is None or total >= sum(available):
        return list(available)
    taken = [0] * len(available)
    heap = [(1 / weight, index) for index, weight in enumerate(weights) if weight > 0 and available[index]]
    heapq.heapify(heap)
    while heap and sum(taken) < total:
        _, index = heapq.heappop(heap)
        taken[index] += 1
        if taken[index] < available[index]:
            heapq.heappush(heap, ((taken[index] + 1) / weights[index], index))
    return taken


def assign_splits(rows: Sequence[PromptRow], fraction: float, minimum: int) -> list[PromptRow]:
    """Mark rows ``held_out`` whose hash is below ``fraction``; per domain at least ``minimum`` (at most half of it),
    smallest hashes first."""
    by_domain: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, []).append((hash_fraction("split", row.id), row.id))
    held_out = set()
    for hashed in by_domain.values():
        hashed.sort()
        at_least = min(minimum, len(hashed) // 2)
        held_out |= {prompt_id for rank, (value, prompt_id) in enumerate(hashed) if rank < at_least or value < fraction}
    return [replace(row, split="held_out" if row.id in held_out else "train") for row in rows]


def _check(data: DataConfig) -> None:
    if not data.sources:
        raise ConfigError("data.sources is empty: name at least one source of prompts.")
    names = [source.name for source in data.sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"data.sources has two sources of one name: {', '.join(names)}. Give each its own name.")
    if not 0 <= data.held_out_fraction < 1:
        raise ConfigError(f"data.held_out_fraction={data.held_out_fraction} must be at least 0 and below 1.")
    for source in data.sources:
        if source.weight < 0 or (source.cap is not None and source.cap < 1):
            raise ConfigError(f"Source {source.name!r}: weight={source.weight} must not be negative and "
                              f"cap={source.cap} must be at least 1.")
    if data.max_prompts is not None and data.max_prompts < 1:
        raise ConfigError(f"data.max_prompts={data.max_prompts} must be at least 1, or null for all.")


def collect(data: DataConfig, seed: int) -> tuple[list[PromptRow], dict[str, SourceCounts]]:
    """All prompts of a run and what became of every source. Raises InputRefused when nothing is kept."""
    _check(data)
    seen, pools, counts = _Seen(), [], {}
    for source in data.sources:
        limit = source.cap or data.max_prompts or DEFAULT_EMBEDDED
        rows, counts[source.name] = _read(source, seen, limit, seed)
        pools.append(rows)
    shares = apportion([len(rows) for rows in pools], [source.weight for source in data.sources], data.max_prompts)
    chosen = [row for rows, share in zip(pools, shares) for row in rows[:share]]
    for source, share in zip(data.sources, shares):
        counts[source.name].kept = share
        log.info("prompts from %s: %s", source.name, counts[source.name])
    if not chosen:
        details = "; ".join(f"{name}: {count}" for name, count in counts.items())
        raise InputRefused(f"No prompt is left ({details}). A prompt needs at least one user turn with text.")
    if data.max_prompts is not None and len(chosen) < data.max_prompts:
        log.warning("data.max_prompts=%d, but the sources have only %d prompts", data.max_prompts, len(chosen))
    return assign_splits(chosen, data.held_out_fraction, data.min_held_out), counts


def read_prompts(directory: os.PathLike | str, split: Optional[str] = None) -> Iterator[PromptRow]:
    """Rows of ``prompts.jsonl`` as they were written; of one split if it is named."""
    path = Path(directory) / PROMPTS_FILE
    for number, row in read_rows(path):
        if split not in (None, row.get("split")):
            continue
        try:
            tools = tuple(row["tools"]) if row.get("tools") else None
            yield PromptRow(row["id"], row["domain"], row["split"], row["source"], tuple(row["messages"]), tools)
        except (KeyError, TypeError) as error:
            raise InputRefused(f"{path}:{number}: not a prompt row of this version (field {error}).") from None
