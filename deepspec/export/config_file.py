"""config.json of an export: the drafter's shape as engines are to see it, and what only the target knows."""

from dataclasses import dataclass, replace
from typing import Any, Optional

from deepspec.drafters.config import IDS_KEY, shape_to_config
from deepspec.drafters.config_medusa import ALGORITHM as MEDUSA
from deepspec.drafters.types import GEMMA4, DrafterShape
from deepspec.export import layout
from deepspec.targets.spec import TargetSpec


@dataclass(frozen=True)
class ConfigFacts:
    """What config.json says besides the drafter's shape and the target's specification."""

    dtype: str  # bfloat16 | float32
    num_anchors: int
    training_max_length: int  # tokens; max_position_embeddings stays the target's
    pad_token_id: Optional[int] = None


def serving_shape(shape: DrafterShape) -> DrafterShape:
    """The shape under which engines run this drafter.

    A drafter without a sequential head that predicts on the anchor slot (or has a confidence head) is served as DSpark
    with a Markov head of rank 1 whose matrices are zero: engines crash at rank 0, and their DFlash never predicts on
    the anchor slot. A Qwen3-shaped 1+N drafter with neither head keeps its shape and leaves in the DFlash layout.
    """
    if shape.head != "none" or shape.autoregressive or shape.algorithm == MEDUSA:
        return shape
    if not shape.sample_from_anchor and not shape.confidence_head and shape.block != GEMMA4:
        return replace(shape, markov_rank=0, confidence_with_markov=False)
    return replace(shape, head="vanilla", markov_rank=1, confidence_with_markov=False)


def config_values(shape: DrafterShape, spec: TargetSpec, facts: ConfigFacts) -> dict[str, Any]:
    """config.json of ``serving_shape(shape)``.

    The keys of the heads and slots stand at the top and in ``dflash_config``, since engines read either;
    ``sample_from_anchor`` is explicit and at the top only, because engines refuse it nested.
    """
    serving = serving_shape(shape)
    eos = list(spec.eos_token_ids)
    values = shape_to_config(serving, num_anchors=facts.num_anchors, dtype=facts.dtype, extra={
        "bos_token_id": spec.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": facts.pad_token_id, "deepspec_training_max_length": facts.training_max_length,
    })
    values.pop(IDS_KEY, None)  # the d2t tensor says it
    if serving.head == "none" and not serving.autoregressive and shape.algorithm != MEDUSA:
        values["architectures"] = [layout.DFLASH_ARCHITECTURE]
        kept = ("block_size", "target_layer_ids", "mask_token_id", "causal")
        values["dflash_config"] = {key: values[key] for key in kept if key in values}
    return values
