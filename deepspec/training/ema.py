"""Exponential moving average of the fp32 weights. Each rank averages its own part of them: a step has no collective.

With ``n`` updates so far the decay is ``min(decay, (1 + n) / (10 + n))``: the first averages forget the initialisation.
"""

import copy
from contextlib import contextmanager
from typing import Any, Iterator

import torch
from torch import Tensor, nn

from deepspec.training.engine import masters

_EXCHANGED_AT_ONCE = 1 << 22  # elements that are held twice while average and weights change places


class WeightAverage:
    """The average of an engine's masters; ``updates`` are those of the optimizer, skipped steps are not among them."""

    def __init__(self, engine: Any, decay: float, updates: int = 0) -> None:
        self.decay, self.updates = decay, updates
        self._masters = masters(engine)
        self._averages = [part.clone() for part in self._masters]

    def restart(self) -> None:
        """Begin again at the weights as they are now."""
        for average, part in zip(self._averages, self._masters, strict=True):
            average.copy_(part)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights after an optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._averages, self._masters, 1.0 - decay)

    @contextmanager
    def as_masters(self) -> Iterator[None]:
        """The averages stand where the engine has its fp32 weights, and these stand here; both are back afterwards.

        What the forward pass uses is not touched by this at stages 1 to 3.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for average, part in zip(self._averages, self._masters, strict=True):
            here, there = average.view(-1), part.view(-1)
            for mine, other in zip(here.split(_EXCHANGED_AT_ONCE), there.split(_EXCHANGED_AT_ONCE), strict=True):
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)


class Outline:
    """A module without its weights, taken before an engine wraps it, so that it can be filled with others later."""

    def __init__(self, module: nn.Module, shared: Any) -> None:
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
        self._shared = shared
        self._module = copy.deepcopy(module, {id(shared): shared, **empty})

    def filled(self, weights: dict[str, Tensor]) -> nn.Module:
        """A copy of the module with ``weights``, by parameter name, as its parameters."""
        module = copy.deepcopy(self._module, {id(self._shared): self._shared})
        found = module.load_state_dict(weights, strict=False, assign=True)
        left = set(found.missing_keys) & {name for name, _ in module.named_parameters()}
        if left or found.unexpected_keys:
            raise RuntimeError(f"weights do not fit: {sorted(left)} missing, {found.unexpected_keys} unknown")
        return module.requires_grad_(False)
