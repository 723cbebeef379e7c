"""How many prompts each source gives, and which are held out. Hashes decide, never order or count."""

import hashlib
import heapq
from typing import Optional, Sequence

import numpy as np


def hash_fraction(purpose: str, identity: str) -> float:
    """A number in [0, 1) that depends on an id and on what it is for."""
    digest = hashlib.sha256(f"{purpose}\x1f{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


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


def held_out(fractions: np.ndarray, domains: np.ndarray, share: float, minimum: int) -> np.ndarray:
    """Which rows are held out: those whose fraction (a hash of the row) is below ``share``, and of every domain at
    least ``minimum`` rows (at most half of it), smallest fractions first. All [rows]."""
    order = np.lexsort((fractions, domains))
    ordered = domains[order]
    first = np.searchsorted(ordered, ordered, side="left")
    size = np.searchsorted(ordered, ordered, side="right") - first
    rank = np.arange(len(order)) - first
    result = np.zeros(len(order), dtype=bool)
    result[order] = (rank < np.minimum(minimum, size // 2)) | (fractions[order] < share)
    return result
