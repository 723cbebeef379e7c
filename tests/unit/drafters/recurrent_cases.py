"""Small autoregressive drafters, and the same arithmetic written out token by token for one document."""

from typing import Any

import torch
from drafter_cases import drafter, shape
from torch import Tensor
from torch.nn import functional

from deepspec.drafters.autoregressive import AutoregressiveDrafter
from deepspec.drafters.types import DrafterShape

ALGORITHMS = ("eagle3", "mtp")
DOCUMENTS = ((17, (1, 3, 4, 9, 15)), (1, ()), (9, (7, 2)), (23, (21, 1)))


def recurrent_shape(algorithm: str, **changes: Any) -> DrafterShape:
    layers = (5,) if algorithm == "mtp" else (1, 3)
    return shape(**{"algorithm": algorithm, "head": "none", "confidence_head": False, "num_layers": 1,
                    "feature_layers": layers, **changes})


def recurrent_drafter(algorithm: str, dtype: torch.dtype = torch.float64, **changes: Any) -> AutoregressiveDrafter:
    options = {key: changes.pop(key) for key in ("activation_checkpointing",) if key in changes}
    model: Any = drafter(recurrent_shape(algorithm, **changes), dtype, **options)
    return model


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(states: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of heads [H, hd] at one position, the halves of a head being the pairs."""
    width = states.shape[-1]
    angle = position / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    first, second = states.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Reference:
    """One row at a time, in float64, with a list of keys and values as the only memory."""

    def __init__(self, model: AutoregressiveDrafter) -> None:
        self.of, self.eps = model.shape, model.shape.rms_norm_eps
        self.embedding = model.shared.embed.double()
        self.own = {name.removeprefix("model.mtp_layers.0.").removeprefix("layers.0."): value.detach().double()
                    for name, value in model.named_parameters()}

    def state(self, feature: Tensor) -> Tensor:
        return feature if self.of.algorithm == "mtp" else self.own["fc.weight"] @ feature

    def project(self, name: str, inputs: Tensor) -> Tensor:
        found = self.own[f"self_attn.{name}_proj.weight"] @ inputs
        return (found + self.own.get(f"self_attn.{name}_proj.bias", 0.0)).view(-1, self.of.head_dim)

    def row(self, state: Tensor, token: int, position: int, memory: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        """Appends the row's key and value to ``memory``; returns what the LM head reads and the next state."""
        own, eps, embedded = self.own, self.eps, self.embedding[token]
        if self.of.algorithm == "mtp":
            embedded = embedded * 0 if position == 0 else embedded
            both = torch.cat((rms(state, own["hidden_layernorm.weight"], eps),
                              rms(embedded, own["token_layernorm.weight"], eps)))
            residual = own["input_proj.weight"] @ both
            inputs = rms(residual, own["input_layernorm.weight"], eps)
        else:
            residual = state
            inputs = torch.cat((rms(embedded, own["input_layernorm.weight"], eps),
                                rms(state, own["hidden_norm.weight"], eps)))
        query = turned(rms(self.project("q", inputs), own["self_attn.q_norm.weight"], eps), position, 10000.0)
        key = turned(rms(self.project("k", inputs), own["self_attn.k_norm.weight"], eps), position, 10000.0)
        memory.append((key, self.project("v", inputs)))
        group = self.of.num_heads // self.of.num_kv_heads
        heads = []
        for head in range(self.of.num_heads):
            keys = torch.stack([k[head // group] for k, _ in memory])
            values = torch.stack([v[head // group] for _, v in memory])
            heads.append(torch.softmax(keys @ query[head] / self.of.head_dim ** 0.5, dim=0) @ values)
        states = residual + own["self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = rms(states, own["post_attention_layernorm.weight"], eps)
        gated = functional.silu(own["mlp.gate_proj.weight"] @ normed) * (own["mlp.up_proj.weight"] @ normed)
        states = states + own["mlp.down_proj.weight"] @ gated
        if self.of.algorithm == "mtp":
            hidden = rms(states, own["final_layernorm.weight"], eps)
            return hidden, hidden
        return rms(states, own["norm.weight"], eps), states

    def chain(self, features: Tensor, ids: list[int], anchor: int, fed: list[int]) -> Tensor:
        """Hidden states [K, D] after ``anchor`` >= 1; ``fed`` are the anchor's id and those of the tokens after it."""
        memory: list[tuple[Tensor, Tensor]] = []
        for position in range(anchor - 1):
            self.row(self.state(features[position]), ids[position + 1], position, memory)
        state, found = self.state(features[anchor - 1]), []
        for step, token in enumerate(fed):
            hidden, state = self.row(state, token, anchor - 1 + step, memory)
            found.append(hidden)
        return torch.stack(found)
