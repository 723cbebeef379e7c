"""How hidden states become bytes. R rows, M layers, D width, G groups of a row.

``int8`` and ``fp8-e4m3`` keep one scale per token and group of channels: the residual stream of a language model has a
few channels hundreds of times larger than the rest, and a single scale per token would round those others to nothing.
``lossless`` keeps every bit of bfloat16: the low bytes (mantissas) are noise and lie as they are, the high bytes (sign
and exponent) are compressed by zstandard, one frame per sample.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np
import torch
import zstandard
from torch import Tensor

CODECS = ("bf16", "int8", "fp8-e4m3", "lossless", "fp32")
SCALED = ("int8", "fp8-e4m3")
LARGEST_GROUP = 128
# Of bfloat16's bytes, before a sample is seen: half for the mantissas, three of eight bits for sign and exponent.
ASSUMED_LOSSLESS_SHARE = 0.69
_ITEM_BYTES = {"bf16": 2, "int8": 1, "fp8-e4m3": 1, "lossless": 1, "fp32": 4}
_STORED = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8-e4m3": torch.float8_e4m3fn, "lossless": torch.uint8,
           "fp32": torch.float32}
_LARGEST = {"int8": 127.0, "fp8-e4m3": 448.0}
_ALIGNMENT = 8
_LEVEL = 1  # higher levels look for repetitions, of which there are none, and code the rest worse
_CHUNK_VALUES = 1 << 18  # per thread, decoded at a time: the passes over them stay in the caches of the cores
_FP8_BIAS = 2.0**120  # between the exponent biases of float8_e4m3fn (7) and bfloat16 (127)


def group_size(width: int) -> int:
    """Channels that share a scale: the largest divisor of ``width`` up to 128, so that groups are equal."""
    return max(size for size in range(1, min(width, LARGEST_GROUP) + 1) if width % size == 0)


@dataclass(frozen=True)
class Section:
    """A range of bytes within a sample's record."""

    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where everything of one sample lies, relative to the start of its record."""

    ids: Section  # [T] int32
    mask: Section  # [T] uint8
    features: Section  # [T, M, D]; low bytes if lossless
    feature_extra: Section  # scales [T, M, G] bfloat16 if scaled, a zstandard frame of the high bytes if lossless
    hidden: Section  # [n, D], the rows that predict a supervised label
    hidden_extra: Section
    size: int


def layout(codec: str, *, tokens: int, label_rows: int, layers: int, width: int,
           coded: Sequence[int] = ()) -> Layout:
    """Layout of a sample with T = ``tokens`` and n = ``label_rows``.

    It follows from these sizes alone, except for ``lossless``: ``coded`` are the bytes of its two frames, assumed
    where they are not given.
    """
    item = _ITEM_BYTES[codec]
    values = (tokens * layers * width, label_rows * width)
    if codec == "lossless":
        extra = list(coded) or [round(count * (2 * ASSUMED_LOSSLESS_SHARE - 1)) for count in values]
    else:
        scales = 2 * (width // group_size(width)) if codec in SCALED else 0
        extra = [scales * tokens * layers, scales * label_rows]
    sizes = (4 * tokens, tokens, item * values[0], extra[0], item * values[1], extra[1])
    sections, offset = [], 0
    for size in sizes:
        sections.append(Section(offset, size))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    ids, mask, features, feature_extra, hidden, hidden_extra = sections
    return Layout(ids, mask, features, feature_extra, hidden, hidden_extra, offset)


def encode(values: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """``[..., D] -> (data [..., D], extra)``: extra are scales [..., G], a frame of bytes (lossless), or nothing.

    Scaled codecs encode on the tensor's own device, so a GPU sends the stored size only.
    """
    if codec in SCALED:
        rows = values.flatten(0, -2)
        # On the CPU in pieces that stay in its caches; a GPU takes all at once.
        pieces = rows.split(_chunk_rows(rows) if rows.device.type == "cpu" else max(1, len(rows)))
        data, scales = (torch.cat(parts) for parts in zip(*(_scale(piece.float(), codec) for piece in pieces)))
        return data.view(values.shape), scales.view(*values.shape[:-1], scales.shape[-1])
    if codec == "lossless":
        planes = values.bfloat16().cpu().contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
        high = planes[..., 1].contiguous().numpy()
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(high.data) if high.size else b""
        extra = torch.frombuffer(bytearray(frame), dtype=torch.uint8) if frame else _nothing()
        return planes[..., 0].contiguous(), extra
    return values.to(_STORED[codec]), _nothing()


def _chunk_rows(rows: Tensor) -> int:
    """Rows [R, D] to work on at a time."""
    return max(1, _CHUNK_VALUES * torch.get_num_threads() // rows.shape[-1])


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _scale(values: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    groups = values.unflatten(-1, (values.shape[-1] // group_size(values.shape[-1]), -1))
    largest = groups.abs().amax(dim=-1)
    limit = _LARGEST[codec]
    scales = (largest / limit).bfloat16()
    # Round up: with a scale rounded down the largest value of a group would be clipped.
    bits = scales.view(torch.int16) + (scales.float() * limit < largest).to(torch.int16)
    scales = bits.view(torch.bfloat16)
    steps = torch.where(scales == 0, 1.0, scales.float())
    scaled = groups / steps[..., None]
    data = (scaled.round() if codec == "int8" else scaled).clamp(-limit, limit).to(_STORED[codec])
    return data.flatten(-2), scales


def decode(data: Tensor, extra: Tensor, codec: str, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Inverse of ``encode`` for CPU tensors, in ``dtype`` (default: bfloat16 for bf16 and lossless, else float32).

    bf16 and fp32 in their own dtype come back without a copy.
    """
    if codec in SCALED:
        return decode_into(data, extra, codec, torch.empty(data.shape, dtype=dtype or torch.float32))
    if codec == "lossless":
        data = join_planes(data, extra)
    return data if dtype is None else data.to(dtype)


