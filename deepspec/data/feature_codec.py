"""How hidden states become bytes. R rows, M layers, D width, G groups of a row.

``int8`` keeps one scale per token and group of channels: the residual stream of a language model has a few channels
hundreds of times larger than the rest, and a single scale per token would round those others to nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CODECS = ("bf16", "int8", "fp32")
LARGEST_GROUP = 128
_ITEM_BYTES = {"bf16": 2, "int8": 1, "fp32": 4}
_ALIGNMENT = 8


def group_size(width: int) -> int:
    """Channels that share an int8 scale: the largest divisor of ``width`` up to 128, so that groups are equal."""
    return max(size for size in range(1, min(width, LARGEST_GROUP) + 1) if width % size == 0)


@dataclass(frozen=True)
class Section:
    """A range of bytes within a sample's record."""

    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where everything of one sample lies, relative to the start of its record; a function of its sizes alone."""

    ids: Section  # [T] int32
    mask: Section  # [T] uint8
    features: Section  # [T, M, D]
    feature_scales: Section  # [T, M, G] bfloat16, int8 only
    hidden: Section  # [n, D], the rows that predict a supervised label
    hidden_scales: Section  # [n, G]
    size: int


def layout(codec: str, *, tokens: int, label_rows: int, layers: int, width: int) -> Layout:
    """Layout of a sample with T = ``tokens`` and n = ``label_rows``."""
    item = _ITEM_BYTES[codec]
    scales = 2 * (width // group_size(width)) if codec == "int8" else 0
    sizes = (
        4 * tokens, tokens, item * tokens * layers * width, scales * tokens * layers, item * label_rows * width,
        scales * label_rows,
    )
    sections, offset = [], 0
    for size in sizes:
        sections.append(Section(offset, size))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    ids, mask, features, feature_scales, hidden, hidden_scales = sections
    return Layout(ids, mask, features, feature_scales, hidden, hidden_scales, offset)


def encode(values: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """``[..., D] -> (data [..., D], scales [..., G] bfloat16)``; scales are empty except for int8."""
    if codec == "int8":
        return _quantise(values.float())
    dtype = torch.bfloat16 if codec == "bf16" else torch.float32
    return values.to(dtype), torch.empty(0, dtype=torch.bfloat16)


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    groups = values.unflatten(-1, (-1, group_size(values.shape[-1])))
    largest = groups.abs().amax(dim=-1)
    scales = (largest / 127.0).bfloat16()
    # Round up: with a scale rounded down the largest value of a group would be clipped.
    bits = scales.view(torch.int16) + (scales.float() * 127.0 < largest).to(torch.int16)
    scales = bits.view(torch.bfloat16)
    steps = torch.where(scales == 0, 1.0, scales.float())
    data = (groups / steps[..., None]).round().clamp(-127, 127).to(torch.int8)
    return data.flatten(-2), scales


def decode(data: Tensor, scales: Tensor, codec: str) -> Tensor:
    """Inverse of ``encode``: bfloat16 for bf16, float32 for fp32 and int8."""
    if codec != "int8":
        return data
    groups = data.float().unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None]).flatten(-2)


def to_bytes(values: Tensor) -> bytes:
    """Raw bytes of a CPU tensor with at least one dimension; bfloat16 too, which NumPy does not know."""
    values = values.contiguous()
    if values.numel() == 0:
        return b""
    return values.view(torch.uint8).numpy().tobytes()


def from_bytes(raw: np.ndarray, section: Section, codec: str, shape: tuple[int, ...]) -> Tensor:
    """Tensor of ``shape`` in the dtype the codec stores, viewing ``raw`` (uint8)."""
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}[codec]
    return _view(raw, section, dtype, shape)


def scales_from_bytes(raw: np.ndarray, section: Section, shape: tuple[int, ...]) -> Tensor:
    """Scales of a section, bfloat16."""
    return _view(raw, section, torch.bfloat16, shape)


def _view(raw: np.ndarray, section: Section, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if section.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw[section.offset:section.offset + section.size]).view(dtype).view(shape)
