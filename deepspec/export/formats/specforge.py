"""SpecForge's layout: ``DSparkDraftModel``, everything nested in ``dflash_config`` and hoisted for SGLang."""

from typing import Any, Mapping

from torch import Tensor

from deepspec.errors import ConfigError
from deepspec.export import layout
from deepspec.export.formats import Converted, FormatContext, without_shared


def convert(values: Mapping[str, Any], tensors: Mapping[str, Tensor], context: FormatContext) -> Converted:
    """Layer ids keep our counting. Raises ConfigError for a drafter whose slot 0 predicts nothing."""
    if layout.kind(values) != "dspark" or not values["sample_from_anchor"]:
        raise ConfigError("export.formats has 'specforge', whose DSpark always predicts on the anchor slot, but this "
                          "drafter was trained with drafter.sample_from_anchor=false. Remove it from export.formats.")
    config = dict(values)
    config["architectures"] = ["DSparkDraftModel"]
    config["dflash_config"] = dict(values["dflash_config"]) | {"projector_type": "dspark"}
    return config, without_shared(tensors)
