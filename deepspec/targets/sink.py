"""Where the outputs of chosen layers go while a target's pass runs. T tokens, D width, M layers, n residual streams."""

from typing import Any

import torch
from torch import Tensor


def layer_output(output: Any) -> Tensor:
    """The output [T, D] of a decoder layer called with a batch of one, from what a forward hook is given.

    A layer with n residual streams (DeepSeek-V4) gives [1, T, n, D]: its output is their mean, as engines take it.
    """
    states: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
    return states.mean(dim=1) if states.dim() == 3 else states


class FeatureSink:
    """Columns [T, M*D] that hooks fill: memory grows with the chosen layers only."""

    def __init__(self, tokens: int, layers: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(tokens, layers * width, dtype=dtype, device=device)
        self._width = width
        self._tokens, self._skip = slice(None), 0

    def expect(self, tokens: slice, skip: int = 0) -> None:
        """What comes next belongs to ``tokens``, behind ``skip`` tokens that are run again and not wanted."""
        self._tokens, self._skip = tokens, skip

    def put(self, column: int, output: Any) -> None:
        """Store a layer's output, see ``layer_output``, in its columns."""
        columns = slice(column * self._width, (column + 1) * self._width)
        self.values[self._tokens, columns] = layer_output(output)[self._skip:]
