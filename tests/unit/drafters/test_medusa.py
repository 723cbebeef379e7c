"""Medusa: arithmetic written out, training like drafting, decoding without loss, and its files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parent))

from medusa_cases import medusa_drafter, medusa_shape_of  # noqa: E402

from deepspec.config.schema import ObjectiveConfig  # noqa: E402
from deepspec.data.anchors import build_blocks  # noqa: E402
from deepspec.data.batch import Sample, TrainingBatch  # noqa: E402
from deepspec.drafters.config import shape_from_config, shape_to_config  # noqa: E402
from deepspec.errors import ConfigError, InputRefused  # noqa: E402
from deepspec.export import gates, layout  # noqa: E402
from deepspec.export.engines import verdicts, vllm_speculative_config  # noqa: E402
from deepspec.objective import drafter_loss, window_weights  # noqa: E402
from deepspec.targets.sampling import Sampling  # noqa: E402
from tests.unit.decoding.test_decoder import answers, decoder, plain  # noqa: E402
from tests.unit.decoding.tiny import prompts, tiny_target  # noqa: E402


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(layers=(3,))


def batch_of(target: Any, drafter: Any, anchors: list[int]) -> TrainingBatch:
    ids = torch.randint(3, 48, (20,), generator=torch.Generator().manual_seed(5))
    encoded = target.encode(ids, [20])
    sample = Sample("a", "chat", ids, torch.ones(20, dtype=torch.bool))
    blocks = build_blocks([sample], [torch.tensor(anchors)], drafter.shape.draft_length)
    return TrainingBatch(("a",), ids, torch.arange(20), (0, 20), encoded.features, encoded.last_hidden, blocks)


@pytest.mark.parametrize("depth", [1, 2])
def test_heads_read_the_state_that_made_the_anchor(target: Any, depth: int) -> None:
    """Training's pass and drafting's are the written-out heads on the last hidden state before the anchor."""
    drafter = medusa_drafter(target, num_layers=depth)
    batch = batch_of(target, drafter, [0, 5, 11])
    found = drafter.base_logits(drafter(batch).hidden)
    for place, anchor in enumerate((0, 5, 11)):
        state = batch.last_hidden[anchor - 1] if anchor else torch.zeros(64)
        for k, head in enumerate(drafter.blocks):
            expected = state
            for layer in head.layers:
                inner = expected @ layer.weight.T + layer.bias
                expected = expected + inner * torch.sigmoid(inner)
            torch.testing.assert_close(found[place, k], functional.linear(expected, target.lm_head_weight),
                                       rtol=1e-4, atol=1e-4)
    drafted = gates.block_logits(drafter, batch.features, batch.input_ids, batch.blocks.anchor_rows)
    torch.testing.assert_close(drafted, found, rtol=1e-4, atol=1e-4)


def test_it_starts_as_the_targets_lm_head_and_learns(target: Any) -> None:
    from deepspec.drafters.registry import build_drafter

    drafter = build_drafter(medusa_shape_of(target), medusa_drafter(target).shared)
    batch = batch_of(target, drafter, [1, 4, 9, 12])
    states = batch.last_hidden[batch.blocks.anchor_rows - 1]
    assert torch.equal(drafter(batch).hidden, states[:, None].expand(-1, 4, -1))
    objective = ObjectiveConfig(ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0)
    optimizer, found = torch.optim.Adam(drafter.parameters(), lr=1e-2), []
    for _ in range(12):
        denominators = window_weights(batch.blocks, objective, 4)
        loss = drafter_loss(drafter(batch), batch, drafter.shared, objective, denominators, drafter.shape).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        optimizer.step()
        found.append(float(loss))
    assert found[-1] < 0.5 * found[0]


def test_greedy_equals_plain_decoding(target: Any) -> None:
    requests, sampling = prompts(9), Sampling(temperature=0.0)
    results = list(decoder(target, medusa_drafter(target), sampling, "fixed").decode(requests))
    assert answers(results) == plain(target, requests, 24, sampling)


def test_decoding_keeps_one_position(target: Any) -> None:
    """What is drafted in the middle of an answer is what one pass over the finished text gives."""
    drafter, sampling = medusa_drafter(target), Sampling(temperature=1.0, seed=2)
    requests = prompts(4)
    known = {item.id: item for item in requests}
    for item in decoder(target, drafter, sampling, "fixed", batch_size=2, record=True).decode(requests):
        text = torch.tensor(known[item.id].prompt_ids + item.token_ids)
        hidden = target.encode(text, [len(text)]).last_hidden
        anchor = len(known[item.id].prompt_ids)
        for record in item.rounds:
            expected = torch.stack([head(hidden[anchor - 1]) for head in drafter.blocks])
            torch.testing.assert_close(torch.from_numpy(record.detail.hidden).float(), expected, rtol=5e-3, atol=2e-2)
            anchor += record.accepted + record.bonus


def test_files_are_what_vllm_reads() -> None:
    shape = medusa_shape_of(tiny_target(layers=(3,)))
    config = json.loads(json.dumps(shape_to_config(shape, num_anchors=4)))
    assert shape_from_config(config) == shape
    assert (config["num_heads"], config["num_hidden_layers"], config["original_lm_head"]) == (4, 1, True)
    others = [key for key in config if "num" in key and ("heads" in key or "layers" in key)]
    assert sorted(others) == ["num_heads", "num_hidden_layers"], "vLLM takes any such key for one of these"
    names = layout.expected_tensors(config)
    assert names["blocks.3.layers.0.bias"] == (64,) and names["lm_head.weight"] == (64, 64) and len(names) == 10
    assert [entry.engine for entry in verdicts(config) if entry.loads] == ["vllm"]
    assert vllm_speculative_config(config, "m") == {
        "method": "medusa", "model": "m", "num_speculative_tokens": 4, "draft_sample_method": "greedy"}
    del config["deepspec"]
    with pytest.raises(InputRefused, match="LM heads of their own"):
        shape_from_config(config)


def test_what_does_not_fit_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match="chooses its context itself"):
        medusa_shape_of(target, sliding_window=8)
    with pytest.raises(ConfigError, match="neither sequential nor confidence head"):
        medusa_shape_of(target, head="vanilla")
