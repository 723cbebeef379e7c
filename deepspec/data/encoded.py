"""Hidden states as a store keeps them, on their way to where the drafter is. R rows, M layers, D width, G groups.

A GPU is sent the stored bytes and decodes them itself, in one pass: half as many go over the bus and wait in
page-locked memory. On the CPU they are decoded straight into the pack, so no value is copied after it was decoded.
"""

import contextlib
import math
import mmap
from dataclasses import dataclass, replace
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from deepspec.data import feature_codec as codecs
from deepspec.data.batch import FeatureSample, Sample

_LARGE = 8 << 20  # bytes from which on memory is asked for in huge pages


@dataclass(frozen=True)
class EncodedStates:
    """Some rows of ``[length, M*D]``, the others are zero; ``len`` counts all."""

    codec: str  # bf16, fp32 or one of feature_codec.SCALED
    data: Tensor  # [R, M, D] in the dtype the codec stores; often a view of the file
    scales: Tensor  # [R, M, G] bfloat16, empty where the codec has none
    dtype: torch.dtype  # of the decoded values
    length: int
    rows: Optional[Tensor] = None  # [R] int64, ascending; None: R = length and every row is here

    def __len__(self) -> int:
        return self.length

    @property
    def device(self) -> torch.device:
        return self.data.device

    def decode(self) -> Tensor:
        """``[length, M*D]`` in ``dtype`` on the device the bytes are on; a view of them if nothing is to be changed."""
        if self.rows is None and self.codec not in codecs.SCALED and self.data.dtype == self.dtype:
            return self.data.flatten(1)
        return self.decode_into(torch.empty(self.length, *self.data.shape[1:], dtype=self.dtype, device=self.device))

    def decode_into(self, out: Tensor) -> Tensor:
        """The same, written to ``out`` [length, M*D or M, D], which is returned as [length, M*D]."""
        target = out.view(self.length, *self.data.shape[1:])
        if self.rows is None:
            codecs.decode_into(self.data, self.scales, self.codec, target)
        else:
            values = torch.empty(self.data.shape, dtype=self.dtype, device=self.device)
            codecs.decode_into(self.data, self.scales, self.codec, values)
            target.zero_().index_copy_(0, self.rows, values)
        return target.flatten(1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "EncodedStates":
        """With ``change`` applied to every tensor."""
        return replace(self, data=change(self.data), scales=change(self.scales),
                       rows=None if self.rows is None else change(self.rows))

    def longer(self, count: int) -> "EncodedStates":
        """With ``count`` more rows of zeros at the end."""
        if self.rows is not None:
            return replace(self, length=self.length + count)
        data, scales = (torch.cat([part, part.new_zeros(count, *part.shape[1:])]) for part in (self.data, self.scales))
        return replace(self, data=data, scales=scales, length=self.length + count)


@dataclass(frozen=True)
class StoredStates:
    """Features [T, M*D] and last hidden states [T, D] of a sample or a pack."""

    features: EncodedStates
    last_hidden: EncodedStates

    def map(self, change: Callable[[Tensor], Tensor]) -> "StoredStates":
        """With ``change`` applied to every tensor."""
        return StoredStates(self.features.map(change), self.last_hidden.map(change))

    def longer(self, count: int) -> "StoredStates":
        """With ``count`` more tokens, all zeros."""
        return StoredStates(self.features.longer(count), self.last_hidden.longer(count))


@dataclass(frozen=True)
class StoredSample:
    """A sample as it lies in a store."""

    sample: Sample
    states: StoredStates

    def decoded(self) -> FeatureSample:
        """The sample as the target made it, up to the rounding of the codec."""
        return FeatureSample(self.sample, self.states.features.decode(), self.states.last_hidden.decode())


def join(parts: Sequence[EncodedStates]) -> EncodedStates:
    """``parts`` of one codec end to end: one copy of the stored bytes, into page-locked memory if there is a GPU."""
    rows = None
    if parts[0].rows is not None:
        begins = torch.tensor([0, *(part.length for part in parts)]).cumsum(0)
        rows = torch.cat([part.rows + begin for part, begin in zip(parts, begins) if part.rows is not None])
    data, scales = _concatenated([part.data for part in parts]), _concatenated([part.scales for part in parts])
    return replace(parts[0], data=data, scales=scales, rows=rows, length=sum(part.length for part in parts))


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    whole = _room((sum(map(len, tensors)), *tensors[0].shape[1:]), tensors[0].dtype)
    return torch.cat(list(tensors), out=whole)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Not initialised; page-locked if there is a GPU, else in huge pages where the system has them.

    A pack is new memory every time, and to touch it for the first time in pages of 4 kB takes longer than to decode it.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.cuda.is_available():
        return torch.empty(shape, dtype=dtype, pin_memory=size > 0)
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def join_decoded(parts: Sequence[EncodedStates]) -> Tensor:
    """``parts`` end to end, decoded in place: [sum of lengths, M*D]."""
    width = parts[0].data.shape[1:].numel()
    whole = _room((sum(part.length for part in parts), width), parts[0].dtype)
    for part, target in zip(parts, whole.split([part.length for part in parts])):
        part.decode_into(target)
    return whole
