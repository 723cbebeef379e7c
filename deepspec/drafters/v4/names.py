"""Tensors of the backbone in numbers: the names training uses, those of the release (``mtp.{i}.*``), shapes, dtypes.

Needs no torch. ``values`` are the keys of config.json (``config.py``). Experts are one stacked tensor per matrix and
stage here and one tensor each in the release.
"""

from typing import Any, Mapping

Shapes = dict[str, tuple[int, ...]]
SHARED = ("embed.weight", "head.weight")  # the target's own two matrices in a V4 checkpoint
_EXPERTS = ".ffn.experts."
_FIRST, _LAST = ("main_proj.", "main_norm."), ("norm.", "hc_head.", "markov_head.", "confidence_head.")
_FLOAT32 = ("hc_", "attn_sink", "gate.bias", "markov_w2", "confidence_head")


def in_float32(name: str) -> bool:
    """Whether the release stores tensor ``name``, under either name, in float32 beside bfloat16 ones."""
    tail = name.removeprefix("layers.").removeprefix("mtp.")
    tail = tail.split(".", 1)[1] if tail[:1].isdigit() else tail
    return tail.startswith("hc_") or any(part in tail for part in _FLOAT32[1:])


def _stage(values: Mapping[str, Any]) -> Shapes:
    width, head, heads = values["hidden_size"], values["head_dim"], values["num_attention_heads"]
    rank, groups, inner = values["q_lora_rank"], values["o_groups"], values["moe_intermediate_size"]
    output, experts, count = groups * values["o_lora_rank"], values["n_routed_experts"], values["hc_mult"]
    tensors: Shapes = {
        "attn.wq_a.weight": (rank, width), "attn.wq_b.weight": (heads * head, rank), "attn.wkv.weight": (head, width),
        "attn.wo_a.weight": (output, heads * head // groups), "attn.wo_b.weight": (width, output),
        "attn.q_norm.weight": (rank,), "attn.kv_norm.weight": (head,), "attn.attn_sink": (heads,),
        "attn_norm.weight": (width,), "ffn_norm.weight": (width,),
        "ffn.gate.weight": (experts, width), "ffn.gate.bias": (experts,),
        "ffn.experts.w1": (experts, inner, width), "ffn.experts.w2": (experts, width, inner),
        "ffn.experts.w3": (experts, inner, width),
        "ffn.shared_experts.w1.weight": (inner, width), "ffn.shared_experts.w2.weight": (width, inner),
        "ffn.shared_experts.w3.weight": (inner, width),
    }
    for site in ("attn", "ffn"):
        tensors |= {f"hc_{site}_fn": ((2 + count) * count, count * width), f"hc_{site}_base": ((2 + count) * count,),
                    f"hc_{site}_scale": (3,)}
    return tensors


def own_tensors(values: Mapping[str, Any]) -> Shapes:
    """Names and shapes of everything that training changes, the routers' biases included, as training names it."""
    width, count, rank = values["hidden_size"], values["hc_mult"], values["dspark_markov_rank"]
    vocab, taps = values["vocab_size"], len(values["dspark_target_layer_ids"])
    tensors: Shapes = {"main_proj.weight": (width, taps * values.get("target_hidden_size", width)),
                       "main_norm.weight": (width,)}
    stage = _stage(values)
    for index in range(values["n_mtp_layers"]):
        tensors |= {f"layers.{index}.{name}": shape for name, shape in stage.items()}
    tensors |= {
        "norm.weight": (width,), "hc_head.fn": (count, count * width), "hc_head.base": (count,), "hc_head.scale": (1,),
        "markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank),
    }
    if values["enable_confidence_head"]:
        tensors["confidence_head.proj.weight"] = (
            1, width + (rank if values["confidence_head_with_markov"] else 0))
    return tensors


def released_name(name: str, stages: int) -> str:
    """Name in the release of a tensor that training calls ``name``; stacked experts keep their tail."""
    if name.startswith("layers."):
        return f"mtp.{name.removeprefix('layers.')}"
    if name.startswith(_FIRST):
        return f"mtp.0.{name}"
    assert name.startswith(_LAST), name
    return f"mtp.{stages - 1}.{name}".replace("hc_head.", "hc_head_")


def expert_name(stacked: str, expert: int) -> str:
    """Name of one expert's matrix: ``mtp.0.ffn.experts.w1`` to ``mtp.0.ffn.experts.7.w1.weight``."""
    prefix, matrix = stacked.rsplit(".", 1)
    return f"{prefix}.{expert}.{matrix}.weight"


def is_stacked(name: str) -> bool:
    """Whether ``name`` is one matrix of all experts, under either prefix."""
    return _EXPERTS in name and not name.endswith(".weight")


def released_tensors(values: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the release's ``mtp.*``, unquantised."""
    found: Shapes = {}
    for name, shape in own_tensors(values).items():
        released = released_name(name, values["n_mtp_layers"])
        if is_stacked(released):
            found |= {expert_name(released, expert): shape[1:] for expert in range(shape[0])}
        else:
            found[released] = shape
    return found
