"""Key/value cache of ragged rows, and the attention of one step over it.

Shapes: T new tokens of a flat batch, R rows, q new tokens of a row, H query heads, Hkv key/value heads, G = H / Hkv,
d head width, C capacity of every row. One step may mix rows that prefill with rows that decode or verify.
"""

from dataclasses import dataclass, field, replace
from typing import Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.targets.attention import AttentionOptions, attend, causal_attention, causal_mask

_SHORT = 16  # rows with at most so many new tokens are attended together, padded; longer ones each on their own


class PackedCache:
    """Keys and values of ``rows`` independent sequences; ``lengths[row]`` tokens of each are valid.

    ``keys[layer]`` and ``values[layer]`` are [rows, Hkv, capacity, d], made when the layer's first keys arrive: heads
    and widths may differ from layer to layer. What lies beyond a row's length is garbage.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        if rows < 1:
            raise ValueError(f"rows={rows}: a cache needs at least one row")
        self.lengths: list[int] = [0] * rows
        self.capacity = max(1, capacity)  # tokens a row can hold before the buffers grow
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in [*self.keys.values(), *self.values.values()])

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of ``layer``, shaped after keys and values [1, Hkv, T, d] of its first tokens."""
        if layer not in self.keys:
            for buffers, new in ((self.keys, key), (self.values, value)):
                # Zeros, not empty: masked garbage still meets a multiplication, and 0 * NaN is NaN.
                buffers[layer] = new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[-1])
        return self.keys[layer], self.values[layer]

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position ``length`` on in ``row``; 0 empties the row."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"truncate(row={row}, length={length}): the row holds {self.lengths[row]} tokens")
        self.lengths[row] = length

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row, doubling, so that growing is rare."""
        if capacity <= self.capacity:
            return
        grown = max(capacity, 2 * self.capacity)
        used = max(self.lengths)
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                rows, heads, _, width = old.shape
                new = old.new_zeros(rows, heads, grown, width)
                new[:, :, :used] = old[:, :, :used]
                buffers[layer] = new
        self.capacity = grown


@dataclass(frozen=True)
class _LongRow:
    """A row that prefills: its tokens ``tokens`` of the flat batch are positions ``start ..`` of ``row``."""

    row: int
    tokens: slice
    start: int


@dataclass
class _ShortRows:
    """Neighbouring rows ``rows`` with few new tokens each, padded to ``width`` queries."""

    rows: slice
    keys: int  # cached positions that any of them may see
    positions: Tensor  # [n, q]; padding repeats the last valid position, so that no query sees nothing
    gather: Optional[Tensor]  # [n, q] flat token of each query; None: tokens ``tokens`` are already [n, q] in order
    tokens: slice
    scatter: Optional[tuple[Tensor, Tensor]]  # (flat tokens, indices into the padded [n * q]) of the valid queries
    masks: dict[Optional[int], Tensor] = field(default_factory=dict)  # by window; shared by all layers

    def mask(self, options: AttentionOptions, groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, 1, q * G, keys]."""
        if options.window not in self.masks:
            mask = causal_mask(self.positions, self.keys, options.window, dtype)[:, :, None]
            self.masks[options.window] = mask.expand(-1, -1, groups, -1).flatten(1, 2)[:, None]
        return self.masks[options.window]


