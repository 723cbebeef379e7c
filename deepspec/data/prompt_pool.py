"""Valid prompts on their way to a selection: texts in a file, and in memory 62 bytes of identity per row."""

import hashlib
import json
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from deepspec.data.jsonl import dump_row
from deepspec.data.mixture import hash_fraction
from deepspec.data.ngrams import shingles
from deepspec.data.prompt_rows import RowRefused, content_id

_DIGEST = 16  # bytes of an id that are compared


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST]


def near_text(messages: Sequence[dict[str, Any]]) -> str:
    """What near duplicates are told by: everything but system prompts, which whole logs have in common."""
    return "\n".join(str(item["content"]) for item in messages
                     if item["role"] not in ("system", "developer") and item.get("content"))


class PromptPool:
    """Rows are numbered from 0 in the order they are added."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b")
        self._size = 0
        self._offsets, self._sources, self._domains = array("Q"), array("H"), array("I")
        self._order, self._split = array("d"), array("d")
        self._ids, self._contents = bytearray(), bytearray()
        self.domain_names: dict[str, int] = {}
        self.shingles_of = lru_cache(maxsize=4096)(self._shingles_of)

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, source: int, given_id: Optional[str], domain: str, messages: list[dict[str, Any]],
            tools: Optional[list[dict[str, Any]]], *, place: Optional[int] = None) -> None:
        """Append a row. ``place`` is its place within its source; None takes the hash of its content, so that the
        order of the source does not matter. Raises RowRefused for a row that JSON cannot hold."""
        try:
            identity = content_id(messages, tools)
            row = {"id": identity if given_id is None else given_id, "domain": domain, "messages": messages}
            payload = dump_row(row | ({"tools": tools} if tools else {}))
        except (ValueError, TypeError) as error:  # NaN, a date or bytes of a columnar file, a surrogate in JSON in JSON
            raise RowRefused("not writable as JSON", type(error).__name__) from None
        self._file.write(payload)
        self._offsets.append(self._size)
        self._size += len(payload)
        self._sources.append(source)
        self._domains.append(self.domain_names.setdefault(domain, len(self.domain_names)))
        self._order.append(hash_fraction("order", identity) if place is None else place)
        self._split.append(hash_fraction("split", identity))
        self._ids += _digest(str(row["id"]))
        self._contents += _digest(identity)

    def row(self, number: int) -> dict[str, Any]:
        """A row as it was added: id, domain, messages and, where it has them, tools."""
        self._file.seek(self._offsets[number])
        return json.loads(self._file.readline())

    def _shingles_of(self, number: int, size: int) -> np.ndarray:
        return shingles(near_text(self.row(number)["messages"]), size)

    def columns(self, *names: str) -> Iterator[np.ndarray]:
        """Columns of all rows: sources, domains, split (the fraction that decides it)."""
        types = {"sources": np.uint16, "domains": np.uint32, "split": np.float64}
        return (np.frombuffer(getattr(self, f"_{name}"), dtype=types[name]) for name in names)

    def _keys(self, held: bytearray) -> np.ndarray:
        return np.frombuffer(held, dtype=f"S{_DIGEST}")

    def by_priority(self) -> np.ndarray:
        """All row numbers: source after source as they are listed, within one by place or hash."""
        order = np.frombuffer(self._order, dtype=np.float64)
        sources = np.frombuffer(self._sources, dtype=np.uint16)
        return np.lexsort((self._keys(self._ids), self._keys(self._contents), order, sources))

    def repeated_contents(self, rows: np.ndarray) -> np.ndarray:
        """Which of ``rows`` have the content of one before them: [rows] bool."""
        result = np.ones(len(rows), dtype=bool)
        result[np.unique(self._keys(self._contents)[rows], return_index=True)[1]] = False
        return result

    def repeated_ids(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of ``rows`` have the id of one before them (in the same source, in another source): [rows] bool."""
        ids = self._keys(self._ids)[rows]
        _, first, group = np.unique(ids, return_index=True, return_inverse=True)
        sources = np.frombuffer(self._sources, dtype=np.uint16)[rows]
        within = np.ones(len(rows), dtype=bool)
        within[np.unique(group * (1 << 16) + sources, return_index=True)[1]] = False
        elsewhere = sources != sources[first[group]]
        return within, elsewhere & ~within

    def has_id(self, rows: np.ndarray) -> "IdSet":
        """The ids of ``rows``, to look others up."""
        return IdSet(np.sort(self._keys(self._ids)[rows]))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class IdSet:
    """Sorted id digests."""

    def __init__(self, digests: np.ndarray) -> None:
        self._digests = digests

    def __contains__(self, prompt_id: str) -> bool:
        key = np.array([_digest(prompt_id)], dtype=f"S{_DIGEST}")
        place = int(np.searchsorted(self._digests, key)[0])
        return place < len(self._digests) and self._digests[place] == key[0]
