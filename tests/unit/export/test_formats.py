"""Other layouts: what their readers need, and what cannot be expressed in them."""

import json
from typing import Any, Callable

import pytest
from safetensors.torch import load_file

from deepspec.errors import ConfigError
from deepspec.export.exporter import export_drafter
from deepspec.export.formats import converter


def test_speculators(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request(formats=("deepspec", "speculators")))
    values = json.loads((folder / "speculators" / "config.json").read_text())
    assert values["aux_hidden_state_layer_ids"] == [2, 3, 5] and "target_layer_ids" not in values
    assert values["sample_from_anchor"] is True and "model_type" not in values
    assert values["transformer_layer_config"]["model_type"] == "qwen3"
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    stored = load_file(folder / "speculators" / "model.safetensors")
    assert "embed_tokens.weight" not in stored and "markov_head.markov_w1.weight" in stored


def test_speculators_bonus_anchor(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request(formats=("speculators",), sample_from_anchor=False))
    values = json.loads((folder / "speculators" / "config.json").read_text())
    assert values["sample_from_anchor"] is False
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_specforge(make_request: Callable[..., Any]) -> None:
    folder = export_drafter(make_request(formats=("deepspec", "specforge")))
    values = json.loads((folder / "specforge" / "config.json").read_text())
    assert values["architectures"] == ["DSparkDraftModel"] and values["model_type"] == "qwen3"
    assert values["dflash_config"]["projector_type"] == "dspark" and values["markov_rank"] == 8


@pytest.mark.parametrize("name, drafter, said", [
    ("zlab_dflash", {}, "only 1\\+N DFlash"), ("specforge", {"sample_from_anchor": False}, "anchor slot"),
])
def test_what_does_not_fit_is_refused(make_request: Callable[..., Any], name: str, drafter: dict[str, Any],
                                      said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        export_drafter(make_request(formats=(name,), **drafter))


def test_unknown_format_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="deepspec, speculators, specforge, zlab_dflash"):
        converter("gguf")
