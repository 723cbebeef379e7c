"""Tensors under the release's names and back, and the release's FP8 and FP4 as plain numbers."""

from typing import Any, Mapping

import torch
from torch import Tensor

from deepspec.drafters.v4.names import expert_name, in_float32, is_stacked, own_tensors, released_name
from deepspec.errors import InputRefused

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without its sign, the highest of four bits
_SCALE = ".scale"


def to_release(tensors: Mapping[str, Tensor], stages: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """``mtp.*`` of a drafter's tensors on the CPU, in ``dtype`` but for those that the release has in float32."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        released = released_name(name, stages)
        value = tensor.detach().to("cpu", torch.float32 if in_float32(name) else dtype).contiguous()
        if is_stacked(released):
            found |= {expert_name(released, expert): part.clone() for expert, part in enumerate(value)}
        else:
            found[released] = value
    return found


def from_release(tensors: Mapping[str, Tensor], values: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """A drafter's tensors of ``mtp.*``; ``values`` are the keys of its config.json.

    Quantised matrices are expanded to float32. Raises InputRefused naming what is missing, unknown or misshapen.
    """
    plain = dequantised({name: value for name, value in tensors.items() if name.startswith("mtp.")}, where)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, shape in own_tensors(values).items():
        released = released_name(name, values["n_mtp_layers"])
        wanted = [expert_name(released, expert) for expert in range(shape[0])] if is_stacked(released) else [released]
        parts = [plain.pop(item) for item in wanted if item in plain]
        if len(parts) < len(wanted):
            problems += [f"{item} is missing" for item in wanted if item not in tensors]
            continue
        one = shape[1:] if is_stacked(released) else shape
        wrong = [f"{item} has shape {tuple(part.shape)}, expected {one}" for item, part in
                 zip(wanted, parts, strict=True) if tuple(part.shape) != one]
        problems += wrong
        if not wrong:
            found[name] = torch.stack(parts) if is_stacked(released) else parts[0]
    problems += [f"{name} is unknown" for name in sorted(plain)]
    if problems:
        raise InputRefused(f"{where} does not hold the stages its config.json describes: {'; '.join(problems[:5])}"
                           f"{' and more' if len(problems) > 5 else ''}. Give the folder as it was released.")
    return found


def dequantised(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """``tensors`` with FP8 and FP4 matrices in float32 and their ``.scale`` used up; others stay as they are.

    FP8 has one E8M0 scale per 128 x 128; FP4 (e2m1, two per byte, the lower half first) one per row and 32 columns.
    """
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + _SCALE) if name.endswith(".weight") else None
        if name.endswith(_SCALE) and f"{name.removesuffix(_SCALE)}.weight" in tensors:
            continue
        if value.dtype in (torch.uint8, torch.int8):
            found[name] = _scaled(_unpacked(value), scale, (1, 32), f"{where}: {name}")
        elif value.dtype == torch.float8_e4m3fn:
            found[name] = _scaled(value.float(), scale, (128, 128), f"{where}: {name}")
        else:
            found[name] = value
    return found


def _unpacked(packed: Tensor) -> Tensor:
    """FP4 [o, i/2] bytes to float32 [o, i]."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    octets = packed.view(torch.uint8).long()
    return torch.stack((table[octets & 15], table[octets >> 4]), dim=-1).flatten(-2)


def _scaled(values: Tensor, scale: Any, block: tuple[int, int], where: str) -> Tensor:
    if scale is None:
        raise InputRefused(f"{where} is quantised but has no {_SCALE} beside it. Give the folder as it was released.")
    factors = torch.exp2(scale.float() - 127.0) if scale.dtype == torch.uint8 else scale.float()
    rows, columns = (-(-size // step) for size, step in zip(values.shape, block, strict=True))
    if tuple(factors.shape) != (rows, columns):
        raise InputRefused(f"{where} has shape {tuple(values.shape)} and scales {tuple(factors.shape)}, expected "
                           f"({rows}, {columns}) of blocks {block[0]} x {block[1]}. Give the folder as released.")
    wide = factors.repeat_interleave(block[0], 0)[:len(values)].repeat_interleave(block[1], 1)[:, :values.shape[1]]
    return values * wide
