"""Options of the drafter that exclude each other are refused by name before anything loads."""

from typing import Callable

import pytest

from deepspec.config.schema import Config
from deepspec.errors import ConfigError
from deepspec.planning.sizes import count_parameters
from deepspec.planning.validate import validate


@pytest.mark.parametrize("overrides,said", [
    (["drafter.draft_vocab_size=0"], "drafter.draft_vocab_size"),
    (["drafter=mtp", "drafter.draft_vocab_size=99"], "null with drafter.algorithm=mtp"),
    (["drafter.draft_vocab_size=99", "export.formats=[deepspec,specforge]"], "export.formats"),
    (["drafter.block=gemma4"], "gemma4 copies the layers of Gemma 4 targets"),
    (["drafter=medusa", "drafter.block=gemma4"], "dspark and dflash without a window"),
    (["drafter=medusa", "drafter.warm_start=true"], "no decoder layer"),
    (["drafter=medusa", "drafter.draft_vocab_size=9"], "drafter.draft_vocab_size"),
    (["drafter=medusa", "target.feature_layers=[1,4]"], "drafter=medusa sets it"),
    (["drafter.block=gemma3"], "drafter.block='gemma3'"),
    (["drafter.block=gemma4", "target.shape.model_type=gemma4", "drafter.sliding_window=9"], "drafter.sliding_window"),
    (["drafter.block=gemma4", "target.shape.model_type=gemma4", "export.formats=[deepspec,speculators]"],
     "export.formats"),
    (["evaluate.context_buckets=[8,4]"], "strictly ascending"), (["evaluate.context_buckets=[0]"], "at least 1"),
])
def test_what_does_not_go_together(composed: Callable[..., Config], overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(composed("+experiment=tiny", *overrides))


def test_the_gemma4_block_is_counted_with_the_heads_of_full_attention(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=tiny", "drafter=dspark_gemma4", "target.shape.model_type=gemma4",
                      "target.shape.full_head_dim=64", "target.shape.full_kv_heads=1",
                      "target.shape.keys_are_values=true")
    validate(config)
    shape, layers = config.target.shape, config.drafter.num_layers
    attention = shape.hidden_size * 64 * (2 * shape.num_heads + 1)
    norms = 4 * shape.hidden_size + 2 * 64
    expected = layers * (attention + 3 * shape.hidden_size * shape.intermediate_size + norms)
    assert count_parameters(config).layers == expected
