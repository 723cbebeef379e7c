"""Rotary position embedding. Tables are float32 whatever the drafter's dtype: bfloat16 frequencies are off by more than
a radian after a thousand tokens, and a buffer would be rounded by ``module.to(torch.bfloat16)``."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.drafters.precision import exact
from deepspec.drafters.types import DrafterShape
from deepspec.errors import ConfigError

SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


def rope_type(rope_parameters: dict[str, Any]) -> str:
    """Kind of scaling named by ``rope_parameters`` ("type" is the older spelling of "rope_type")."""
    return str(rope_parameters.get("rope_type") or rope_parameters.get("type") or "default")


def _refuse(shape: DrafterShape, reason: str) -> ConfigError:
    return ConfigError(
        f"rope_parameters of the target, {shape.rope_parameters}, {reason}, which the drafter cannot reproduce (it "
        f"knows {', '.join(SUPPORTED)}). Use a target with one of these, or add the rule to deepspec/drafters/rope.py."
    )


def frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """Inverse frequencies [hd/2] in float32 and the factor on cos and sin. Raises ConfigError for an unknown rule.

    One table for all lengths, as serving engines make it: cached keys would not survive another. Rules that depend on
    the length get the longest, ``max_position_embeddings`` (of what was extended to it: ``max_trained_positions``).
    """
    kind = rope_type(shape.rope_parameters)
    if kind not in SUPPORTED:
        raise _refuse(shape, f"have rope_type={kind!r}")
    if kind == "default":
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
        return 1.0 / (shape.rope_theta**exponent), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    limit = shape.max_position_embeddings
    trained = shape.rope_parameters.get("max_trained_positions", limit) if kind == "dynamic" else limit
    try:
        config = Qwen3Config(
            hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
            max_position_embeddings=trained,
            rope_parameters={**shape.rope_parameters, "rope_type": kind, "rope_theta": shape.rope_theta},
        )
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=limit)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _refuse(shape, f"are incomplete for heads of width {shape.head_dim} ({type(error).__name__}: {error})"
                      ) from None
    if len(found) * 2 != shape.head_dim:
        raise _refuse(shape, f"turn {2 * len(found)} of {shape.head_dim} dimensions")
    return found.float(), float(factor)


class RotaryTable:
    """cos and sin of any positions. Not a module: nothing here is cast, saved or partitioned."""

    def __init__(self, shape: DrafterShape) -> None:
        found, self._factor = frequencies(shape)
        self._frequencies = {torch.device("cpu"): found}

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
