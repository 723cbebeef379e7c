"""The objective: equations, eager against chunked, and the contract of the sums."""

import dataclasses
import math
from typing import Any, Optional

import pytest
import torch
from drafter_cases import DOCUMENTS, drafter, pack, shape
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import TrainingBatch
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights
from deepspec.errors import ConfigError
from deepspec.objective import (
    Denominators, LossTerms, acceptance_rate, chunked, confidence_loss, cross_entropy_loss, drafter_loss,
    position_weights, total_variation_loss, window_weights,
)


def case(
    of: DrafterShape, count: int, *, dtype: torch.dtype = torch.float32, weight_dtype: Optional[torch.dtype] = None,
    scale: float = 1.0,
) -> tuple[DrafterOutput, TrainingBatch, SharedWeights]:
    """Random results of a drafter for ``count`` blocks of a 60-token document whose last ten are unsupervised."""
    torch.manual_seed(1)
    batch = pack(of, [(60, [int(anchor) for anchor in torch.randint(0, 59, (count,))])], supervised=50, dtype=dtype)
    gap = torch.rand(count) < 0.2  # some blocks have no supervised slot at all
    batch = dataclasses.replace(batch, blocks=dataclasses.replace(batch.blocks, mask=batch.blocks.mask & ~gap[:, None]))

    def leaf(*size: int) -> Tensor:
        return (torch.randn(*size) * scale).to(dtype).requires_grad_()

    with_head = of.head != "none"
    table = leaf(of.vocab_size, of.markov_rank) if with_head else None
    transition = None
    if of.head == "vanilla":
        transition = table[batch.blocks.previous_ids].detach().requires_grad_()
    elif with_head:
        transition = leaf(count, of.draft_length, of.markov_rank)
    output = DrafterOutput(
        hidden=leaf(count, of.draft_length, of.hidden_size), transition=transition,
        output_factor=leaf(of.vocab_size, of.markov_rank) if with_head else None,
        confidence_logits=leaf(count, of.draft_length) if of.confidence_head else None,
    )
    lm_head = (torch.randn(of.vocab_size, of.hidden_size) * 0.4).to(weight_dtype or dtype)
    return output, batch, SharedWeights(lm_head, lm_head, "test")


def run(
    of: DrafterShape, parts: tuple[DrafterOutput, TrainingBatch, SharedWeights], implementation: str, **changes: Any,
) -> tuple[LossTerms, list[Tensor]]:
    output, batch, shared = parts
    objective = ObjectiveConfig(implementation=implementation, **changes)
    terms = drafter_loss(output, batch, shared, objective, window_weights(batch.blocks, objective, of.draft_length), of)
    leaves = [getattr(output, field.name) for field in dataclasses.fields(output)]
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    grads = torch.autograd.grad(terms.loss * 3.7, leaves)
    if output.transition is not None and of.head == "vanilla":
        # The chunked pass gives a token's whole gradient to one of its slots: compare what reaches W_1.
        index = [leaf is output.transition for leaf in leaves].index(True)
        table = torch.zeros(of.vocab_size, of.markov_rank, dtype=grads[index].dtype)
        flat = batch.blocks.previous_ids.flatten()
        grads = list(grads)
        grads[index] = table.index_add(0, flat, grads[index].flatten(0, 1))
    return terms, list(grads)


