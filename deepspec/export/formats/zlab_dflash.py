"""z-lab's DFlash layout: 1+N blocks, embedding and LM head taken from the target."""

from typing import Any, Mapping

from torch import Tensor

from deepspec.errors import ConfigError
from deepspec.export import layout
from deepspec.export.formats import Converted, FormatContext, without_shared


def convert(values: Mapping[str, Any], tensors: Mapping[str, Tensor], context: FormatContext) -> Converted:
    """Raises ConfigError for anything but a 1+N DFlash drafter."""
    if not layout.is_dflash(values):
        raise ConfigError("export.formats has 'zlab_dflash', which holds only 1+N DFlash drafters without heads "
                          "(drafter.algorithm=dflash drafter.sample_from_anchor=false). Remove it from export.formats.")
    return dict(values), without_shared(tensors)
