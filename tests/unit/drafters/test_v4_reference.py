"""The V4-style backbone against its arithmetic written out, in training and in drafting, and against one mistake each.
"""

from typing import Any

import pytest
import torch
from drafter_cases import pack
from torch import Tensor
from v4_cases import MUTANTS, Reference, v4_drafter, v4_shape

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.v4.drafter import V4Drafter

ANCHORS = (0, 1, 3, 5, 8, 14)  # without context, inside the first window, at its edge and beyond
DOCUMENT = ((19, ANCHORS),)


def batch_of(model: V4Drafter, documents: Any = DOCUMENT, **options: Any) -> TrainingBatch:
    dtype = options.pop("dtype", torch.float64)
    return pack(model.shape, documents, dtype=dtype, **options)


def expected(model: V4Drafter, batch: TrainingBatch, mutant: str = "") -> tuple[Tensor, Tensor]:
    """Draft logits [N, K, V] and confidence logits [N, K] of a pack of one document."""
    reference, found = Reference(model, mutant), []
    for index, anchor in enumerate(batch.blocks.anchor_positions.tolist()):
        hidden = reference.block(batch.features, batch.input_ids, anchor)
        found.append(reference.logits(hidden, batch.blocks.previous_ids[index]))
    return torch.stack([logits for logits, _ in found]), torch.stack([confidence for _, confidence in found])


def trained(model: V4Drafter, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    output = model(batch)
    assert output.transition is not None and output.output_factor is not None and output.confidence_logits is not None
    return model.head_logits(output.hidden) + output.transition @ output.output_factor.t(), output.confidence_logits


def drafted(model: V4Drafter, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """The same through cached rows, as the decoder drafts."""
    context = model.project_context(batch.features)
    keys, values = model.context_kv(context, batch.positions)
    blocks, count = batch.blocks, len(batch.blocks)
    wide = [part[:, None].expand(-1, count, -1, -1, -1) for part in (keys, values)]
    hidden = model.block_hidden(blocks.anchor_ids, blocks.anchor_positions, wide[0], wide[1], blocks.anchor_positions)
    confidence = model.confidence(hidden, blocks.previous_ids)
    assert confidence is not None
    return model.base_logits(hidden) + model.markov_head.transition_bias(blocks.previous_ids), confidence


@torch.no_grad()
@pytest.mark.parametrize("way", [trained, drafted])
def test_written_out(way: Any) -> None:
    model = v4_drafter()
    batch = batch_of(model)
    for found, wanted in zip(way(model, batch), expected(model, batch), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_shows(mutant: str) -> None:
    """Every mistake moves a logit by far more than the tolerance that the right arithmetic meets."""
    model = v4_drafter()
    batch = batch_of(model)
    logits, confidence = trained(model, batch)
    other, other_confidence = expected(model, batch, mutant)
    distance = max(float((logits - other).abs().max()), float((confidence - other_confidence).abs().max()))
    assert distance > 1e-3, distance


@torch.no_grad()
def test_half_precision_stays_close() -> None:
    model, exact = v4_drafter(torch.float32).cast(torch.bfloat16), v4_drafter()
    assert model.main_proj.weight.dtype == torch.bfloat16 and model.hc_head.fn.dtype == torch.float32
    assert model.gates[0].bias.dtype == torch.float32
    model.shared = exact.shared.__class__(model.shared.embed.bfloat16(), model.shared.lm_head.bfloat16(), "test")
    batch, wanted = batch_of(model, dtype=torch.bfloat16), trained(exact, batch_of(exact))[0]
    found = model.head_logits(model(batch).hidden).double() + (
        model(batch).transition.double() @ model.markov_head.markov_w2.weight.double().t())
    # Experts chosen by scores that nearly tie may differ, so a few slots may be far off.
    error = (found - wanted).flatten(0, 1).norm(dim=-1) / wanted.flatten(0, 1).norm(dim=-1)
    assert float(error.median()) < 0.05


def test_gradients() -> None:
    """Every parameter of the pass has the gradient that finite differences show, along a random direction."""
    model = v4_drafter()
    batch = batch_of(model, ((9, (0, 2, 6)),))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in trained(model, batch)]

    def value() -> Tensor:
        return sum(((part * weight).sum() for part, weight in zip(trained(model, batch), weights)), torch.zeros(()))

    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(value(), parameters)
    with torch.no_grad():
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            step = 1e-6 * direction
            parameter += step
            above = value()
            parameter -= 2 * step
            below = value()
            parameter += step
            slope = float((above - below) / 2e-6)
            wanted = float((gradient * direction).sum())
            assert abs(slope - wanted) <= 1e-5 * max(1.0, abs(wanted)), (name, slope, wanted)
            assert float(gradient.abs().max()) > 0.0, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_is_single(checkpointing: bool) -> None:
    """Documents packed together, in any order of anchors, give what each gives alone; loads add up."""
    model = v4_drafter(activation_checkpointing=checkpointing)
    documents = ((17, (9, 0, 3, 4, 15)), (1, ()), (9, (2, 7)), (23, (0, 21, 1)))
    whole = batch_of(model, documents)
    alone = [batch_of(model, (document,)) for document in documents if document[1]]
    together, single = model(whole), [model(batch) for batch in alone]
    for name in ("hidden", "transition", "confidence_logits"):
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(part, name) for part in single]))
    for name, value in together.sums.items():
        torch.testing.assert_close(value, torch.stack([part.sums[name] for part in single]).sum(dim=0))
    loss = together.hidden.square().sum() + together.confidence_logits.sum()
    parts = [part.hidden.square().sum() + part.confidence_logits.sum() for part in single]
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    wanted = torch.autograd.grad(torch.stack(parts).sum(), parameters, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = v4_drafter()
    batch = batch_of(model)
    whole = model(batch).hidden
    wanted = torch.autograd.grad(whole.square().sum(), list(model.layers.parameters()))
    monkeypatch.setattr("deepspec.drafters.v4.window.CHUNK_BYTES", {"cpu": 1})
    cut = model(batch).hidden
    torch.testing.assert_close(cut, whole)
    for one, other in zip(torch.autograd.grad(cut.square().sum(), list(model.layers.parameters())), wanted):
        torch.testing.assert_close(one, other)


def test_no_blocks_and_weightless_blocks() -> None:
    model = v4_drafter()
    empty = model(batch_of(model, ((5, ()),)))
    assert empty.hidden.shape == (0, 4, 32) and float(empty.sums["router_load"].sum()) == 0.0
    batch = batch_of(model, ((6, (2,)),), supervised=1)  # the anchor has no label
    assert float(model(batch).sums["router_load"].sum()) == 0.0


def test_without_confidence() -> None:
    model = v4_drafter(of=v4_shape(confidence_head=False, confidence_with_markov=False))
    assert model(batch_of(model)).confidence_logits is None
