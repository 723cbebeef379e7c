"""Rotary position embedding. Tables are float32 whatever the drafter's dtype: bfloat16 frequencies are off by more than
a radian after a thousand tokens, and a buffer would be rounded by ``module.to(torch.bfloat16)``."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterShape
from deepspec.errors import ConfigError

SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_type(rope_parameters: dict[str, Any]) -> str:
    """Kind of scaling named by ``rope_parameters`` ("type" is the older spelling of "rope_type")."""
    return str(rope_parameters.get("rope_type") or rope_parameters.get("type") or "default")


def _frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """Inverse frequencies [hd/2] in float32 and the factor on cos and sin."""
    kind = rope_type(shape.rope_parameters)
    if kind not in SUPPORTED:
        raise ConfigError(
            f"rope_parameters of the target have rope_type={kind!r}, which the drafter cannot reproduce (it knows "
            f"{', '.join(SUPPORTED)}). Use a target with one of these, or add the rule to deepspec/drafters/rope.py."
        )
    if kind == "default":
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
        return 1.0 / (shape.rope_theta**exponent), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={**shape.rope_parameters, "rope_type": kind, "rope_theta": shape.rope_theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RotaryTable:
    """cos and sin of any positions. Not a module: nothing here is cast, saved or partitioned."""

    def __init__(self, shape: DrafterShape) -> None:
        frequencies, self._factor = _frequencies(shape)
        self._frequencies = {torch.device("cpu"): frequencies}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [*positions.shape, 1, hd] (the 1 is for heads), of int64 ``positions``."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        phase = positions[..., None, None].float() * self._frequencies[device]
        phase = torch.cat((phase, phase), dim=-1)
        return phase.cos() * self._factor, phase.sin() * self._factor


def _turn(states: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """``states`` turned by ``sign`` times the angles, whose second half repeats the first."""
    wide = exact(states)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)[..., :states.shape[-1] // 2]
    turned = wide * cos
    (left, right), (first, second) = turned.chunk(2, dim=-1), wide.chunk(2, dim=-1)
    left.addcmul_(second, sin, value=-sign)
    right.addcmul_(first, sin, value=sign)
    return turned.to(states.dtype)


class _Rotate(torch.autograd.Function):
    """Keeps the tables alone; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def rotate(states: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``states`` [..., heads, hd] by the angles of ``table``, in float32 at least; returned in their dtype."""
    if not torch.compiler.is_compiling():
        return _Rotate.apply(states, *table)
    cos, sin = table
    first, second = states.chunk(2, dim=-1)
    return (states * cos + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)
