"""Kernels of the objective against float64 autograd. Run by test_kernels.py, interpreted where there is no GPU."""

import dataclasses
from typing import Any, Optional

import pytest
import torch
from drafter_cases import shape
from test_objective import case, close, run
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import TrainingBatch
from deepspec.drafters.types import DrafterOutput, SharedWeights
from deepspec.kernels import slot_loss
from deepspec.objective import Denominators, drafter_loss, losses, window_weights
from deepspec.objective.chunked import ChunkedPass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Parts = tuple[DrafterOutput, TrainingBatch, SharedWeights]


def moved(value: Any, dtype: Optional[torch.dtype] = None) -> Any:
    """``value`` on the device under test, floating tensors in ``dtype``; leaves that need a gradient stay leaves."""
    if isinstance(value, Tensor):
        found = value.detach().to(DEVICE, dtype if value.is_floating_point() else None)
        return found.requires_grad_(value.requires_grad)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: moved(getattr(value, name), dtype) for name in names})
    return value


def both(of: Any, parts: Parts, relative: float, **changes: Any) -> None:
    """The Triton implementation against the eager one in float64, values and gradients."""
    ours, grads = run(of, tuple(moved(part) for part in parts), "triton", **changes)
    expected, expected_grads = run(of, tuple(moved(part, torch.float64) for part in parts), "eager")
    close(ours.loss, expected.loss, relative)
    for found, reference in zip(grads, expected_grads, strict=True):
        close(found, reference, relative)
    for name, value in expected.sums.items():
        torch.testing.assert_close(ours.sums[name], value, rtol=relative, atol=relative)


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equals_eager_in_float64(head: str, softcap: Optional[float]) -> None:
    of = shape(head=head, vocab_size=2203, block_size=3, final_logit_softcap=softcap)
    both(of, case(of, 3), 1e-5, chunk_megabytes=1)


def test_at_the_largest_vocabulary_no_further_from_float64_than_eager_is() -> None:
    """Where p and the target are equal to 7 digits, float32 decides the sign: no implementation reaches 1e-5 here."""
    of = shape(vocab_size=151936, block_size=2)
    parts = case(of, 2)
    expected, exact = run(of, tuple(moved(part, torch.float64) for part in parts), "eager")
    ours, grads = run(of, tuple(moved(part) for part in parts), "triton")
    _, eager = run(of, tuple(moved(part) for part in parts), "eager")
    close(ours.loss, expected.loss, 1e-5)
    for found, single, reference in zip(grads, eager, exact, strict=True):
        error = (single.double() - reference).abs().max() / reference.abs().max()
        close(found, reference, max(1e-5, error.item()))


def test_half_precision_inputs() -> None:
    of = shape(vocab_size=997, block_size=3)
    parts = case(of, 4, dtype=torch.bfloat16)
    ours, grads = run(of, tuple(moved(part) for part in parts), "triton")
    expected, expected_grads = run(of, tuple(moved(part, torch.float64) for part in parts), "eager")
    assert ours.loss.dtype == torch.float32
    close(ours.loss, expected.loss, 1e-5)
    for found, reference in zip(grads, expected_grads, strict=True):
        assert found.dtype == torch.bfloat16
        close(found, reference, 1e-2)  # rounded to bfloat16 in the end


def test_backward_takes_any_upstream_gradient() -> None:
    of = shape(vocab_size=97, block_size=3)
    found = {}
    for implementation in ("triton", "eager"):
        output, batch, shared = (moved(part) for part in case(of, 5))
        objective = ObjectiveConfig(implementation=implementation)
        weights = window_weights(batch.blocks, objective, of.draft_length)
        loss = drafter_loss(output, batch, shared, objective, weights, of).loss
        loss.backward(torch.tensor(-0.37, device=DEVICE))
        found[implementation] = output.hidden.grad, output.output_factor.grad
    for ours, reference in zip(found["triton"], found["eager"], strict=True):
        close(ours, reference, 1e-5)


