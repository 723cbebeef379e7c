"""Exports of drafters with a sliding window: keys that engines look for, in every layout, and what is said of it."""

import json
from typing import Any, Callable

import pytest

from deepspec.drafters.config import shape_from_config
from deepspec.export.exporter import export_drafter

DFLASH = {"head": "none", "confidence_head": False, "sample_from_anchor": False, "algorithm": "dflash"}


@pytest.mark.parametrize("options,formats", [
    ({}, ("deepspec", "speculators", "specforge")), (DFLASH, ("deepspec", "speculators", "zlab_dflash")),
])
def test_window_in_every_layout(make_request: Callable[..., Any], options: dict[str, Any],
                                formats: tuple[str, ...]) -> None:
    folder = export_drafter(make_request(formats=formats, sliding_window=9, **options))
    values = json.loads((folder / "config.json").read_text())
    assert values["layer_types"] == ["sliding_attention"] * values["num_hidden_layers"]
    assert values["sliding_window"] == 9 and values["dflash_config"]["causal"] is False
    assert shape_from_config(values).sliding_window == 9
    for name in formats[1:]:
        other = json.loads((folder / name / "config.json").read_text())
        inner = other.get("transformer_layer_config", other)
        assert inner["sliding_window"] == 9 and set(inner["layer_types"]) == {"sliding_attention"}
        assert other.get("sliding_window_non_causal", True) is True
    said = (folder / "serving" / "launch.md").read_text()
    assert "fewer than in training" in said and "drafter.sliding_window=null" in said
