"""Two ways to run a target's layers over documents of different lengths without padding.

``PackedPass`` lays documents end to end: right for every model whose tokens meet in attention alone, which is then
ours. ``RowPass`` runs one document after the other through the model as it is: for models that keep more of the past
than keys and values (linear attention, compressed or indexed attention), whose state would leak from one document into
the next. T tokens of a flat batch, D width.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from deepspec.targets.attention import DocumentLayout, PackedLayout
from deepspec.targets.cache import CacheLayout, PackedCache, check_step
from deepspec.targets.sink import FeatureSink

_RUN_AGAIN = 32  # accepted tokens that are run again together with the next step; more of them are run on their own


class RowsOfTokens(Protocol):
    """What decoding needs of a cache, whatever is kept in it."""

    lengths: list[int]

    @property
    def rows(self) -> int:
        """Number of sequences."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        ...

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position ``length`` on in ``row``."""
        ...


class Pass(Protocol):
    """A way to run the decoder. All results are last hidden states [T, D]; layer outputs go to ``sink``."""

    def encode(self, ids: Tensor, lengths: Sequence[int], sink: Optional[FeatureSink]) -> Tensor:
        """Documents of ``lengths`` tokens, end to end in ``ids`` [T]."""
        ...

    def new_cache(self, rows: int, capacity: int) -> RowsOfTokens:
        """An empty cache."""
        ...

    def step(self, ids: Tensor, rows: Sequence[int], counts: Sequence[int], cache: Any,
             sink: Optional[FeatureSink]) -> Tensor:
        """``counts[i]`` more tokens for each of ``rows``, end to end in ``ids`` [T]."""
        ...


class PackedPass:
    """All documents in one pass, over our own attention and cache."""

    def __init__(self, decoder: Any, dtype: torch.dtype) -> None:
        self._decoder, self._dtype = decoder, dtype

    def encode(self, ids: Tensor, lengths: Sequence[int], sink: Optional[FeatureSink]) -> Tensor:
        """See ``Pass.encode``."""
        positions = torch.cat([torch.arange(length) for length in lengths]).to(ids.device)
        return self._run(ids, positions, DocumentLayout(tuple(lengths)))

    def new_cache(self, rows: int, capacity: int) -> PackedCache:
        """See ``Pass.new_cache``."""
        return PackedCache(rows, capacity)

    def step(self, ids: Tensor, rows: Sequence[int], counts: Sequence[int], cache: PackedCache,
             sink: Optional[FeatureSink]) -> Tensor:
        """See ``Pass.step``."""
        layout = CacheLayout(cache, rows, counts, ids.device)
        last_hidden = self._run(ids, layout.positions, layout)
        layout.commit(rows, counts)
        return last_hidden

    def _run(self, ids: Tensor, positions: Tensor, layout: PackedLayout) -> Tensor:
        output = self._decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=layout,
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=ids.device))  # 4-D: taken as it is
        return output.last_hidden_state[0]


@dataclass
class _Row:
    """A sequence: its tokens, the model's cache of the first ``cached`` of them, and that cache as it was before."""

    ids: list[int] = field(default_factory=list)
    cache: Optional[Cache] = None
    cached: int = 0
    earlier: Optional[Cache] = None
    earlier_length: int = 0


class RowCache:
    """The model's own cache for each of ``rows`` sequences, and their tokens.

    State like that of linear attention cannot be cut back. So a copy from before the last step of several tokens (a
    verification) is kept, and what was accepted since then is run again with the next step; a cut behind that copy
    runs the whole row again. Lengths may also be set: what a row then has no tokens for counts as token 0.
    """

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise ValueError(f"rows={rows}: a cache needs at least one row")
        self.lengths = [0] * rows
        self._rows = [_Row() for _ in range(rows)]

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the caches."""
        kept = [cache for row in self._rows for cache in (row.cache, row.earlier) if cache is not None]
        return sum(tensor.numel() * tensor.element_size() for cache in kept for tensor in _tensors(vars(cache)))

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position ``length`` on in ``row``; 0 empties the row."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"truncate(row={row}, length={length}): the row holds {self.lengths[row]} tokens")
        self.lengths[row] = length

    def open(self, row: int, config: Any) -> tuple[Cache, list[int]]:
        """Take the cache of ``row`` to continue it, and the tokens before its length that this cache lacks.

        The row has none until ``commit``, so that a forward that fails leaves nothing half done behind.
        """
        item, length = self._rows[row], self.lengths[row]
        item.ids = item.ids[:length] + [0] * (length - len(item.ids))
        cache, cached = (item.cache, item.cached) if item.cached <= length else (item.earlier, item.earlier_length)
        if cache is None or cached > length:
            cache, cached = DynamicCache(config=config), 0
        self._rows[row] = _Row(item.ids)
        return cache, item.ids[cached:]

    def keep(self, row: int, cache: Cache, length: int) -> None:
        """Remember ``cache``, which holds the first ``length`` tokens of ``row``, for a later ``truncate``."""
        self._rows[row].earlier, self._rows[row].earlier_length = copy.deepcopy(cache), length

    def commit(self, row: int, cache: Cache, ids: Sequence[int]) -> None:
        """Give the cache back, with ``ids`` as valid tokens."""
        item = self._rows[row]
        item.ids.extend(ids)
        item.cache = cache
        self.lengths[row] = item.cached = len(item.ids)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return _tensors(vars(value)) if hasattr(value, "get_seq_length") or hasattr(value, "reset") else []


class RowPass:
    """One document after the other, over the model's own attention and cache."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def encode(self, ids: Tensor, lengths: Sequence[int], sink: Optional[FeatureSink]) -> Tensor:
        """See ``Pass.encode``."""
        parts, begin = [], 0
        for length in lengths:
            if sink is not None:
                sink.expect(slice(begin, begin + length))
            parts.append(self._decoder(input_ids=ids[None, begin:begin + length], use_cache=False).last_hidden_state[0])
            begin += length
        return torch.cat(parts)

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        """See ``Pass.new_cache``; the model's caches need no capacity."""
        del capacity
        return RowCache(rows)

    def step(self, ids: Tensor, rows: Sequence[int], counts: Sequence[int], cache: RowCache,
             sink: Optional[FeatureSink]) -> Tensor:
        """See ``Pass.step``."""
        check_step(cache.rows, rows, counts)
        parts, begin = [], 0
        for row, count in zip(rows, counts):
            new = ids[begin:begin + count]
            kept, again = cache.open(row, self._decoder.config)
            known = cache.lengths[row] - len(again)
            if len(again) > _RUN_AGAIN:  # else a row that is cut every time would run ever more tokens again
                self._continue(kept, torch.tensor(again, device=ids.device), known, slice(0, 0), len(again), sink)
                known, again = cache.lengths[row], []
            if count > 1 and known:
                cache.keep(row, kept, known)
            tokens = torch.cat([torch.tensor(again, dtype=new.dtype, device=new.device), new])
            parts.append(self._continue(kept, tokens, known, slice(begin, begin + count), len(again), sink))
            cache.commit(row, kept, new.tolist())
            begin += count
        return torch.cat(parts)

    def _continue(self, cache: Cache, tokens: Tensor, position: int, wanted: slice, skip: int,
                  sink: Optional[FeatureSink]) -> Tensor:
        if sink is not None:
            sink.expect(wanted, skip)
        positions = torch.arange(position, position + len(tokens), device=tokens.device)
        output = self._decoder(input_ids=tokens[None], position_ids=positions[None], cache=cache, use_cache=True)
        return output.last_hidden_state[0, skip:]
