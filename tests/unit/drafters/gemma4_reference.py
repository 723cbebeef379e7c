"""The Gemma4-shaped DSpark drafter in plain operators, one block at a time, straight from its published layout.

Reads nothing of the project: ``tensors`` by their published names, ``config`` as config.json says.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def norm(states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    scaled = states / torch.sqrt((states**2).mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


def rope(states: Tensor, positions: Tensor, parameters: dict[str, Any]) -> Tensor:
    """``states`` [n, heads, hd]: a quarter of the pairs (i, i + hd/2) turn, with the frequencies of the whole head."""
    width = states.shape[-1]
    turned = int(parameters["partial_rotary_factor"] * width // 2)
    exponents = torch.arange(0, 2 * turned, 2, dtype=states.dtype) / width
    frequency = torch.cat((parameters["rope_theta"] ** -exponents, torch.zeros(width // 2 - turned)))
    angle = (positions[:, None].to(states.dtype) * frequency)[:, None]
    left, right = states[..., :width // 2], states[..., width // 2:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


def attention(tensors: dict[str, Tensor], prefix: str, config: dict[str, Any], states: Tensor, context: Tensor,
              positions: Tensor) -> Tensor:
    """``states`` [S, D] over the ``context`` [C, D] before them and themselves, scores not divided by anything."""
    width, eps = config["global_head_dim"], config["rms_norm_eps"]
    parameters = config["rope_parameters"]["full_attention"]
    both = torch.cat((context, states))
    query = (states @ tensors[f"{prefix}q_proj.weight"].T).view(len(states), -1, width)
    key = (both @ tensors[f"{prefix}k_proj.weight"].T).view(len(both), -1, width)
    value = key
    if not config["attention_k_eq_v"]:
        value = (both @ tensors[f"{prefix}v_proj.weight"].T).view(len(both), -1, width)
    query = rope(norm(query, tensors[f"{prefix}q_norm.weight"], eps), positions[-len(states):], parameters)
    key = rope(norm(key, tensors[f"{prefix}k_norm.weight"], eps), positions, parameters)
    value = norm(value, None, eps)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    probs = torch.einsum("shd,chd->hsc", query, key).softmax(dim=-1)
    return torch.einsum("hsc,chd->shd", probs, value).reshape(len(states), -1) @ tensors[f"{prefix}o_proj.weight"].T


def block_logits(tensors: dict[str, Tensor], config: dict[str, Any], features: Tensor, ids: Tensor,
                 anchor: int) -> Tensor:
    """Logits [K, V] of the block at ``anchor`` of one document: capped, then the Markov bias of the data's tokens."""
    eps, slots = config["rms_norm_eps"], config["block_size"]
    context = norm(features[:anchor] @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    tokens = torch.tensor([int(ids[anchor])] + [config["mask_token_id"]] * (slots - 1))
    states = tensors["embed_tokens.weight"][tokens] * math.sqrt(config["hidden_size"])
    positions = torch.arange(anchor + slots)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."

        def normed(name: str, value: Tensor) -> Tensor:
            return norm(value, tensors[f"{layer}{name}_layernorm.weight"], eps)

        attended = attention(tensors, f"{layer}self_attn.", config, normed("input", states), context, positions)
        states = states + normed("post_attention", attended)
        inner = normed("pre_feedforward", states)
        gate = functional.gelu(inner @ tensors[f"{layer}mlp.gate_proj.weight"].T, approximate="tanh")
        inner = (gate * (inner @ tensors[f"{layer}mlp.up_proj.weight"].T)) @ tensors[f"{layer}mlp.down_proj.weight"].T
        states = (states + normed("post_feedforward", inner)) * tensors[f"{layer}layer_scalar"]
    logits = norm(states, tensors["norm.weight"], eps) @ tensors["lm_head.weight"].T
    cap = config["final_logit_softcapping"]
    before = ids[anchor:anchor + slots]
    bias = tensors["markov_head.markov_w1.weight"][before] @ tensors["markov_head.markov_w2.weight"].T
    return torch.tanh(logits / cap) * cap + bias
