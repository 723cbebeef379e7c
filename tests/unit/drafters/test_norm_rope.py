"""Norm and rotation: the passes that keep little for the backward against plain formulas."""

import pytest
import torch
from drafter_cases import SHAPE
from torch.autograd import gradcheck

from deepspec.drafters.norm import RMSNorm, _plain
from deepspec.drafters.rope import RotaryTable, rotate


def test_norm_equals_its_formula_forward_and_backward() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(9, 1e-6).double()
    with torch.no_grad():
        norm.weight.normal_()
    states = (torch.randn(3, 2, 9, dtype=torch.float64) * 4).requires_grad_()
    assert gradcheck(lambda states, weight: norm(states), (states, norm.weight))
    torch.testing.assert_close(norm(states), _plain(states, norm.weight, 1e-6), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_in_its_dtype(dtype: torch.dtype) -> None:
    """Statistics in float32; a row of zeros has finite gradients; strided input and gradient."""
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-6).to(dtype)
    states = torch.randn(16, 5).to(dtype).T.requires_grad_()
    found, expected = norm(states), _plain(states, norm.weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(16, 5).to(dtype).T
    for ours, reference in zip(torch.autograd.grad(found, (states, norm.weight), upstream),
                               torch.autograd.grad(expected, (states, norm.weight), upstream), strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    zeros = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
    assert torch.autograd.grad(norm(zeros).sum(), zeros)[0].isfinite().all()


def test_rotation_is_the_complex_one_and_its_gradient_turns_back() -> None:
    torch.manual_seed(0)
    table = RotaryTable(SHAPE)(torch.tensor([0, 3, 1000]))
    states = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    turned = rotate(states, table)
    angle = torch.complex(table[0][..., :4].double(), table[1][..., :4].double())
    expected = torch.complex(states[..., :4], states[..., 4:]) * angle
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))
    assert gradcheck(lambda states: rotate(states, table), (states,))
    half = states.detach().bfloat16()
    assert rotate(half, table).dtype == torch.bfloat16


def test_the_norms_gradient_takes_any_layout() -> None:
    """As attention with as many key heads as query heads hands it back: transposed, not to be viewed as rows."""
    norm = RMSNorm(8, 1e-6)
    states = torch.randn(3, 5, 2, 8, requires_grad=True)
    upstream = torch.randn(3, 2, 5, 8).transpose(1, 2)
    norm(states).backward(upstream)
    found = states.grad.clone(), norm.weight.grad.clone()
    states.grad = norm.weight.grad = None
    norm(states).backward(upstream.contiguous())
    assert torch.equal(found[0], states.grad) and torch.allclose(found[1], norm.weight.grad)
