"""Near duplicates: prompts whose sets of word n-grams overlap almost entirely (Jaccard similarity).

MinHash signatures (datasketch) propose candidate pairs through banded locality-sensitive hashing; a candidate counts
only if the exact similarity of the two texts reaches the threshold. Rows are visited in the order of priority, and a
row is dropped if one that is kept resembles it: no two rows that are found alike remain, so none of them can lie on
both sides of a split, and what stays does not depend on the order of the input.

The index is made of flat arrays: 4 bytes per band and row while signatures lie on disk (4 * num_perm bytes per row).
The dictionaries of ``datasketch.MinHashLSH`` take kilobytes per row, too much for a million prompts.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from deepspec.data.ngrams import jaccard

SHINGLE = 3  # words or symbols: one word changed changes three shingles
RECALL = 0.99  # of pairs right at the threshold; almost 1 for closer ones
_BUCKET = 500  # kept rows that one bucket remembers, so that a million rows of one pattern stay linear


@dataclass(frozen=True)
class NearDuplicate:
    """``dropped`` resembles ``kept``; both are row numbers."""

    dropped: int
    kept: int
    similarity: float


def choose_bands(threshold: float, num_perm: int) -> tuple[int, int]:
    """(bands, rows per band): the longest bands, which give the fewest false candidates, whose recall at the threshold
    is at least RECALL; single rows if none has it."""
    for rows in range(num_perm, 0, -1):
        bands = num_perm // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return num_perm, 1


class Signatures:
    """MinHash signatures appended to a file, and the bucket of every row in every band."""

    def __init__(self, path: os.PathLike | str, threshold: float, num_perm: int) -> None:
        from datasketch import MinHash  # imports scipy, a second that other stages need not wait

        self.threshold, self.num_perm = threshold, num_perm
        self.bands, self.rows = choose_bands(threshold, num_perm)
        self._path = Path(path)
        self._file = open(self._path, "wb")
        self._minhash: Any = MinHash(num_perm=num_perm, seed=1, scheme="affine32", hashfunc=int)
        self._buckets = bytearray()
        weights = np.random.default_rng(0).integers(1, 2**63, self.rows, dtype=np.uint64)
        self._weights = weights | np.uint64(1)

    def add(self, found: np.ndarray) -> None:
        """Append the signature of a row's shingles."""
        self._minhash.clear()
        self._minhash.update_batch((found >> np.uint64(32)).tolist())
        signature = self._minhash.hashvalues
        self._file.write(signature.tobytes())
        parts = signature[:self.bands * self.rows].reshape(self.bands, self.rows).astype(np.uint64)
        self._buckets += ((parts * self._weights).sum(axis=1) >> np.uint64(32)).astype(np.uint32).tobytes()

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """(signatures [rows, num_perm] on disk, buckets [rows, bands]), both uint32."""
        self._file.close()
        buckets = np.frombuffer(self._buckets, dtype=np.uint32).reshape(-1, self.bands)
        if not len(buckets):
            return np.zeros((0, self.num_perm), dtype=np.uint32), buckets
        return np.memmap(self._path, dtype=np.uint32, mode="r", shape=(len(buckets), self.num_perm)), buckets


def _shared_buckets(buckets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether another of ``rows`` lies in the same bucket: [rows, bands] bool."""
    shared = np.zeros((len(rows), buckets.shape[1]), dtype=bool)
    for band in range(buckets.shape[1]):
        own = buckets[rows, band]
        order = np.argsort(own, kind="stable")
        values = own[order]
        same = values[1:] == values[:-1]
        shared[order[1:][same], band] = True
        shared[order[:-1][same], band] = True
    return shared


def find_near_duplicates(signatures: Signatures, priority: Sequence[int] | np.ndarray,
                         shingles_of: Callable[[int], np.ndarray]) -> list[NearDuplicate]:
    """The rows among ``priority`` (row numbers, first comes first kept) that resemble one kept before them."""
    all_signatures, buckets = signatures.finish()
    rows = np.asarray(priority, dtype=np.int64)
    shared = _shared_buckets(buckets, rows)
    # An estimate from the signatures spares most exact comparisons; three standard errors of it are allowed for.
    threshold = signatures.threshold
    least = threshold - 3 * (threshold * (1 - threshold) / signatures.num_perm) ** 0.5
    kept: list[dict[int, list[int]]] = [{} for _ in range(signatures.bands)]
    found = []
    for position in np.flatnonzero(shared.any(axis=1)):
        row = int(rows[position])
        own = [(band, int(buckets[row, band])) for band in np.flatnonzero(shared[position])]
        candidates = np.array(sorted({other for band, key in own for other in kept[band].get(key, ())}), dtype=np.int64)
        match = None
        if len(candidates):
            estimates = (all_signatures[candidates] == all_signatures[row]).mean(axis=1)
            for index in np.argsort(-estimates, kind="stable")[:np.count_nonzero(estimates >= least)]:
                similarity = jaccard(shingles_of(row), shingles_of(int(candidates[index])))
                if similarity >= threshold:
                    match = NearDuplicate(row, int(candidates[index]), similarity)
                    break
        if match:
            found.append(match)
            continue
        for band, key in own:
            members = kept[band].setdefault(key, [])
            if len(members) < _BUCKET:
                members.append(row)
    return found