def close(ours: Tensor, reference: Tensor, relative: float) -> None:
    scale = reference.double().abs().max().clamp_min(1e-12)
    assert ((ours.double() - reference.double()).abs().max() / scale).item() < relative


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_chunked_equals_eager_in_value_and_gradient(head: str, softcap: Optional[float]) -> None:
    of = shape(head=head, vocab_size=1003, block_size=7, final_logit_softcap=softcap)
    parts = case(of, 41)
    expected, expected_grads = run(of, parts, "eager")
    for megabytes in (1, 256):
        found, grads = run(of, parts, "chunked", chunk_megabytes=megabytes)
        close(found.loss, expected.loss, 1e-6)
        for ours, reference in zip(grads, expected_grads, strict=True):
            close(ours, reference, 1e-5)
        assert set(found.sums) == set(expected.sums)
        for name, value in expected.sums.items():
            torch.testing.assert_close(found.sums[name], value, rtol=1e-5, atol=1e-5)
            assert found.sums[name].dtype == torch.float64


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_inputs_are_worked_on_in_float32(weight_dtype: torch.dtype) -> None:
    of = shape(vocab_size=1003, block_size=7)
    output, batch, shared = case(of, 41, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    found, grads = run(of, (output, batch, shared), "chunked", chunk_megabytes=1)
    names = [field.name for field in dataclasses.fields(output) if isinstance(getattr(output, field.name), Tensor)]
    wide = DrafterOutput(**{name: getattr(output, name).detach().float().requires_grad_() for name in names})
    wide_batch = dataclasses.replace(batch, last_hidden=batch.last_hidden.float())
    wide_shared = SharedWeights(shared.embed.float(), shared.lm_head.float(), "test")
    expected, expected_grads = run(of, (wide, wide_batch, wide_shared), "eager")
    assert found.loss.dtype == torch.float32
    close(found.loss, expected.loss, 1e-5)
    for ours, reference in zip(grads, expected_grads, strict=True):
        assert ours.dtype == torch.bfloat16
        close(ours, reference, 1e-2)  # the gradients themselves are returned in bfloat16


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("head", ["none", "rnn"])
def test_numeric_gradient(implementation: str, head: str) -> None:
    of = shape(head=head, vocab_size=11, hidden_size=5, target_hidden_size=5, markov_rank=3 if head == "rnn" else 0,
               block_size=3, final_logit_softcap=4.0)
    output, batch, shared = case(of, 4, dtype=torch.float64)
    objective = ObjectiveConfig(implementation=implementation, confidence_weight=0.0)
    denominators = window_weights(batch.blocks, objective, of.draft_length)

    def loss(*leaves: Tensor) -> Tensor:
        inner = DrafterOutput(leaves[0], *(leaves[1:] if head == "rnn" else (None, None)), None)
        return drafter_loss(inner, batch, shared, objective, denominators, of).loss

    leaves = (output.hidden,) if head == "none" else (output.hidden, output.transition, output.output_factor)
    assert gradcheck(loss, leaves, eps=1e-6, atol=1e-6)


def test_equations_by_hand() -> None:
    draft, target = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.7, 0.3]])
    assert acceptance_rate(draft, target).item() == pytest.approx(0.8)
    weights = torch.tensor([2.0])
    assert total_variation_loss(draft, target, weights).item() == pytest.approx(0.8)
    assert cross_entropy_loss(draft.log(), torch.tensor([1]), weights).item() == pytest.approx(2 * math.log(2))
    logits, rate = torch.tensor([0.3]), torch.tensor([0.8])
    by_hand = -2 * (0.8 * math.log(torch.sigmoid(logits)) + 0.2 * math.log(1 - torch.sigmoid(logits)))
    assert confidence_loss(logits, rate, weights).item() == pytest.approx(by_hand, rel=1e-6)


def test_decay_null_is_the_draft_length() -> None:
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])
    assert torch.equal(position_weights(7, None), position_weights(7, 7.0))


