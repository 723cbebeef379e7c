"""How many bytes of tensors are alive at most while something runs: counted at every operator, not sampled."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes() as found: ...``; ``found.peak`` are the most bytes of storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs))
                  if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known or key in before:
                continue
            self._known.add(key)
            self._now += size
            weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self._now)
        return result