def test_numeric_gradient() -> None:
    of = shape(head="gated", vocab_size=5, hidden_size=2, target_hidden_size=2, markov_rank=1, block_size=2,
               final_logit_softcap=4.0)
    output, batch, shared = (moved(part) for part in case(of, 2, dtype=torch.float64))
    objective = ObjectiveConfig(implementation="triton", confidence_weight=0.0)
    denominators = Denominators(1.0, 1.0, 1.0)

    def loss(*leaves: Tensor) -> Tensor:
        return drafter_loss(DrafterOutput(*leaves, None), batch, shared, objective, denominators, of).loss

    assert batch.blocks.mask.any()
    assert gradcheck(loss, (output.hidden, output.transition, output.output_factor), eps=1e-6, atol=1e-6)


@dataclasses.dataclass
class Rows:
    """Arguments of the kernel for m slots, q = 2 target rows, g = 2 biases."""

    draft: Tensor
    bias: Tensor
    target: Tensor
    labels: Tensor
    ce_scales: Tensor
    tv_scales: Tensor
    bias_of: Tensor
    target_of: Tensor


def rows(vocab: int, dtype: torch.dtype = torch.float32, slots: int = 3, with_bias: bool = True) -> Rows:
    generator = torch.Generator().manual_seed(vocab)

    def normal(count: int) -> Tensor:
        return (torch.randn(count, vocab, generator=generator) * 3.0).to(DEVICE, dtype)

    index = torch.arange(slots, device=DEVICE)
    labels = torch.randint(0, vocab, (slots,), generator=generator)
    labels[0], labels[-1] = 0, vocab - 1
    scales = torch.rand(2, slots, generator=generator).to(DEVICE) + 0.1
    return Rows(normal(slots), normal(2 if with_bias else 0), normal(2), labels.to(DEVICE), scales[0], scales[1],
                index % 2, (index + 1) % 2)