def test_loss_is_the_weighted_mean_of_equation_12() -> None:
    of = shape(vocab_size=101)
    output, batch, shared = case(of, 12)
    terms, _ = run(of, (output, batch, shared), "chunked", ce_weight=0.1, tv_weight=0.9, confidence_weight=1.0)
    sums = terms.sums
    expected = (
        0.1 * sums["loss_ce"] / sums["weight_ce"] + 0.9 * sums["loss_tv"] / sums["weight_tv"]
        + sums["loss_confidence"] / sums["weight_confidence"]
    )
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    weights = batch.blocks.mask * torch.exp(-torch.arange(of.draft_length) / 4.0)
    assert sums["weight_ce"].item() == pytest.approx(weights.sum().item(), rel=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_shares_of_a_window_add_up_whatever_the_split(implementation: str) -> None:
    of = shape(head="gated", vocab_size=101)
    output, batch, shared = case(of, 12)
    objective = ObjectiveConfig(implementation=implementation)
    denominators = window_weights(batch.blocks, objective, of.draft_length)
    whole = drafter_loss(output, batch, shared, objective, denominators, of)
    total, shares = 0.0, {}
    for part in (slice(0, 1), slice(1, 8), slice(8, 12)):
        blocks = type(batch.blocks)(**{
            field.name: getattr(batch.blocks, field.name)[part] for field in dataclasses.fields(batch.blocks)
        })
        cut = DrafterOutput(output.hidden[part], output.transition[part], output.output_factor,
                            output.confidence_logits[part])
        terms = drafter_loss(cut, dataclasses.replace(batch, blocks=blocks), shared, objective, denominators, of)
        total = total + terms.loss
        shares = {name: value + shares.get(name, 0.0) for name, value in terms.sums.items()}
    torch.testing.assert_close(total, whole.loss, rtol=1e-5, atol=0.0)
    for name, value in whole.sums.items():
        torch.testing.assert_close(shares[name], value, rtol=1e-5, atol=1e-8)
    for leaf in (output.hidden, output.output_factor):
        ours, = torch.autograd.grad(total, leaf, retain_graph=True)
        reference, = torch.autograd.grad(whole.loss, leaf, retain_graph=True)
        close(ours, reference, 1e-5)


def test_unsupervised_slots_have_exactly_no_gradient() -> None:
    of = shape(head="gated", vocab_size=101)
    output, batch, shared = case(of, 20)
    assert not batch.blocks.mask.all()
    _, grads = run(of, (output, batch, shared), "chunked")
    for grad in (grads[0], grads[1], grads[3]):
        assert torch.count_nonzero(grad[~batch.blocks.mask]) == 0
        assert torch.count_nonzero(grad[batch.blocks.mask]) > 0


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_extreme_logits_stay_finite_and_labels_stay_probabilities(implementation: str) -> None:
    """Identical and disjoint distributions, logits of +-40."""
    of = shape(head="none", vocab_size=40, hidden_size=40, target_hidden_size=40, block_size=3)
    batch = pack(of, [(12, [1, 2, 5])])
    eye = torch.eye(40)
    for offset, rate in ((0, 1.0), (1, 0.0)):
        rows = batch.blocks.target_rows
        last = torch.full((12, 40), -40.0)
        last[torch.arange(12), torch.arange(12)] = 40.0
        hidden = torch.full((*rows.shape, 40), -40.0)
        hidden.scatter_(2, (rows[..., None] + offset) % 40, 40.0)
        hidden.requires_grad_()
        logits = torch.tensor([40.0, -40.0, 0.0]).expand(3, 3).clone().requires_grad_()
        parts = DrafterOutput(hidden, None, None, logits), dataclasses.replace(batch, last_hidden=last)
        terms, grads = run(of, (*parts, SharedWeights(eye, eye, "")), implementation)
        assert math.isfinite(terms.loss.item()) and all(grad.isfinite().all() for grad in grads)
        found = terms.sums["acceptance_rate"] / terms.sums["acceptance_rate_count"]
        assert torch.all((found - rate).abs() < 1e-6) and torch.all((found >= 0) & (found <= 1))


def test_acceptance_rate_is_clamped() -> None:
    probs = torch.tensor([1.0000002, 0.0])
    assert acceptance_rate(probs, torch.tensor([0.0, 1.0000002])).item() == 0.0
    assert acceptance_rate(probs, probs).item() == 1.0


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_without_blocks_loss_and_gradients_are_exactly_zero(implementation: str) -> None:
    of = shape()
    model = drafter(of)
    batch = pack(of, [(8, ()), (5, ())])
    objective = ObjectiveConfig(implementation=implementation)
    terms = drafter_loss(model(batch), batch, model.shared, objective, Denominators(0.0, 0.0, 0.0), of)
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.count_nonzero(parameter.grad) == 0, name


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("weights", [(0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
def test_every_parameter_gets_a_gradient_whatever_is_switched_off(head: str, weights: tuple[float, ...]) -> None:
    """Parameters without a gradient in a step get zeros."""
    of = shape(head=head)
    model = drafter(of, confidence_detach=True)
    batch = pack(of, DOCUMENTS)
    objective = ObjectiveConfig(ce_weight=weights[0], tv_weight=weights[1], confidence_weight=weights[2])
    drafter_loss(
        model(batch), batch, model.shared, objective, window_weights(batch.blocks, objective, of.draft_length), of,
    ).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("detach", [False, True])
def test_confidence_term_reaches_the_backbone_only_if_asked(detach: bool) -> None:
    """Whether the confidence loss reaches the backbone is an option."""
    of = shape()
    model = drafter(of, confidence_detach=detach)
    batch = pack(of, DOCUMENTS)
    objective = ObjectiveConfig(ce_weight=0.0, tv_weight=0.0)
    terms = drafter_loss(
        model(batch), batch, model.shared, objective, window_weights(batch.blocks, objective, of.draft_length), of,
    )
    terms.loss.backward()
    for name, parameter in model.named_parameters():
        touched = torch.count_nonzero(parameter.grad).item() > 0
        if name.startswith("confidence_head."):
            assert touched
        elif name != "markov_head.markov_w2.weight":
            assert touched != detach, name


def test_validation_needs_no_gradient() -> None:
    of = shape(vocab_size=101)
    parts = case(of, 6)
    expected, _ = run(of, parts, "chunked")
    with torch.no_grad():
        objective = ObjectiveConfig()
        found = drafter_loss(*parts, objective, window_weights(parts[1].blocks, objective, of.draft_length), of)
    assert found.loss.item() == expected.loss.item() and not found.loss.requires_grad


def test_metrics_by_hand() -> None:
    of = shape(head="none", vocab_size=13)
    output, batch, shared = case(of, 5)
    terms, _ = run(of, (output, batch, shared), "chunked")
    draft = torch.softmax(functional.linear(output.hidden, shared.lm_head), -1)
    target = torch.softmax(functional.linear(batch.last_hidden[batch.blocks.target_rows], shared.lm_head), -1)
    rate = (1 - 0.5 * (draft - target).abs().sum(-1)) * batch.blocks.mask
    length = sum(
        1 + sum(math.prod(block[:k + 1]) for k in range(len(block)))
        for block, mask in zip(rate.tolist(), batch.blocks.mask.tolist(), strict=True) if any(mask)
    )
    assert terms.sums["acceptance_length_proxy"].item() == pytest.approx(length, rel=1e-5)
    assert terms.sums["acceptance_length_proxy_count"].item() == batch.blocks.mask.any(1).sum().item()
    torch.testing.assert_close(terms.sums["acceptance_rate"].float(), rate.sum(0), rtol=1e-5, atol=1e-6)


def test_unknown_implementation_is_refused() -> None:
    of = shape(vocab_size=13)
    with pytest.raises(ConfigError, match="objective.implementation"):
        run(of, case(of, 2), "fused")


@pytest.mark.parametrize("head", ["none", "vanilla", "rnn"])
def test_memory_is_bounded_by_the_chunk_not_by_the_anchors(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory follows the chunk, not the number of anchors."""
    of = shape(head=head, vocab_size=30011, block_size=7)
    taken: list[int] = []
    plain = chunked.ChunkedPass._buffer

    def buffer(self: Any, rows: int) -> Tensor:
        taken.append(rows * self.vocab * 4)
        return plain(self, rows)

    monkeypatch.setattr(chunked.ChunkedPass, "_buffer", buffer)
    for count in (10, 60):
        taken.clear()
        run(of, case(of, count), "chunked", chunk_megabytes=2)
        assert sum(taken) <= (2 << 20) + chunked.TILE_BYTES["cpu"] * torch.get_num_threads()
