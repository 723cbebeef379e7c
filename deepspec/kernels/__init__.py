"""Triton kernels. Triton is imported when one is asked for: a machine without it runs everything else."""

import os
from importlib.util import find_spec
from typing import Callable, Optional

import torch
from torch import Tensor

from deepspec.errors import ConfigError


def why_not(device: torch.device) -> str:
    """Why Triton kernels cannot run on tensors of ``device``, with what to do; empty where they can."""
    if find_spec("triton") is None:
        return "Triton is not installed. Install it (pip install -c constraints.txt triton)"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "yes", "on"):
            return ("the tensors are on the CPU, where Triton only interprets its kernels, slowly. Set "
                    "TRITON_INTERPRET=1 in the environment to have it interpret them")
    elif device.type != "cuda":
        return f"the kernels are not compiled for the device type {device.type!r}. Use a CUDA device"
    return ""


def require_kernels(key: str, device: torch.device, instead: str) -> None:
    """Raise ConfigError where ``key`` asks for Triton on a device that cannot run it; ``instead`` is what to set."""
    reason = why_not(device)
    if reason:
        raise ConfigError(f"{key}=triton cannot be used: {reason}, or set {key}={instead}.")


def greedy_drafting(device: torch.device, limit: int) -> Optional[Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The fused greedy step for ``sample_block`` on a GPU, over the first ``limit`` tokens; None elsewhere."""
    if device.type != "cuda" or why_not(device):
        return None
    from deepspec.kernels.markov_step import greedy_transition

    return lambda logits, transition, factor: greedy_transition(logits, transition, factor, limit)
