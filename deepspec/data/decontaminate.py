"""Decontamination: prompts that hold text of a benchmark are left out, and a report says which text.

Words are compared (case, punctuation and layout do not count), turn by turn of the benchmark's user turns:

* a turn of at least ``ngram`` words (13) matches a prompt that holds any run of ``ngram`` words of it;
* a turn of 8 up to ``ngram`` - 1 words matches a prompt that holds all of it as one run;
* a shorter turn matches only if it is a row's first user turn, and is the whole first user turn of the prompt:
  "Can you make it shorter?" inside a longer text says nothing.

A run that 10 or more rows of one benchmark share is its instruction text, not a question, and does not count.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from deepspec.artifacts import sha256_file
from deepspec.config.schema import Config
from deepspec.data.jsonl import read_nonempty
from deepspec.data.ngrams import ngram_hashes, word_hashes, words
from deepspec.data.prompt_rows import RowRefused, conversation
from deepspec.errors import InputRefused

SHORT = 8  # words from which on a short turn is looked for inside a text
_INSTRUCTION_ROWS = 10


@dataclass(frozen=True)
class BenchmarkFile:
    """A file of benchmark rows (the forms that prompts may have)."""

    name: str
    path: str


@dataclass(frozen=True)
class Match:
    """Text that a prompt shares with a benchmark; ``hash`` identifies ``ngram`` (its words, normalised)."""

    benchmark: str
    hash: str
    ngram: str


def _user_turns(file: BenchmarkFile) -> Iterator[tuple[int, list[str]]]:
    """(row, user turns) of every row, each different row once."""
    path, seen = Path(file.path).expanduser(), set()
    for number, row in read_nonempty(path, "benchmark rows"):
        try:
            messages, _ = conversation(row)
        except RowRefused as error:
            raise InputRefused(f"{path}:{number}: not a prompt ({error}). A benchmark row has \"prompt\": text, "
                               "\"turns\": [text, ..] or \"messages\": [{role, content}, ..].") from None
        turns = [message["content"] for message in messages if message["role"] == "user"]
        if tuple(turns) not in seen:
            seen.add(tuple(turns))
            yield number, turns


class _Table:
    """n-grams of one length: sorted hashes, and the benchmark of each."""

    def __init__(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        hashes = np.concatenate([part for _, part in parts])
        owners = np.concatenate([np.full(len(part), owner, dtype=np.uint16) for owner, part in parts])
        self.hashes, first = np.unique(hashes, return_index=True)
        self.owners = owners[first]

    def find(self, hashes: np.ndarray) -> Optional[tuple[int, int]]:
        """(position in ``hashes``, benchmark) of the first that is here."""
        if not len(hashes):
            return None
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        hits = np.flatnonzero(self.hashes[places] == hashes)
        return (int(hits[0]), int(self.owners[places[hits[0]]])) if len(hits) else None


class BenchmarkIndex:
    """n-grams of all benchmarks: 10 bytes each, so that a few megabytes hold them all."""

    def __init__(self, files: Sequence[BenchmarkFile], ngram: int = 13) -> None:
        self.files, self.ngram = tuple(files), ngram
        self.facts: dict[str, dict[str, Any]] = {}
        inside: dict[int, list[tuple[int, np.ndarray]]] = {}
        whole: list[tuple[int, np.ndarray]] = []
        for owner, file in enumerate(self.files):
            for size, hashes in self._of_file(file).items():
                if size >= min(SHORT, ngram):
                    inside.setdefault(size, []).append((owner, hashes))
                else:
                    whole.append((owner, hashes))
        self._inside = {size: _Table(parts) for size, parts in sorted(inside.items(), reverse=True)}
        self._whole = _Table(whole) if whole else None

    def _of_file(self, file: BenchmarkFile) -> dict[int, np.ndarray]:
        rows, skipped = 0, 0
        per_row: dict[int, list[np.ndarray]] = {}
        for _, turns in _user_turns(file):
            rows += 1
            of_row: dict[int, list[np.ndarray]] = {}
            for index, turn in enumerate(turns):
                hashes = word_hashes(words(turn))
                size = min(len(hashes), self.ngram)
                if not size or (index and size < min(SHORT, self.ngram)):
                    skipped += 1
                    continue
                of_row.setdefault(size, []).append(ngram_hashes(hashes, (size,))[size])
            for size, parts in of_row.items():
                per_row.setdefault(size, []).append(np.unique(np.concatenate(parts)))
        result, shared = {}, 0
        for size, found in per_row.items():
            hashes, counts = np.unique(np.concatenate(found), return_counts=True)
            shared += int((counts >= _INSTRUCTION_ROWS).sum())
            result[size] = hashes[counts < _INSTRUCTION_ROWS]
        self.facts[file.name] = {
            "path": file.path, "sha256": sha256_file(Path(file.path).expanduser()), "rows": rows,
            "ngrams": sum(len(hashes) for hashes in result.values()), "instruction_ngrams": shared,
            "turns_too_short": skipped,
        }
        return result

    def match(self, messages: Sequence[dict[str, Any]]) -> Optional[Match]:
        """The first text of a conversation that is a benchmark's, longest runs first; None for none."""
        first_user = next((index for index, item in enumerate(messages) if item["role"] == "user"), -1)
        for index, message in enumerate(messages):
            content = message.get("content")
            if not content:
                continue
            found = words(content)
            grams = ngram_hashes(word_hashes(found), tuple({*self._inside, len(found)} if len(found) < SHORT
                                                           else self._inside))
            for size, table in self._inside.items():
                hit = table.find(grams[size])
                if hit:
                    return self._match(hit, grams[size], found, size)
            if self._whole and index == first_user and 0 < len(found) < SHORT:
                hit = self._whole.find(grams[len(found)])
                if hit:
                    return self._match(hit, grams[len(found)], found, len(found))
        return None

    def _match(self, hit: tuple[int, int], hashes: np.ndarray, found: list[str], size: int) -> Match:
        place, owner = hit
        return Match(self.files[owner].name, f"{int(hashes[place]):016x}", " ".join(found[place:place + size]))


