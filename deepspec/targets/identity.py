"""What tells one target from another: hashes of its configuration and of every tensor."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures",
                  "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache")


def hash_config(config: Any) -> bytes:
    """A Hugging Face configuration, without what says nothing about the weights, as bytes to hash."""
    kept = {key: value for key, value in config.to_diff_dict().items() if key not in _VOLATILE_KEYS}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def hash_tensor(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of name, shape, dtype and bytes."""
    digest = hashlib.sha256(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
