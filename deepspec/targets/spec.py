"""What the rest of the project knows about a target's architecture. Imports no torch: plans and checks are instant."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Iterable, Mapping, Optional

from deepspec.config.schema import MISSING, TargetShape
from deepspec.errors import InputRefused
from deepspec.targets.quantization import quantization_name

_COUNTS = ("parameters", "active_parameters")  # of the weights, not in a Hugging Face configuration


@dataclass(frozen=True)
class TargetSpec:
    """Sizes and constants of a target, read from its Hugging Face configuration.

    ``vocab_size`` counts the rows of the embedding, not the tokenizer's entries. ``rope_parameters`` is the dictionary
    of the full-attention layers, without what only says how the target splits its own heads.
    ``embed_scale`` multiplies the embedding rows (Gemma: sqrt(hidden_size)); ``logit_scale`` multiplies the LM head's
    logits, before ``final_logit_softcap``. ``intermediate_size`` is that of dense layers where there are such, else
    that of an expert.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: Optional[int] = None
    eos_token_ids: tuple[int, ...] = ()
    final_logit_softcap: Optional[float] = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    quantization: Optional[str] = None  # of the weights in its files (quantization.py); None: as they were trained
    full_head_dim: Optional[int] = None  # these four: of full-attention layers that have heads of their own (Gemma 4)
    full_kv_heads: Optional[int] = None
    keys_are_values: Optional[bool] = None  # values are made of the keys' projection
    full_rope_parameters: Optional[dict[str, Any]] = None

    @classmethod
    def from_hf_config(cls, config: Any, *, vocab_rows: Optional[int] = None,
                       eos_token_ids: Iterable[int] = ()) -> "TargetSpec":
        """Read a ``PretrainedConfig`` (its text part, where the model is multimodal).

        ``vocab_rows`` overrides the configured vocabulary by the rows the weight really has; ``eos_token_ids`` (from
        the generation configuration) are added to the configuration's own.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        rope = _rope_parameters(text)
        heads = text.num_attention_heads
        return cls(
            model_type=config.model_type, hidden_size=text.hidden_size, intermediate_size=_intermediate(text),
            num_layers=text.num_hidden_layers, num_heads=heads,
            num_kv_heads=_of_most_layers(text, "num_key_value_heads") or heads,
            head_dim=_of_most_layers(text, "head_dim") or text.hidden_size // heads,
            vocab_size=vocab_rows or text.vocab_size, rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", 10000.0)), rope_parameters=rope,
            max_position_embeddings=int(getattr(text, "max_position_embeddings", 0) or 0),
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            attention_bias=bool(getattr(text, "attention_bias", False)),
            bos_token_id=getattr(text, "bos_token_id", None),
            eos_token_ids=_merge_ids(getattr(text, "eos_token_id", None), eos_token_ids),
            final_logit_softcap=getattr(text, "final_logit_softcapping", None), embed_scale=_embed_scale(text),
            logit_scale=1.0 / float(getattr(text, "logits_scaling", None) or 1.0),
            **_full_attention(text), quantization=_quantization(config),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able copy."""
        return asdict(self)


def _of_most_layers(config: Any, name: str) -> Optional[int]:
    """An attribute that some layers may have their own value of (Gemma 4's full-attention layers)."""
    own = vars(config)
    value: Optional[int] = own[name] if name in own else getattr(config, name, None)
    return value


def _rope_parameters(config: Any) -> dict[str, Any]:
    """RoPE parameters of the full-attention layers: some models keep one dictionary per layer type.

    A drafter turns its whole heads: what a target says about turning a part of its own (``partial_rotary_factor``,
    type ``proportional``, longrope's factors for that part) or about images (``mrope_*``) is left out.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    for kind in ("full_attention", "main"):
        if isinstance(parameters.get(kind), dict):
            parameters = dict(parameters[kind])
            break
    turned = float(parameters.pop("partial_rotary_factor", None) or 1.0)
    for key in [key for key in parameters if key.startswith("mrope_")]:
        del parameters[key]
    if "rope_theta" not in parameters and getattr(config, "rope_theta", None) is not None:
        parameters["rope_theta"] = config.rope_theta
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if parameters["rope_type"] == "longrope" and turned != 1.0:  # one factor per turned pair: too few for whole heads
        return {"rope_type": "default", "rope_theta": parameters.get("rope_theta", 10000.0)}
    if parameters["rope_type"] == "proportional":
        parameters["rope_type"] = "default"
    return parameters


def _quantization(config: Any) -> Optional[str]:
    found = getattr(config, "quantization_config", None)
    if found is not None and not isinstance(found, Mapping):
        found = found.to_dict()
    return quantization_name({"quantization_config": found})


def _full_attention(text: Any) -> dict[str, Any]:
    """Heads and RoPE of the full-attention layers of the Gemma 4 family; nothing for others."""
    if not str(text.model_type).startswith("gemma4"):
        return {}
    layer = text.per_layer_config["full_attention"]
    return {"full_head_dim": layer.head_dim, "full_kv_heads": layer.num_key_value_heads,
            "keys_are_values": bool(getattr(text, "attention_k_eq_v", False)),
            "full_rope_parameters": dict(text.rope_parameters["full_attention"])}


def _intermediate(config: Any) -> int:
    return int(getattr(config, "intermediate_size", None) or config.moe_intermediate_size)


def _merge_ids(configured: Any, extra: Iterable[int]) -> tuple[int, ...]:
    own = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    return tuple(dict.fromkeys(int(token) for token in [*own, *extra]))


def _embed_scale(config: Any) -> float:
    multiplier = getattr(config, "embedding_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    return math.sqrt(config.hidden_size) if config.model_type.startswith("gemma") else 1.0


def check_parameters(model: Any, shape: TargetShape, name: str) -> None:
    """Compare the elements of a causal LM's text part, with or without weights, with what its configuration promised.

    Raises InputRefused when they differ by more than a hundredth. Quantised weights are not compared: they are packed.
    """
    if shape.parameters is None or getattr(model.config, "quantization_config", None) is not None:
        return
    unique = {id(parameter): parameter.numel() for part in (model.get_decoder(), model.get_output_embeddings())
              for parameter in part.parameters()}
    found = sum(unique.values())
    if abs(found - shape.parameters) > 0.01 * shape.parameters:
        raise InputRefused(f"{name} has {found:,} parameters, but target.shape.parameters says {shape.parameters:,}. "
                           "Correct target.shape.parameters and target.shape.active_parameters, or point target.path "
                           "at the model that was meant.")


def check_shape(spec: TargetSpec, shape: TargetShape) -> None:
    """Compare the loaded target with the sizes its configuration promised; fields left open are not compared.

    Raises InputRefused naming every field that differs, with both values.
    """
    differing = [
        f"{name} is {getattr(spec, name)!r} but target.shape.{name} says {promised!r}"
        for name, promised in asdict(shape).items()
        if name not in _COUNTS and promised not in (MISSING, None) and promised != getattr(spec, name)
    ]
    if differing:
        raise InputRefused(
            f"The target that was loaded is not the one its configuration describes: {'; '.join(differing)}. "
            "Correct target.shape, or point target.path at the model that was meant."
        )
