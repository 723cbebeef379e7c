"""Which samples an optimizer step sees: a pure function of (seed, epoch, step), so a resume needs no sampler state.

A *window* is the samples of one optimizer step over all ranks and accumulation steps. The tail of an epoch is a smaller
window, never dropped and never padded with samples that count twice.
"""

import hashlib
from dataclasses import dataclass

import numpy as np


def keyed_uint64(count: int, *key: object) -> np.ndarray:
    """``count`` random uint64 that depend on ``key`` alone (Philox, whose raw stream NumPy keeps stable)."""
    text = "\x1f".join(str(part) for part in key).encode("utf-8", "surrogatepass")
    words = hashlib.blake2b(text, digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(words, "little")).random_raw(count)


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """A permutation of ``range(n)``, another one each epoch."""
    return np.argsort(keyed_uint64(n, "order", seed, epoch), kind="stable").tolist()


def steps_per_epoch(n: int, global_batch_size: int) -> int:
    """Optimizer steps that see each of ``n`` samples once."""
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size} must be at least 1")
    return -(-n // global_batch_size)


def windows(n: int, global_batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Sample indices of each optimizer step of one epoch; the last window may be smaller."""
    order = epoch_order(n, seed, epoch)
    steps = steps_per_epoch(n, global_batch_size)
    return [order[step * global_batch_size:(step + 1) * global_batch_size] for step in range(steps)]


@dataclass(frozen=True)
class MicroStep:
    """Samples one rank packs into one forward. ``weightless``: a stand-in that keeps the ranks in step and whose
    anchors must not be drawn (``num_anchors=0``)."""

    indices: tuple[int, ...]
    weightless: bool = False


def micro_steps(window: list[int], *, rank: int, world_size: int, micro_batch_size: int) -> list[MicroStep]:
    """The forwards of ``rank`` for one window: equally many on every rank, each sample on exactly one of them.

    A rank that has run out of samples gets weightless steps, because ZeRO's collectives need every rank in every pass.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is outside world_size={world_size}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1")
    largest_share = -(-len(window) // world_size)
    count = -(-largest_share // micro_batch_size)
    mine = window[rank::world_size]
    steps = [MicroStep(tuple(mine[start:start + micro_batch_size])) for start in range(0, len(mine), micro_batch_size)]
    return steps + [MicroStep((window[0],), weightless=True)] * (count - len(steps))
