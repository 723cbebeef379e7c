"""Sampling whose randomness is a function of (seed, prompt, position), never of the batch. R rows, V vocabulary."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.errors import ConfigError

# Purposes keep the streams of one (seed, prompt, position) independent of each other.
PURPOSE_TARGET = 0  # a token drawn from the target: plain decoding, and the bonus token
PURPOSE_DRAFT = 1  # a draft token
PURPOSE_ACCEPT = 2  # the accept test of a draft token
PURPOSE_RESIDUAL = 3  # the replacement of a rejected draft token

_WHOLE, _BLOCK = 4096, 128  # tokens searched at once; of one block of a larger vocabulary
_BELOW_ONE = 1.0 - 2.0 ** -53
_FIRST_CANDIDATES = 256  # of nucleus sampling; most distributions need far fewer


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_p`` 1 and ``top_k`` 0 switch the filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or a positive number.")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1 (1 switches it off).")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (off) or a positive number of tokens.")


@lru_cache(maxsize=65536)
def _prompt_key(prompt_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


def _mix(state: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: a bijection of 64-bit integers whose outputs pass as random."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniform(seed: int, prompt_ids: Sequence[str], positions: Sequence[int], purpose: int) -> Tensor:
    """Numbers in [0, 1), [R] float64, that depend on (seed, prompt id, position, purpose) and on nothing else."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = np.array([_prompt_key(prompt_id) for prompt_id in prompt_ids], dtype=np.uint64)
    stream = np.uint64((seed * 0x100000001B3 + purpose * 0x9E3779B9 + 1) & 0xFFFFFFFFFFFFFFFF)
    with np.errstate(over="ignore"):
        state = _mix(keys + _mix(np.full_like(keys, stream) * golden))
        state = _mix(state + np.asarray(positions, dtype=np.int64).astype(np.uint64) * golden)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0 ** -53)


def target_probs(logits: Tensor, sampling: Sampling, out: Optional[Tensor] = None) -> Tensor:
    """Distribution [R, V] float32 that tokens are drawn from: temperature, then top-k, then top-p, renormalised.

    Temperature 0 gives one-hot rows at the argmax. ``out`` [R, V] float32 takes the result.
    """
    if out is not None and (sampling.temperature == 0.0 or sampling.top_k or sampling.top_p < 1.0):
        return out.copy_(target_probs(logits, sampling))
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    scaled = logits.float() if sampling.temperature == 1.0 else logits.float() / sampling.temperature
    probs = torch.softmax(scaled, dim=-1) if out is None else torch.softmax(scaled, dim=-1, out=out)
    size = probs.shape[-1]
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return probs
    count = min(size, sampling.top_k or _FIRST_CANDIDATES)
    kept, ids = probs.topk(count, dim=-1)
    while sampling.top_k == 0 and count < size and bool((kept.sum(dim=-1) < sampling.top_p).any()):
        count = min(size, 8 * count)
        kept, ids = probs.topk(count, dim=-1)
    if sampling.top_k:
        kept = kept / kept.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1.0:
        before = kept.cumsum(dim=-1) - kept
        kept = kept.masked_fill(before >= sampling.top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, ids, kept / kept.sum(dim=-1, keepdim=True))


def _pick_place(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative weight exceeds ``uniforms`` [R] of the total, and what of it is left, as a
    share of that place's own weight, [R] each; weights [R, n] are float64."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    wanted = uniforms[:, None] * total
    # Rounding must not step past the last place.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, wanted, right=True)
    own = weights.gather(1, place)
    left = (wanted - (cumulative.gather(1, place) - own)) / own
    return place[:, 0], left[:, 0].clamp_(0.0, _BELOW_ONE)


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [R] int64 by the inverse CDF: the first token whose cumulative probability exceeds ``uniforms`` [R].

    ``probs`` [R, V] need not be normalised (residuals are not); a token of probability 0 is never returned. A large
    vocabulary is searched in two steps, its blocks by their sums and then one block: a cumulative sum over all of it
    would cost more than the softmax before it.
    """
    uniforms = uniforms.to(probs.device, torch.float64)
    rows, size = probs.shape
    if size <= _WHOLE:
        return _pick_place(probs.double(), uniforms)[0]
    if size % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - size % _BLOCK))
    blocks = probs.view(rows, -1, _BLOCK)
    block, left = _pick_place(blocks.sum(dim=-1).double(), uniforms)
    inside = blocks[torch.arange(rows, device=probs.device), block].double()
    return block * _BLOCK + _pick_place(inside, left)[0]
