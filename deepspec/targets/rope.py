"""RoPE of targets whose frequencies depend on the longest position of a pass: one table for all lengths instead."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@torch.no_grad()
def keep_one_table(decoder: Any) -> None:
    """Give the longrope of ``decoder`` the frequencies of its longest context, whatever the length of a pass.

    Hugging Face chooses between short and long factors anew in every pass, by its highest position: a document would
    depend on the one it is packed with, and cached keys would not survive the crossing. vLLM has the long factors
    for all requests unless its maximum length is within ``original_max_position_embeddings``; so has the drafter
    (``drafters/rope.py``). Models with any other rule stay as they are.
    """
    for module in decoder.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        limit = module.config.max_position_embeddings
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=limit)
        module.inv_freq.copy_(frequencies)
        module.original_inv_freq = frequencies  # what Hugging Face chooses from: the same twice
        module.long_inv_freq = frequencies.clone()
