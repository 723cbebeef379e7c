"""A Medusa drafter as ``config.json``: the keys of vLLM's ``MedusaConfig``, and our own in a place of their own.

That class takes every top-level key with "num" and "heads" or "layers" in it for its own two, so no other may stand
there. Needs no torch.
"""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Mapping

from deepspec.errors import InputRefused

if TYPE_CHECKING:  # plans read this file, and need no torch
    from deepspec.drafters.types import DrafterShape

ALGORITHM, ARCHITECTURE = "medusa", "MedusaModel"
OWN = "deepspec"


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a Medusa drafter."""
    return list(config.get("architectures") or ()) == [ARCHITECTURE]


def medusa_config(shape: "DrafterShape", dtype: str) -> dict[str, Any]:
    """config.json of ``shape``."""
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(shape).items()}
    return {
        "architectures": [ARCHITECTURE], "model_type": "medusa", "dtype": dtype, "torch_dtype": dtype,
        "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "truncated_vocab_size": shape.vocab_size,
        "num_heads": shape.block_size, "num_hidden_layers": shape.num_layers, "original_lm_head": True,
        "medusa_fc_bias": True, "block_size": shape.block_size, "sample_from_anchor": True,
        "target_layer_ids": list(shape.feature_layers), "target_hidden_size": shape.target_hidden_size,
        "target_model_type": shape.target_model_type, "mask_token_id": shape.mask_token_id, "markov_rank": 0,
        "enable_confidence_head": False, "max_position_embeddings": shape.max_position_embeddings,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "deepspec_algorithm": ALGORITHM, OWN: own,
        "final_logit_softcapping": shape.final_logit_softcap, "logit_scale": shape.logit_scale,
    }


def medusa_shape(config: Mapping[str, Any], kind: "type[DrafterShape]") -> "DrafterShape":
    """Shape of a file that this project wrote; raises InputRefused for others, whose heads have LM heads of their own.
    """
    own = config.get(OWN)
    if not isinstance(own, Mapping):
        raise InputRefused("This Medusa drafter's config.json was not written by this project. Heads of other trainers "
                           "have LM heads of their own, which ours do not: train one with drafter=medusa.")
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()
                              if name in known}
    return kind(**values)