def decode_into(data: Tensor, scales: Tensor, codec: str, out: Tensor) -> Tensor:
    """Decoded values [..., D] written to ``out``, on any device; not for ``lossless``, which only a CPU decodes.

    On a GPU int8 is one kernel, fp8 two. On the CPU pieces stay in the caches between the two passes over them.
    """
    if codec not in SCALED:
        return out.copy_(data)
    rows, row_scales, target = data.flatten(0, -2), scales.flatten(0, -2), out.view(-1, out.shape[-1])
    if data.device.type == "cpu":
        _unscale(rows, row_scales, codec, target)
    else:
        _unscale_whole(rows, row_scales, codec, target)
    return out


def _unscale_whole(data: Tensor, scales: Tensor, codec: str, out: Tensor) -> None:
    """``[R, D]`` at once. The product is taken in float32 and rounded once, whatever the dtype of ``out`` is."""
    groups, values = (scales.shape[-1], -1), data if codec == "int8" else data.to(out.dtype)
    torch.mul(values.unflatten(-1, groups), scales.to(out.dtype)[..., None], out=out.unflatten(-1, groups))


def _unscale(data: Tensor, scales: Tensor, codec: str, out: Tensor) -> None:
    """``[R, D]`` in chunks. A stored value times its scale is exact in float32, so each value is rounded once."""
    rows = _chunk_rows(data)
    scales = scales.to(out.dtype)
    for begin in range(0, len(data), rows):
        target = out[begin:begin + rows]
        _widen(data[begin:begin + rows], codec, target)
        target.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[begin:begin + rows, :, None])


def _widen(data: Tensor, codec: str, out: Tensor) -> None:
    if codec == "int8" or out.dtype != torch.bfloat16:
        out.copy_(data if codec == "int8" else _widened_fp8(data))
    else:
        _widened_fp8(data, out)


def _widened_fp8(data: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Exactly ``data.to(bfloat16)`` for what ``encode`` makes (no NaN), several times as fast: shift, mask, scale."""
    out = torch.empty(data.shape, dtype=torch.bfloat16) if out is None else out
    bits = out.view(torch.int16)
    bits.copy_(data.view(torch.int8))  # the sign fills the upper byte
    bits.bitwise_left_shift_(4).bitwise_and_(-0x7810)  # sign, then 7 bits of exponent and mantissa
    return out.mul_(_FP8_BIAS)


def join_planes(low: Tensor, frame: Tensor) -> Tensor:
    """bfloat16 of the low bytes and the compressed high bytes; ``ValueError`` if they are not equally many."""
    if low.numel() == 0:
        return torch.empty(low.shape, dtype=torch.bfloat16)
    high = zstandard.ZstdDecompressor().decompress(frame.numpy().data, max_output_size=low.numel())
    if len(high) != low.numel():
        raise ValueError(f"{len(high)} high bytes for {low.numel()} values")
    joined = np.frombuffer(high, dtype=np.uint8).astype(np.uint16)
    joined <<= 8
    joined |= low.reshape(-1).numpy()
    return torch.from_numpy(joined.view(np.int16)).view(torch.bfloat16).view(low.shape)


def to_bytes(values: Tensor) -> memoryview:
    """Raw bytes of a CPU tensor with at least one dimension; bfloat16 too, which NumPy does not know."""
    if values.numel() == 0:
        return memoryview(b"")
    return values.contiguous().view(torch.uint8).numpy().data.cast("B")


def from_bytes(raw: np.ndarray, section: Section, codec: str, shape: tuple[int, ...]) -> Tensor:
    """Tensor of ``shape`` in the dtype the codec stores, viewing ``raw`` (uint8)."""
    return _view(raw, section, _STORED[codec], shape)


def extra_from_bytes(raw: np.ndarray, section: Section, codec: str, shape: tuple[int, ...]) -> Tensor:
    """What ``encode`` gave besides the data; ``shape`` is that of the scales."""
    if codec not in SCALED:
        return _view(raw, section, torch.uint8, (section.size,))
    return _view(raw, section, torch.bfloat16, shape)


def _view(raw: np.ndarray, section: Section, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if section.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw[section.offset:section.offset + section.size]).view(dtype).view(shape)
