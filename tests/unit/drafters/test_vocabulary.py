"""A reduced draft vocabulary: losses, their gradients, what is chosen, and files."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_cases import DOCUMENTS, drafter, pack, shape

from deepspec.config.schema import ObjectiveConfig
from deepspec.drafters.config import shape_from_config, shape_to_config
from deepspec.drafters.vocabulary import choose_ids, count_tokens, coverage, narrowed, stored_ids, widened
from deepspec.errors import InputRefused
from deepspec.export.engines import verdicts
from deepspec.objective import drafter_loss, window_weights
from deepspec.training.metrics import objective_row

IDS = tuple(range(0, 61, 2))


def terms(implementation: str, labels: str, **changes: Any) -> Any:
    of = shape(draft_ids=IDS, **changes)
    model = drafter(of, torch.float64)
    batch = pack(of, DOCUMENTS, dtype=torch.float64, supervised=15)
    objective = ObjectiveConfig(implementation=implementation, ce_labels=labels, ce_weight=0.7, tv_weight=0.3)
    denominators = window_weights(batch.blocks, objective, of.draft_length)
    found = drafter_loss(model(batch), batch, model.shared, objective, denominators, of)
    grads = torch.autograd.grad(found.loss, list(model.parameters()))
    return found, dict(zip(dict(model.named_parameters()), grads, strict=True)), model, batch


@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize("changes", [{}, {"head": "none"}, {"final_logit_softcap": 5.0}], ids=str)
def test_chunks_equal_the_reference(labels: str, changes: dict[str, Any]) -> None:
    (one, grads, _, _), (two, others, _, _) = (terms(name, labels, **changes) for name in ("eager", "chunked"))
    torch.testing.assert_close(two.loss, one.loss)
    for name, value in one.sums.items():
        torch.testing.assert_close(two.sums[name], value, msg=name)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_losses_are_those_of_the_smaller_lm_head() -> None:
    """Worked out on the 31 logits an engine would make: cross-entropy of labels inside, L1 to the whole mass."""
    found, grads, model, batch = terms("chunked", "data")
    output, blocks, ids = model(batch), batch.blocks, torch.tensor(IDS)
    logits = output.hidden @ model.shared.lm_head.double()[ids].T + output.transition @ output.output_factor[ids].T
    target = torch.softmax(batch.last_hidden[blocks.target_rows] @ model.shared.lm_head.double().T, dim=-1)
    draft = torch.softmax(logits, dim=-1)
    weights = torch.exp(-torch.arange(4) / 4.0) * blocks.mask
    outside = 1.0 - target[..., ids].sum(-1)
    l1 = (draft - target[..., ids]).abs().sum(-1) + outside
    torch.testing.assert_close(found.sums["loss_tv"], (l1 * weights).sum())
    known = torch.isin(blocks.label_ids, ids)
    places = torch.searchsorted(ids, blocks.label_ids).clamp(max=len(ids) - 1)
    ce = -draft.log().gather(-1, places[..., None])[..., 0]
    torch.testing.assert_close(found.sums["loss_ce"], (torch.where(known, ce, 0.0) * weights).sum())
    rate = found.sums["acceptance_rate"] / found.sums["acceptance_rate_count"]
    inside = ((1.0 - outside) * blocks.mask).sum(0) / blocks.mask.sum(0)
    assert bool((rate <= inside + 1e-12).all()), "the target's mass inside is a ceiling"
    row = objective_row({name: value.reshape(-1).tolist() for name, value in found.sums.items()}, ObjectiveConfig())
    assert row["draft_vocab_coverage"] == pytest.approx(float((known & blocks.mask).sum() / blocks.mask.sum()))
    idle = [token for token in range(61) if token not in IDS]
    assert not grads["markov_head.markov_w2.weight"][idle].any() and grads["markov_head.markov_w2.weight"].any()


def test_what_is_never_proposed_has_no_chance() -> None:
    model = drafter(shape(draft_ids=IDS))
    probs = torch.softmax(model.base_logits(torch.randn(3, 32)), dim=-1)
    idle = [token for token in range(61) if token not in IDS]
    assert not probs[:, idle].any() and torch.allclose(probs.sum(-1), torch.ones(3))


def test_the_most_frequent_tokens_are_chosen() -> None:
    ids = torch.tensor([5, 5, 3, 7, 5, 3, 2])
    counts = count_tokens([(ids, torch.ones(7, dtype=torch.bool)), (ids, ids == 7)], 10)
    assert counts.tolist() == [0, 0, 1, 2, 0, 3, 0, 2, 0, 0]
    assert choose_ids(counts, 2) == (3, 5) and choose_ids(counts, 2, always=[9]) == (5, 9)
    assert choose_ids(counts, 7) == (0, 1, 2, 3, 4, 5, 7), "filled up with the smallest ids where too few were seen"
    assert coverage(counts, (3, 5)) == 5 / 8 and coverage(torch.zeros(10), (1,)) is None


def test_files_map_draft_ids_and_come_back() -> None:
    of = shape(draft_ids=(1, 4, 6), vocab_size=9)
    tensors = {"lm_head.weight": torch.randn(9, 2), "markov_head.markov_w2.weight": torch.randn(9, 3),
               "embed_tokens.weight": torch.randn(9, 2)}
    small = narrowed(tensors, of)
    assert small["d2t"].tolist() == [1, 3, 4] and small["t2d"].nonzero().flatten().tolist() == [1, 4, 6]
    assert small["lm_head.weight"].shape == (3, 2) and small["embed_tokens.weight"].shape == (9, 2)
    assert stored_ids(small, "f") == of.draft_ids and stored_ids(tensors, "f") is None
    again = widened(small, (1, 4, 6), 9)
    assert torch.equal(again["lm_head.weight"][[1, 4, 6]], tensors["lm_head.weight"][[1, 4, 6]])
    assert not again["lm_head.weight"][[0, 2, 3, 5, 7, 8]].any() and "d2t" not in again
    with pytest.raises(InputRefused, match="d2t"):
        stored_ids({"d2t": torch.tensor([1, 0])}, "f")


def test_the_config_keeps_the_ids_and_asks_for_them() -> None:
    of = shape(draft_ids=IDS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config = json.loads(json.dumps(shape_to_config(of, num_anchors=4)))
    assert shape_from_config(config) == of and config["draft_vocab_size"] == len(IDS)
    del config["deepspec_draft_ids"]
    assert shape_from_config(config, IDS) == of
    for ids in (None, IDS[:-1]):
        with pytest.raises(InputRefused, match="draft_vocab_size=31 of 61"):
            shape_from_config(config, ids)
    loads = {entry.engine for entry in verdicts(config) if entry.loads}
    assert loads == {"vllm", "llama_cpp"}
    assert shape_from_config(shape_to_config(replace(of, draft_ids=None), num_anchors=4)).draft_ids is None