class CacheLayout:
    """One step: ``counts[i]`` new tokens for ``rows[i]``, flat in that order; the rest of the cache stays untouched."""

    def __init__(self, cache: PackedCache, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        check_step(cache.rows, rows, counts)
        starts = [cache.lengths[row] for row in rows]
        ends = [start + count for start, count in zip(starts, counts)]
        cache.reserve(max(ends))
        self.cache = cache
        first = np.concatenate([[0], np.cumsum(counts)])
        offsets = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        positions = offsets + np.repeat(starts, counts)
        self.positions = torch.from_numpy(positions).to(device)  # [T]
        self._rows, self._places = np.repeat(rows, counts)[:, None], positions[:, None]
        self._slots: dict[int, Tensor] = {}  # by heads of a layer
        spans = [(row, int(first[i]), counts[i], starts[i]) for i, row in enumerate(rows)]
        self._long = [_LongRow(row, slice(a, a + n), start) for row, a, n, start in spans if n > _SHORT]
        self._short = _short_runs([span for span in spans if span[2] <= _SHORT], device)

    def _slots_of(self, heads: int, device: torch.device) -> Tensor:
        """[T * Hkv]: rows of a layer's flattened buffers that the new tokens fill."""
        if heads not in self._slots:
            slots = (self._rows * heads + np.arange(heads)) * self.cache.capacity + self._places
            self._slots[heads] = torch.from_numpy(slots.reshape(-1)).to(device)
        return self._slots[heads]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values, then attend, see ``PackedLayout.attend``."""
        keys, values = self.cache.layer(layer, key, value)
        slots = self._slots_of(key.shape[1], key.device)
        for buffer, new in ((keys, key), (values, value)):
            width = new.shape[-1]
            buffer.view(-1, width).index_copy_(0, slots, new[0].transpose(0, 1).reshape(-1, width))
        queries = query[0].transpose(0, 1)  # [T, H, d]
        if not self._long and len(self._short) == 1 and self._short[0].gather is None:
            return _attend_short(self._short[0], queries, keys, values, options)[None]
        output = queries.new_empty(*queries.shape[:2], value.shape[-1])
        for item in self._long:
            end = item.start + item.tokens.stop - item.tokens.start
            attended = causal_attention(
                query[:, :, item.tokens], keys[item.row:item.row + 1, :, :end],
                values[item.row:item.row + 1, :, :end], options)
            output[item.tokens] = attended[0].transpose(0, 1)
        for run in self._short:
            attended = _attend_short(run, queries, keys, values, options)
            if run.scatter is None:
                output[run.tokens] = attended
            else:
                output[run.scatter[0]] = attended[run.scatter[1]]
        return output[None]

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Count the new tokens as valid; called once the whole forward has succeeded."""
        for row, count in zip(rows, counts):
            self.cache.lengths[row] += count


def check_step(total: int, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError unless ``rows`` of a cache with ``total`` rows are distinct and each gets some tokens."""
    if len(rows) != len(counts) or not rows:
        raise ValueError(f"{len(rows)} rows and {len(counts)} counts: a step needs one count per row, at least one")
    if len(set(rows)) != len(rows):
        raise ValueError(f"rows={list(rows)}: a row may occur only once in a step")
    for row, count in zip(rows, counts):
        if not 0 <= row < total:
            raise ValueError(f"row {row} is not in a cache of {total} rows")
        if count < 1:
            raise ValueError(f"row {row} has count {count}: leave rows without new tokens out of the step")


def _short_runs(spans: list[tuple[int, int, int, int]], device: torch.device) -> list[_ShortRows]:
    """Group (row, first token, count, start) by runs of neighbouring rows: a run of the cache is a view, not a copy."""
    runs: list[list[tuple[int, int, int, int]]] = []
    for span in sorted(spans):
        if runs and runs[-1][-1][0] + 1 == span[0]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [_short_rows(run, device) for run in runs]


def _short_rows(run: list[tuple[int, int, int, int]], device: torch.device) -> _ShortRows:
    row, first, count, start = (np.array(column) for column in zip(*run))
    width = int(count.max())
    offsets = np.minimum(np.arange(width), count[:, None] - 1)  # [n, q]
    tokens = first[:, None] + offsets
    in_order = bool((tokens.reshape(-1) == np.arange(tokens.size) + tokens[0, 0]).all())
    valid = np.flatnonzero((np.arange(width) < count[:, None]).reshape(-1))
    scatter = (torch.from_numpy(tokens.reshape(-1)[valid]).to(device), torch.from_numpy(valid).to(device))
    return _ShortRows(
        rows=slice(int(row[0]), int(row[-1]) + 1), keys=int((start + count).max()),
        positions=torch.from_numpy(start[:, None] + offsets).to(device),
        gather=None if in_order else torch.from_numpy(tokens).to(device),
        tokens=slice(int(tokens[0, 0]), int(tokens[0, 0]) + tokens.size), scatter=None if in_order else scatter,
    )


def _attend_short(run: _ShortRows, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """[T, H, d] queries -> [n * q, H, d]. Heads of a group are laid beside the queries, so no key is repeated."""
    rows, width = run.positions.shape
    _, heads, size = queries.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    chosen = queries[run.tokens] if run.gather is None else queries[run.gather]
    grouped = chosen.reshape(rows, width, kv_heads, groups, size).transpose(1, 2)
    sinks = options.sinks
    if sinks is not None:  # [H, 1] -> [Hkv, q * G], as the queries are laid out
        spread = sinks.view(kv_heads, 1, groups).expand(-1, width, -1).reshape(kv_heads, width * groups)
        options = replace(options, sinks=spread)
    attended = attend(
        grouped.reshape(rows, kv_heads, width * groups, size), keys[run.rows, :, :run.keys],
        values[run.rows, :, :run.keys], options, mask=run.mask(options, groups, queries.dtype))
    split = attended.reshape(rows, kv_heads, width, groups, -1).transpose(1, 2)
    return split.reshape(rows * width, heads, -1)
