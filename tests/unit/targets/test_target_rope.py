"""Longrope of a target: the frequencies of its longest context in every pass, as vLLM and the drafter have them."""

import pytest
import torch
from tiny_targets import assert_near, random_ids, reference, tiny_model, tiny_target, tiny_tokenizer

from deepspec.targets.frozen import FrozenTarget


@pytest.mark.parametrize("limit, name", [(128, "long_factor"), (9, "long_factor"), (8, "short_factor")])
def test_every_pass_has_the_frequencies_of_the_longest_context(limit: int, name: str) -> None:
    """The tiny Phi-3 was trained on 8 tokens; half of its 16 dimensions are turned."""
    model = tiny_model("phi3")
    model.config.max_position_embeddings = limit
    target, rope = FrozenTarget(model, tiny_tokenizer()), model.get_decoder().rotary_emb
    factors = torch.tensor(model.config.rope_parameters[name])
    for length in (5, 40, 5):
        target.encode(random_ids(length), [length])
        torch.testing.assert_close(rope.inv_freq, 1.0 / (factors * 10000.0 ** (torch.arange(0, 8, 2) / 8)))


def test_a_short_document_is_the_beginning_of_a_long_one() -> None:
    """Hugging Face's of a long document: of the short one alone it would take other factors."""
    ids, target = random_ids(30), tiny_target("phi3")
    long, alone = reference("phi3", ids)[1][:7], reference("phi3", ids[:7])[1]
    assert_near(target.encode(ids[:7], [7]).last_hidden, long)
    assert float((alone - long).abs().max()) > 0.1
