"""torch.compile of the drafter's layers, one graph for all layers; parameters keep their names.

Attention itself is not part of the graph on the CPU; norms, rotations, gates and residuals are fused around the
matrix products. Numbers of rows are symbolic, so packs of any size share the graph. On one CPU thread a layer of width
576 with 1,024 context and 3,584 block rows took 1.19 s instead of 1.26 s of CPU time, forward and backward, after 9 to
40 s of compilation: hence off by default. A GPU was not at hand. ZeRO-3 is refused in planning, since its hooks empty
the parameters that a graph has captured.
"""

import logging
import os
import shutil

import torch
from torch import nn
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks on this machine for ``device``; empty if nothing."""
    if device.type == "cuda":
        return "" if has_triton() else "Triton"
    found = any(shutil.which(name) for name in (os.environ.get("CXX", "").split(" ")[0], "g++", "clang++") if name)
    return "" if found else "a C++ compiler (g++, clang++ or the one CXX names)"


def compile_layers(layers: nn.ModuleList, device: torch.device) -> bool:
    """Compile every layer's forward pass in place, at its first call. Returns False, with a warning, if it cannot."""
    missing = missing_compiler(device)
    if missing:
        logger.warning("trainer.compile=true needs %s, which is not there: layers run uncompiled, the results are "
                       "the same", missing)
        return False
    for layer in layers:
        layer.compile(dynamic=True)
    return True
