"""The refitted confidence head on disk, and putting it into a drafter."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deepspec.artifacts import atomic_write_bytes, read_manifest, sha256_file
from deepspec.calibration.refit import LinearHead
from deepspec.errors import InputRefused

logger = logging.getLogger(__name__)
CONFIDENCE_DIR = "confidence"
HEAD_FILE = "head.safetensors"
WEIGHT, BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"  # [1, F], [1]: names of the checkpoint


def head_from_tensors(tensors: Mapping[str, Tensor]) -> LinearHead:
    """The linear head among a drafter's tensors, in float32."""
    bias = float(tensors[BIAS].detach().float()[0]) if BIAS in tensors else None
    return LinearHead(tensors[WEIGHT].detach().float().cpu().numpy()[0], bias)


def read_head(path: str | PathLike[str]) -> dict[str, Tensor]:
    """The confidence head's tensors of a safetensors file; nothing else of it is read."""
    with safe_open(path, framework="pt") as stored:
        names = (WEIGHT, BIAS) if BIAS in stored.keys() else (WEIGHT,)
        return {name: stored.get_tensor(name) for name in names}


def set_head(drafter: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy confidence head weights into ``drafter``, in the dtype it computes in."""
    with torch.no_grad():
        drafter.confidence_head.proj.weight.copy_(tensors[WEIGHT])
        if drafter.confidence_head.proj.bias is not None:
            drafter.confidence_head.proj.bias.copy_(tensors[BIAS])


def save_head(path: str | PathLike[str], head: LinearHead) -> None:
    """Write the head as safetensors (float32) under the checkpoint's tensor names."""
    tensors = {WEIGHT: torch.from_numpy(np.ascontiguousarray(head.weight, dtype=np.float32))[None]}
    if head.bias is not None:
        tensors[BIAS] = torch.tensor([head.bias], dtype=torch.float32)
    atomic_write_bytes(path, save(tensors, metadata={"format": "pt"}))


def head_in_use(run_dir: str | PathLike[str], drafter_sha256: str) -> str:
    """Which confidence head a run evaluates and exports with these weights: joint, or refit where that was chosen."""
    manifest = read_manifest(Path(run_dir) / CONFIDENCE_DIR)
    if manifest is None or manifest.status != "complete" or manifest.facts.get("drafter_sha256") != drafter_sha256:
        return "joint"
    return "refit" if manifest.facts.get("chosen") == "refit" else "joint"


def load_confidence(run_dir: str | PathLike[str], drafter: Any, drafter_sha256: str) -> bool:
    """Put the refitted confidence head of a run in place, if the run has one and chose it.

    Returns whether it did. Without a finished confidence stage, or if the jointly trained head was better, the drafter
    stays as it is; the same holds, with a warning, if the head was fitted for other weights than ``drafter_sha256``
    (the drafter was trained further: the confidence stage will make a new one).

    Raises:
        InputRefused: the head's file is damaged or does not fit the drafter.
    """
    directory = Path(run_dir) / CONFIDENCE_DIR
    manifest = read_manifest(directory)
    if drafter.confidence_head is None or manifest is None or manifest.status != "complete":
        return False
    if manifest.facts.get("chosen") != "refit":
        return False
    if manifest.facts.get("drafter_sha256") != drafter_sha256:
        logger.warning("%s was fitted for another checkpoint of the drafter and is not used; launch/fit_confidence.py "
                       "makes a new one", directory / HEAD_FILE)
        return False
    path = directory / HEAD_FILE
    if not path.is_file() or sha256_file(path) != manifest.files.get(HEAD_FILE):
        raise InputRefused(f"{path} is missing or is not what the confidence stage wrote. Make it again with "
                           "launch/fit_confidence.py.")
    try:
        set_head(drafter, read_head(path))
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise InputRefused(f"{path} does not fit this drafter ({error}). Make it again with "
                           "launch/fit_confidence.py.") from None
    return True
