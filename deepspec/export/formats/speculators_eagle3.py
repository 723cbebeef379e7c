"""EAGLE-3 in the layout of the ``speculators`` package 0.9.0: nested Qwen3 keys, every norm flag, whole vocabulary."""

from typing import Any, Mapping

from torch import Tensor

from deepspec.export import layout
from deepspec.export.formats import Converted, FormatContext

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def convert(values: Mapping[str, Any], tensors: Mapping[str, Tensor], context: FormatContext, *, version: str,
            layer_keys: tuple[str, ...]) -> Converted:
    """Names of tensors stay, and the copies of the target's two matrices stay in: the package stores them, too.

    Flags that are false are written: vLLM's adapter takes true for ``norm_before_residual`` where it is absent. It also
    reads the number of feature layers from the nested keys.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": layout.speculative_tokens(values),
                "verifier_accept_k": 1, "accept_tolerance": 0.0}
    nested = {"model_type": "qwen3"} | {key: values[key] for key in layer_keys if key in values}
    return {
        "speculators_model_type": "eagle3", "speculators_version": version, "architectures": ["Eagle3DraftModel"],
        "speculators_config": {
            "algorithm": "eagle3", "proposal_methods": [proposal], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": context.target, "architectures": list(context.target_architectures)},
        },
        "transformer_layer_config": nested | {"num_aux_hidden_states": values["num_aux_hidden_states"]},
        "draft_vocab_size": values["draft_vocab_size"], "target_hidden_size": values["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": list(values["eagle_aux_hidden_state_layer_ids"]),
        **{flag: values[flag] for flag in NORM_FLAGS}, "embed_requires_grad": False,
        "tie_word_embeddings": False, "dtype": values["dtype"],
    }, dict(tensors)