def run_kernel(of: Rows, differentiate: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """ce, l1, gradient (or the untouched logits); the inputs stay."""
    draft = of.draft.clone()
    exact = torch.float64 if draft.dtype == torch.float64 else torch.float32
    ce, l1 = (torch.full((len(draft),), -1.0, dtype=exact, device=DEVICE) for _ in range(2))
    slot_loss.slot_losses_(
        draft, of.bias, of.bias_of, of.target, of.target_of, slot_loss.row_statistics(of.target), of.labels,
        of.ce_scales.to(exact), of.tv_scales.to(exact), ce, l1, differentiate,
    )
    return ce, l1, draft


def reference(of: Rows) -> tuple[Tensor, Tensor, Tensor]:
    draft = of.draft.double().requires_grad_()
    logits = draft + of.bias.double()[of.bias_of] if len(of.bias) else draft
    target = torch.softmax(of.target.double(), dim=-1)[of.target_of]
    ce = functional.cross_entropy(logits, of.labels, reduction="none")
    l1 = (torch.softmax(logits, dim=-1) - target).abs().sum(dim=-1)
    grad, = torch.autograd.grad((ce * of.ce_scales + l1 * of.tv_scales).sum(), draft)
    return ce.detach(), l1.detach(), grad


@pytest.mark.parametrize("vocab", [1, 2, 97, 2048, 2049, 5000, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    of = rows(vocab, dtype, slots=1 if vocab == 151936 else 3, with_bias=vocab != 5000)
    (ce, l1, grad), (ce_expected, l1_expected, grad_expected) = run_kernel(of), reference(of)
    assert grad.dtype == dtype and ce.dtype == torch.float32
    torch.testing.assert_close(ce.double(), ce_expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(l1.double(), l1_expected, rtol=1e-5, atol=1e-6)
    if dtype == torch.float32:
        torch.testing.assert_close(grad.double(), grad_expected, rtol=1e-4, atol=1e-6)
    else:  # to 8 bits: a device rounds, the interpreter cuts off
        relative = 2**-8 if DEVICE == "cuda" else 2**-7
        torch.testing.assert_close(grad.double(), grad_expected, rtol=relative, atol=1e-6)


def test_without_gradient_the_logits_stay() -> None:
    of = rows(97)
    with_gradient, without = run_kernel(of), run_kernel(of, differentiate=False)
    assert torch.equal(with_gradient[0], without[0]) and torch.equal(with_gradient[1], without[1])
    assert torch.equal(without[2], of.draft) and not torch.equal(with_gradient[2], of.draft)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_of_weight_zero_give_exact_zeros_whatever_they_hold(value: float) -> None:
    of = rows(97, slots=4)
    clean = run_kernel(of)
    of.draft[1, 5] = value
    of.draft[2] = value
    for scales in (of.ce_scales, of.tv_scales):
        scales[1:3] = 0.0
    ce, l1, grad = run_kernel(of)
    assert torch.count_nonzero(grad[1:3]) == 0 and not grad[1:3].isnan().any()
    for found, before in zip((ce, l1, grad), clean, strict=True):  # the neighbours do not notice
        assert torch.equal(found[[0, 3]], before[[0, 3]])


def test_a_row_of_weight_zero_is_still_measured() -> None:
    """The confidence label needs the L1 of slots whose loss has no weight."""
    of = rows(97)
    expected = run_kernel(of)
    of.ce_scales[:], of.tv_scales[:] = 0.0, 0.0
    ce, l1, grad = run_kernel(of)
    assert torch.equal(ce, expected[0]) and torch.equal(l1, expected[1]) and torch.count_nonzero(grad) == 0


def test_what_is_not_finite_is_not_hidden_where_it_has_weight() -> None:
    of = rows(97)
    of.draft[1, 5] = float("nan")
    ce, l1, grad = run_kernel(of)
    assert ce[1].isnan() and l1[1].isnan() and grad[1].isnan().any()
    assert ce[[0, 2]].isfinite().all() and grad[[0, 2]].isfinite().all()


def test_equal_distributions_have_no_distance_and_no_gradient_of_it() -> None:
    of = rows(5000, with_bias=False)
    of.draft = of.target[of.target_of].clone()
    of.ce_scales[:] = 0.0
    _, l1, grad = run_kernel(of)
    assert torch.count_nonzero(l1) == 0 and torch.count_nonzero(grad) == 0


def test_extreme_logits() -> None:
    of = rows(4100, with_bias=False)
    of.draft[0], of.target[1] = -200.0, -200.0
    of.draft[0, 4099], of.target[1, 3] = 200.0, 200.0  # disjoint: L1 = 2
    of.labels[1] = 4000
    of.draft[1, :2048] = float("-inf")  # a whole block of the vocabulary that cannot be drawn
    (ce, l1, grad), (ce_expected, l1_expected, _) = run_kernel(of), reference(of)
    assert l1[0].item() == 2.0 and grad[0].isfinite().all()
    torch.testing.assert_close(l1.double(), l1_expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ce.double()[1:], ce_expected[1:], rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(grad[1, :2048]) == 0 and grad[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softcap_and_its_slope(dtype: torch.dtype) -> None:
    logits = torch.linspace(-400.0, 400.0, 5 * 331, dtype=dtype, device=DEVICE).view(5, 331).clone()
    wide = logits.double().clone()
    slope = torch.full((2, 331), -1.0, dtype=dtype, device=DEVICE)
    slot_loss.softcap_(logits, slope, 30.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(logits.double(), 30.0 * torch.tanh(wide / 30.0), **tolerance)
    torch.testing.assert_close(slope.double(), 1.0 / torch.cosh(wide[:2] / 30.0) ** 2, **tolerance)


def test_auto_is_chunked_on_a_cpu_even_where_kernels_could_be_interpreted() -> None:
    assert losses._chunked_pass("auto", torch.device("cpu")) is ChunkedPass
    assert losses._chunked_pass("triton", torch.device(DEVICE)) is not ChunkedPass
