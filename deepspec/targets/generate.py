"""The target's own answers, decoded in process with continuous batching: a finished row is refilled at once."""

from collections import deque
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Optional, Sequence

import torch

from deepspec.errors import InputRefused
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.passes import RowsOfTokens
from deepspec.targets.sampling import PURPOSE_TARGET, Sampling, pick, target_probs, uniform

_PREFILL_TOKENS = 2048  # new prompts join a step up to so many tokens, so that memory stays bounded


@dataclass(frozen=True)
class GenerateRequest:
    """A rendered prompt. ``id`` also chooses the random numbers."""

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class GenerateResult:
    """An answer; ``response_ids`` ends with the end-of-sequence token if and only if the reason is ``stop``."""

    id: str
    response_ids: tuple[int, ...]
    finish_reason: str  # stop | length


@dataclass
class _Row:
    request: GenerateRequest
    pending: list[int]  # tokens not yet in the cache: the prompt, then one at a time
    response: list[int]


def _check(request: GenerateRequest) -> None:
    if not request.prompt_ids:
        raise InputRefused(f"Prompt {request.id!r} has no tokens. Remove it from the prompts.")
    if request.max_tokens < 1:
        raise InputRefused(f"Prompt {request.id!r} asks for max_tokens={request.max_tokens}; give at least 1.")


def _admit(rows: list[Optional[_Row]], waiting: deque[GenerateRequest], cache: RowsOfTokens) -> None:
    """Fill free rows with waiting prompts, within the prefill budget of one step but at least one."""
    budget = _PREFILL_TOKENS
    for index, row in enumerate(rows):
        if row is not None or not waiting:
            continue
        if len(waiting[0].prompt_ids) > budget and budget < _PREFILL_TOKENS:
            return
        request = waiting.popleft()
        budget -= len(request.prompt_ids)
        cache.truncate(index, 0)
        rows[index] = _Row(request, list(request.prompt_ids), [])


def _advance(target: FrozenTarget, rows: list[Optional[_Row]], cache: RowsOfTokens,
             sampling: Sampling) -> dict[int, _Row]:
    """One forward over all occupied rows; appends one sampled token to each and returns them by index."""
    occupied = {index: row for index, row in enumerate(rows) if row is not None}
    active, current = list(occupied), list(occupied.values())
    counts = [len(row.pending) for row in current]
    ids = torch.tensor([token for row in current for token in row.pending], dtype=torch.int64)
    hidden = target.step(ids, active, counts, cache, features=False).last_hidden
    ends = torch.tensor(counts, device=hidden.device).cumsum(0) - 1
    probs = target_probs(target.logits(hidden[ends]), sampling)
    positions = [len(row.request.prompt_ids) + len(row.response) for row in current]
    draws = uniform(sampling.seed, [row.request.id for row in current], positions, PURPOSE_TARGET)
    for row, token in zip(current, pick(probs, draws).tolist()):
        row.response.append(token)
        row.pending = [token]
    return occupied


def _finish_reason(row: _Row, stop_ids: frozenset[int]) -> Optional[str]:
    if row.response[-1] in stop_ids:
        return "stop"
    return "length" if len(row.response) >= row.request.max_tokens else None


def generate(target: FrozenTarget, prompts: Iterable[GenerateRequest], sampling: Sampling, batch_size: int,
             on_done: Optional[Callable[[GenerateResult], None]] = None) -> Iterator[GenerateResult]:
    """Answer ``prompts``, ``batch_size`` at a time, yielding each as it finishes (not in the order given).

    A prompt's answer depends on (seed, prompt id) and its own tokens, not on what is decoded beside it.
    ``on_done`` is called with every result before it is yielded. Raises InputRefused for an empty prompt.
    """
    waiting = deque(prompts)
    for request in waiting:
        _check(request)
    if not waiting:
        return
    rows: list[Optional[_Row]] = [None] * min(batch_size, len(waiting))
    longest = max(len(request.prompt_ids) + request.max_tokens for request in waiting)
    cache = target.new_cache(len(rows), min(longest, 512))
    stop_ids = frozenset(target.spec.eos_token_ids)
    while waiting or any(row is not None for row in rows):
        _admit(rows, waiting, cache)
        for index, row in _advance(target, rows, cache, sampling).items():
            reason = _finish_reason(row, stop_ids)
            if reason is None:
                continue
            rows[index] = None
            result = GenerateResult(row.request.id, tuple(row.response), reason)
            if on_done is not None:
                on_done(result)
            yield result
