"""Rotation of the last channels of a head, whose neighbours are the pairs (2i, 2i + 1).

Tables are computed in float64 and kept nowhere: no cast of the module reaches them, and a phase is right at any
position.
"""

import torch
from torch import Tensor

from deepspec.drafters.precision import exact

Angles = tuple[Tensor, Tensor]  # cos and sin [..., 1, r / 2] of r rotated channels; the 1 is for heads


class PartialRotary:
    """cos and sin of any positions for ``channels`` rotated channels; plain frequencies, no scaling."""

    def __init__(self, channels: int, theta: float) -> None:
        self._channels, self._theta = channels, theta

    def __call__(self, positions: Tensor) -> Angles:
        """Angles, float32 [*positions.shape, 1, r / 2], of int64 ``positions``."""
        exponent = torch.arange(0, self._channels, 2, dtype=torch.float64, device=positions.device) / self._channels
        phase = positions[..., None, None].double() / self._theta**exponent
        return phase.cos().float(), phase.sin().float()


def turn(states: Tensor, angles: Angles, sign: float = 1.0) -> Tensor:
    """``states`` [..., heads, hd], their last r channels turned by ``sign`` times the angles, in float32 at least."""
    cos, sin = angles
    channels = 2 * cos.shape[-1]
    plain, rotated = states[..., :-channels], exact(states[..., -channels:]).unflatten(-1, (-1, 2))
    even, odd = rotated.unbind(dim=-1)
    turned = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(states.dtype)), dim=-1)