class Decontamination:
    """Removes rows and remembers what for."""

    def __init__(self, files: Sequence[BenchmarkFile], ngram: int) -> None:
        self._index = BenchmarkIndex(files, ngram) if files else None
        self._ngram = ngram
        self._removed: list[dict[str, str]] = []

    def check(self, prompt_id: str, source: str, messages: Sequence[dict[str, Any]]) -> None:
        """Raises RowRefused for a prompt that holds text of a benchmark."""
        match = self._index.match(messages) if self._index else None
        if match:
            self._removed.append({"id": prompt_id, "source": source, "benchmark": match.benchmark,
                                  "ngram_hash": match.hash, "ngram": match.ngram})
            raise RowRefused("benchmark text", match.benchmark)

    def report(self) -> dict[str, Any]:
        """What was compared and what was removed; the text shown is the benchmark's."""
        counts = Counter(item["benchmark"] for item in self._removed)
        facts = self._index.facts if self._index else {}
        benchmarks = {name: values | {"removed": counts[name]} for name, values in facts.items()}
        return {"schema_version": 1, "ngram": self._ngram, "short_turn_words": SHORT, "benchmarks": benchmarks,
                "removed": self._removed}


def decontamination_files(config: Config) -> list[BenchmarkFile]:
    """What the prompts of a run must be free of: the files of its benchmarks and those of ``data.decontaminate``."""
    found = []
    if config.data.decontaminate_benchmarks:
        found = [BenchmarkFile(item.name, item.path) for item in config.evaluate.benchmarks
                 if item.path not in ("held_out", "embedded_math")]
    known = {file.path for file in found}
    return found + [BenchmarkFile(path, path) for path in config.data.decontaminate if path not in known]
