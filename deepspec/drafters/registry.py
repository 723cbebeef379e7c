"""Drafters by name: what a configuration may ask for, checked once, and the model it names."""

from dataclasses import replace
from typing import Callable

from deepspec.config.schema import (
    ON_LAST_HIDDEN, WITH_HEADS, DrafterConfig, TargetConfig, drafter_layers, is_autoregressive,
)
from deepspec.drafters.base import Drafter
from deepspec.drafters.compiling import compile_layers
from deepspec.drafters.config_medusa import ALGORITHM as MEDUSA
from deepspec.drafters.dspark import DSparkDrafter
from deepspec.drafters.eagle3 import Eagle3Drafter
from deepspec.drafters.medusa import MedusaDrafter
from deepspec.drafters.mtp import MtpDrafter
from deepspec.drafters.rope import frequencies
from deepspec.drafters.sequential import HEADS
from deepspec.drafters.types import BLOCKS, GEMMA4, DrafterShape, SharedWeights
from deepspec.drafters.v4.drafter import V4Drafter
from deepspec.drafters.v4.options import heads_of, is_v4, takes_last_layer, v4_shape
from deepspec.errors import ConfigError
from deepspec.targets.spec import TargetSpec

Builder = Callable[..., Drafter]
_BUILDERS: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a drafter class known under ``drafter.algorithm=name``."""
    def add(builder: Builder) -> Builder:
        _BUILDERS[name] = builder
        return builder
    return add


register("dspark")(DSparkDrafter)
register("dflash")(DSparkDrafter)
register("dspark_v4")(V4Drafter)
register("eagle3")(Eagle3Drafter)
register("medusa")(MedusaDrafter)
register("mtp")(MtpDrafter)


def _check_algorithm(name: str) -> None:
    if name not in _BUILDERS:
        raise ConfigError(f"drafter.algorithm={name!r} is unknown: use one of {', '.join(sorted(_BUILDERS))}.")


def build_drafter(
    shape: DrafterShape, shared: SharedWeights, *, confidence_detach: bool = False,
    activation_checkpointing: bool = False, attention: str = "auto", compile: bool = False,
) -> Drafter:
    """A freshly initialised drafter (from torch's global generator) of ``shape`` over the target's shared weights.

    The options are those of ``objective`` and ``trainer`` of the same names. Raises ConfigError.
    """
    _check_algorithm(shape.algorithm)
    for name, weight in (("embedding", shared.embed), ("LM head", shared.lm_head)):
        expected = (shape.vocab_size, shape.hidden_size)
        if tuple(weight.shape) != expected:
            raise ConfigError(
                f"The target's {name} has shape {tuple(weight.shape)} but the drafter's configuration expects "
                f"{expected}: they belong to different targets. Use the drafter with the target it was made for."
            )
    drafter = _BUILDERS[shape.algorithm](
        shape, shared, confidence_detach=confidence_detach, activation_checkpointing=activation_checkpointing,
        attention=attention,
    )
    if compile:
        compile_layers(drafter.layers, shared.embed.device)
    return drafter


def _check_slots(spec: TargetSpec, target: TargetConfig, drafter: DrafterConfig) -> None:
    if drafter.block_size < 2 and not is_autoregressive(drafter.algorithm):
        raise ConfigError(
            f"drafter.block_size={drafter.block_size} is too small: a block has its anchor and at least one more slot. "
            "Use 2 or more (the published drafters use 7)."
        )
    if drafter.num_layers < 1:
        raise ConfigError(f"drafter.num_layers={drafter.num_layers} must be at least 1.")
    mask = target.mask_token_id
    if not isinstance(mask, int) or not 0 <= mask < spec.vocab_size:
        raise ConfigError(
            f"target.mask_token_id={mask!r} is not a row of the target's embedding, which has {spec.vocab_size} rows "
            f"(0..{spec.vocab_size - 1}). Name a token that text never contains, for instance an unused special token; "
            "the serving engine must use the same id."
        )
    _check_layers(spec, target, drafter)


def _check_layers(spec: TargetSpec, target: TargetConfig, drafter: DrafterConfig) -> None:
    layers = list(target.feature_layers)
    if drafter.algorithm in ON_LAST_HIDDEN:
        if layers != [spec.num_layers - 1]:
            raise ConfigError(
                f"target.feature_layers={layers} with drafter.algorithm={drafter.algorithm}: its only feature is the "
                f"target's last hidden state, target.feature_layers=[{spec.num_layers - 1}]. "
                f"drafter={drafter.algorithm} sets that; leave it out."
            )
        return
    last = spec.num_layers - (1 if takes_last_layer(spec.model_type) else 2)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > last:
        raise ConfigError(
            f"target.feature_layers={layers} must be ascending ids of decoder layer outputs between 0 and "
            f"{last}: the target has {spec.num_layers} layers, and engines capture the last of DeepSeek-V4 only."
        )


def _check_heads(drafter: DrafterConfig) -> None:
    if drafter.head not in HEADS:
        raise ConfigError(f"drafter.head={drafter.head!r} is unknown: use one of {', '.join(HEADS)}.")
    if drafter.head != "none" and drafter.markov_rank < 1:
        raise ConfigError(
            f"drafter.head={drafter.head} needs drafter.markov_rank of at least 1, not {drafter.markov_rank}: "
            "set a rank (256 as published), or drafter.head=none."
        )
    if drafter.algorithm not in WITH_HEADS and (drafter.head != "none" or drafter.confidence_head):
        raise ConfigError(
            f"drafter.algorithm={drafter.algorithm} has neither sequential nor confidence head, but "
            f"drafter.head={drafter.head} and "
            f"drafter.confidence_head={drafter.confidence_head}: set drafter.head=none and "
            "drafter.confidence_head=false, or use drafter.algorithm=dspark."
        )


def _check_block(spec: TargetSpec, drafter: DrafterConfig) -> None:
    if drafter.block not in BLOCKS:
        raise ConfigError(f"drafter.block={drafter.block!r} is unknown: use one of {', '.join(BLOCKS)}.")
    if drafter.block == GEMMA4 and spec.full_rope_parameters is None:
        raise ConfigError(
            f"drafter.block=gemma4 copies the full-attention layers of a Gemma 4 target, but this target is of "
            f"model_type {spec.model_type!r}. Use drafter.block=qwen3, which fits any target."
        )
    blocks = drafter.algorithm in ("dspark", "dflash")
    if drafter.block == GEMMA4 and (not blocks or drafter.sliding_window is not None):
        raise ConfigError(
            f"drafter.block=gemma4 is for dspark and dflash without a window, but drafter.algorithm="
            f"{drafter.algorithm} and drafter.sliding_window={drafter.sliding_window}. Use drafter.block=qwen3."
        )


def shape_from(spec: TargetSpec, target: TargetConfig, drafter: DrafterConfig) -> DrafterShape:
    """The drafter's shape for a target; raises ConfigError for options that do not fit it or each other.

    Without a sequential head there is no rank and no Markov embedding for the confidence head to read, whatever
    ``markov_rank`` and ``confidence_with_markov`` say, so that ``drafter.head=none`` is a one-line ablation.
    """
    _check_algorithm(drafter.algorithm)
    _check_slots(spec, target, drafter)
    _check_heads(drafter)
    _check_block(spec, drafter)
    with_head = drafter.head != "none"
    recurrent = is_autoregressive(drafter.algorithm)
    medusa = drafter.algorithm == MEDUSA
    if (recurrent or medusa) and (not drafter.sample_from_anchor or drafter.sliding_window is not None):
        raise ConfigError(
            f"drafter.algorithm={drafter.algorithm} drafts from the anchor on and chooses its context itself, but "
            f"drafter.sample_from_anchor={drafter.sample_from_anchor} and "
            f"drafter.sliding_window={drafter.sliding_window}. Leave both out."
        )
    shape = DrafterShape(
        algorithm=drafter.algorithm, hidden_size=spec.hidden_size,
        intermediate_size=drafter.intermediate_size or spec.intermediate_size, num_layers=drafter_layers(drafter),
        num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps, rope_theta=spec.rope_theta, rope_parameters=dict(spec.rope_parameters),
        max_position_embeddings=spec.max_position_embeddings, block_size=drafter.block_size,
        sample_from_anchor=drafter.sample_from_anchor, head=drafter.head,
        markov_rank=drafter.markov_rank if with_head else 0, confidence_head=drafter.confidence_head,
        confidence_with_markov=drafter.confidence_head and drafter.confidence_with_markov and with_head,
        mask_token_id=target.mask_token_id, feature_layers=tuple(target.feature_layers),
        num_target_layers=spec.num_layers, target_hidden_size=spec.hidden_size, target_model_type=spec.model_type,
        final_logit_softcap=spec.final_logit_softcap, embed_scale=spec.embed_scale,
        logit_scale=spec.logit_scale,
        sliding_window=1 if medusa else drafter.sliding_window, unroll=drafter.unroll if recurrent else None,
    )
    if is_v4(drafter.algorithm):
        of = v4_shape(drafter, hidden_size=spec.hidden_size, num_heads=spec.num_heads, head_dim=spec.head_dim)
        heads, width = heads_of(drafter, spec.num_heads, spec.head_dim)
        theta = drafter.v4.rope_theta
        return replace(shape, v4=of, num_heads=heads, head_dim=width, num_kv_heads=1, rope_theta=theta,
                       rope_parameters={"rope_type": "default", "rope_theta": theta})
    if drafter.block == GEMMA4:
        shape = replace(shape, block=GEMMA4, head_dim=spec.full_head_dim or spec.head_dim,
                        num_kv_heads=spec.full_kv_heads or spec.num_kv_heads,
                        keys_are_values=bool(spec.keys_are_values),
                        rope_parameters=dict(spec.full_rope_parameters or {}))
    frequencies(shape)  # refuses what the drafter cannot reproduce
    return shape
