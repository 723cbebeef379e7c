"""The gradient is that of the weighted mean over the window, however the window is cut, at every ZeRO stage."""

import dataclasses
import math

import pytest
import torch
from tiny_training import SHAPE, TinySource, shared_weights, tiny_config, tiny_drafter

from deepspec.data.collate import collate
from deepspec.objective import Denominators, drafter_loss, window_weights
from deepspec.training.engine import initialize, named_trainable
from deepspec.training.metrics import objective_row
from deepspec.training.module import TrainingModule
from deepspec.training.packs import Packer, never_empty, stand_in
from deepspec.training.step import accumulate, prime, total_weights


def reference(source, indices, config):
    """Gradient and loss of the whole window in one pack, by plain autograd in double precision."""
    trainer, objective = config.trainer, dataclasses.replace(config.objective, implementation="eager")
    drafter = tiny_drafter().double()
    shared = dataclasses.replace(shared_weights(), embed=shared_weights().embed.double(),
                                 lm_head=shared_weights().lm_head.double())
    drafter.shared = shared
    batch = collate(source.get(indices), num_anchors=trainer.num_anchors, draft_length=SHAPE.draft_length,
                    seed=config.run.seed, epoch=0)
    batch = dataclasses.replace(batch, features=batch.features.double(), last_hidden=batch.last_hidden.double())
    weights = window_weights(batch.blocks, objective, SHAPE.draft_length)
    terms = drafter_loss(drafter(batch), batch, shared, objective, weights, SHAPE)
    terms.loss.backward()
    return {name: p.grad for name, p in drafter.named_parameters()}, float(terms.loss.detach())


def window_gradient(source, indices, config):
    """Gradient that the engine is about to use, and the logged row, of one window."""
    from deepspeed.utils import safe_get_full_grad

    packer = Packer(source, SHAPE, config.trainer, config.objective, seed=config.run.seed)
    module = TrainingModule(tiny_drafter(), config.objective)
    engine = initialize(module, config.trainer, config.optimizer, config.engine)
    prime(engine, SHAPE)
    window = packer.window(indices, 0)
    sums, _, _ = accumulate(engine, packer.packs(window), len(window.steps), total_weights(packer, window))
    gradients = {name: safe_get_full_grad(p).clone() for name, p in named_trainable(engine)}
    return gradients, objective_row(sums.reduce()[0], config.objective)


def assert_same(found, expected):
    """Within 1e-6 of the double-precision gradient; single tensors may round a little worse than the whole."""
    errors = {name: float((found[name].double() - gradient).norm()) for name, gradient in expected.items()}
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    assert math.hypot(*errors.values()) < 1e-6 * math.hypot(*norms.values())
    assert all(errors[name] <= 3e-6 * norms[name] for name in expected), errors


@pytest.fixture(scope="module")
def source():
    return TinySource(8)


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_does_not_depend_on_the_cut(tmp_path, source, stage, micro):
    config = tiny_config(tmp_path, global_batch_size=8, micro_batch_size=micro)
    config.engine.zero_stage = stage
    expected, loss = reference(source, list(range(8)), config)
    found, row = window_gradient(source, list(range(8)), config)
    assert_same(found, expected)
    assert row["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tail_window_and_samples_without_anchors(tmp_path, stage):
    source = TinySource(8, unsupervised=(1, 4))
    config = tiny_config(tmp_path, global_batch_size=8, micro_batch_size=1)
    config.engine.zero_stage = stage
    expected, loss = reference(source, [0, 1, 4, 6, 7], config)
    found, row = window_gradient(source, [0, 1, 4, 6, 7], config)
    assert_same(found, expected)
    assert row["loss"] == pytest.approx(loss, rel=1e-6)


def test_window_without_any_anchor_changes_nothing(tmp_path):
    source = TinySource(4, unsupervised=range(4))
    config = tiny_config(tmp_path)
    found, row = window_gradient(source, [0, 1, 2, 3], config)
    assert all(bool((gradient == 0).all()) for gradient in found.values())
    assert row["loss"] == 0.0 and row["acceptance_rate@1"] == 0.0


@pytest.mark.parametrize("head,confidence", [("none", False), ("vanilla", True), ("gated", True), ("rnn", False)])
def test_stand_in_gives_every_parameter_an_exact_zero(head, confidence):
    shape = dataclasses.replace(SHAPE, head=head, markov_rank=0 if head == "none" else 8, confidence_head=confidence,
                                confidence_with_markov=confidence)
    drafter = tiny_drafter(shape)
    loss, sums = TrainingModule(drafter, tiny_config("x").objective)(stand_in(shape), Denominators(3.0, 3.0, 3.0))
    loss.backward()
    assert float(loss.detach()) == 0.0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad == 0).all()), name
    assert all(float(value.abs().sum()) == 0.0 for value in sums.values())


def test_a_pack_is_never_empty():
    source = TinySource(3, unsupervised=(1,))
    batch = collate(source.get([1]), num_anchors=4, draft_length=4, seed=0, epoch=0)
    assert len(batch.blocks) == 0
    filled = never_empty(batch, 4)
    assert len(filled.blocks) == 1 and not filled.blocks.mask.any()
    full = collate(source.get([0]), num_anchors=4, draft_length=4, seed=0, epoch=0)
    assert never_empty(full, 4) is full


def test_a_bad_loss_poisons_every_gradient():
    drafter = tiny_drafter()
    module = TrainingModule(drafter, tiny_config("x").objective)
    batch = collate(TinySource(2, poison={0: float("nan")}).get([0]), num_anchors=2, draft_length=4, seed=0, epoch=0)
    module(batch, Denominators(1.0, 1.0, 1.0))[0].backward()
    assert not all(bool(torch.isfinite(p.grad).all()) for p in drafter.parameters())
