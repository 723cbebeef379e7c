"""The drafter over its attention backends, windows and checkpointing: what matters, what is computed, what is kept."""

import dataclasses
from typing import Optional

import pytest
import torch
from drafter_cases import DOCUMENTS, SHAPE, drafter, loss_and_grads, pack, shape
from torch import Tensor

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.dspark import DSparkDrafter

HEADS = ("none", "vanilla", "gated", "rnn")


@pytest.mark.parametrize("window", [1, 3, 100, None])
@pytest.mark.parametrize("backend", ["chunked", "flex"])
def test_rows_outside_the_window_change_nothing(window: Optional[int], backend: str) -> None:
    """Exactly the last ``window`` tokens before the anchor matter, to both backends."""
    of = shape(sliding_window=window)
    model, batch = drafter(of), pack(of, ((17, ()), (23, (9,))))
    model.attention = backend
    features = batch.features.clone().requires_grad_()
    with torch.no_grad():
        reference = model(batch).hidden
        for row in range(40):
            changed = batch.features.clone()
            changed[row] += 1.0
            moved = (model(dataclasses.replace(batch, features=changed)).hidden - reference).abs().max() > 1e-4
            assert moved == (17 + max(0, 9 - (window or 100)) <= row < 17 + 9)
    if backend == "chunked":
        model(dataclasses.replace(batch, features=features)).hidden.sum().backward()
        touched = features.grad.abs().amax(dim=1) > 0
        assert touched.nonzero().flatten().tolist() == list(range(17 + max(0, 9 - (window or 100)), 26))


@pytest.mark.parametrize("head", HEADS)
def test_backends_give_one_model(head: str) -> None:
    of = shape(head=head, sliding_window=6)
    model, batch = drafter(of), pack(of, DOCUMENTS)
    with torch.no_grad():
        chunked = model(batch).hidden
        model.attention = "flex"
        torch.testing.assert_close(model(batch).hidden, chunked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_keys_and_values_are_computed_once_per_row(checkpointing: bool) -> None:
    """However many blocks share a context row; nothing is computed per anchor."""
    model = drafter(activation_checkpointing=checkpointing)
    batch = pack(SHAPE, ((30, tuple(range(28)) * 2),))
    rows: list[int] = []
    for layer in model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.register_forward_hook(lambda module, args, output: rows.append(args[0].numel() // 32))
    output = model(batch)
    assert rows == [30 + 56 * SHAPE.block_size] * 4
    output.hidden.sum().backward()
    assert len(rows) == (8 if checkpointing else 4)


def saved_bytes(model: DSparkDrafter, batch: TrainingBatch) -> int:
    """Bytes of distinct tensors, parameters aside, that a forward pass keeps for its backward."""
    kept = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    alive = []

    def save(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is used twice
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(batch)
    return sum(kept.values())


def test_checkpointing_saves_memory_and_nothing_grows_with_blocks_times_rows() -> None:
    of = shape(num_layers=4)
    few, many = (pack(of, ((size, tuple(range(size - 1))),)) for size in (100, 200))
    plain, saving = saved_bytes(drafter(of), few), saved_bytes(drafter(of, activation_checkpointing=True), few)
    assert saving < 0.45 * plain
    assert saved_bytes(drafter(of), many) < 2.1 * plain


@pytest.mark.parametrize("head", HEADS)
def test_checkpointing_changes_no_gradient(head: str) -> None:
    of = shape(head=head, sliding_window=7)
    batch = pack(of, DOCUMENTS)
    plain, saving = drafter(of), drafter(of, activation_checkpointing=True)
    for ours, reference in zip(
        loss_and_grads(saving, batch, batch)[1], loss_and_grads(plain, batch, batch)[1], strict=True,
    ):
        torch.testing.assert_close(ours, reference)
