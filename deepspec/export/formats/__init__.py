"""Other layouts of the same weights. Each module has ``convert(values, tensors, context)``."""

from dataclasses import dataclass
from typing import Any, Callable, Mapping

from torch import Tensor

from deepspec.errors import ConfigError
from deepspec.export import layout

Converted = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class FormatContext:
    """What a layout needs to know about the target."""

    target: str  # hub id or folder
    target_architectures: tuple[str, ...]


def converter(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Tensor], FormatContext], Converted]:
    """The function that turns config.json values and tensors of the DeepSpec layout into layout ``name``."""
    from deepspec.export.formats import specforge, speculators, zlab_dflash

    known = {"speculators": speculators.convert, "specforge": specforge.convert, "zlab_dflash": zlab_dflash.convert}
    if name not in known:
        raise ConfigError(f"export.formats has {name!r}, which is unknown. There are: {', '.join(layout.FORMATS)}.")
    return known[name]


def without_shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's own tensors: loaders of these layouts take embedding and LM head from the target. The LM head of a
    reduced draft vocabulary is its own."""
    shared = layout.SHARED_TENSORS[:1] if "d2t" in tensors else layout.SHARED_TENSORS
    return {name: tensor for name, tensor in tensors.items() if name not in shared}
