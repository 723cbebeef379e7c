"""Experts on sorted rows, the router's choice and balance, in numbers small enough to do by hand."""

import math

import pytest
import torch
from v4_cases import v4_drafter, v4_shape

from deepspec.drafters.v4.experts import Experts, clamped_swiglu, grouped_product
from deepspec.drafters.v4.router import Router, expert_load, load_statistics, move_bias
from deepspec.drafters.v4.streams import sinkhorn


def experts(dtype: torch.dtype = torch.float64) -> Experts:
    torch.manual_seed(0)
    module = Experts(v4_shape())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


@pytest.mark.parametrize("chosen", [[[0, 3], [3, 5], [5, 0], [3, 1]], [[2, 4]] * 3])
def test_every_token_meets_its_experts(chosen: list[list[int]]) -> None:
    module, ids = experts(), torch.tensor(chosen)
    states = torch.randn(len(ids), 32, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([
        sum((weights[m, j] * (module.w2[e] @ clamped_swiglu(module.w1[e] @ states[m], module.w3[e] @ states[m], 2.0))
             for j, e in enumerate(row)), torch.zeros(())) for m, row in enumerate(chosen)])
    found = module(states, ids, weights)
    torch.testing.assert_close(found, wanted)
    inputs = (states, weights, *module.parameters())
    cotangent = torch.randn_like(found)
    for one, other in zip(torch.autograd.grad(found, inputs, cotangent),
                          torch.autograd.grad(wanted, inputs, cotangent), strict=True):
        torch.testing.assert_close(one, other)


def test_experts_without_tokens_have_zero_gradients() -> None:
    module = experts()
    module(torch.randn(3, 32, dtype=torch.float64), torch.tensor([[1, 2]] * 3), torch.ones(3, 2)).sum().backward()
    for parameter in module.parameters():
        used = parameter.grad.flatten(1).abs().sum(dim=1) > 0
        assert used.tolist() == [False, True, True, False, False, False]


def test_the_grouped_kernel_is_the_loop() -> None:
    """What a GPU runs in one call, here in the CPU's version of the same operator."""
    torch.manual_seed(1)
    rows, weight = torch.randn(24, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    counts = torch.tensor([7, 0, 16, 1])
    loop, fused = (grouped_product(rows, weight, counts, kind) for kind in (False, True))
    torch.testing.assert_close(loop, fused, rtol=2e-2, atol=2e-2)


def test_memory_grows_with_the_rows_alone() -> None:
    """What autograd keeps does not depend on how many experts there are."""
    def kept(count: int) -> int:
        torch.manual_seed(0)
        module, sizes = Experts(v4_shape(num_experts=count)), {}
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = module(torch.randn(40, 32), torch.randint(0, count, (40, 2)), torch.rand(40, 2))
        assert result.requires_grad
        return sum(sizes.values())

    assert kept(64) - kept(4) <= 3 * 60 * 8  # the counts


def test_choice_by_bias_weights_without() -> None:
    router = Router(v4_shape(num_experts=3, experts_per_token=2, routed_scaling_factor=1.5))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.5])
        router.bias.copy_(torch.tensor([-5.0, 0.0, 0.0]))
    states = torch.zeros(1, 32)
    states[0, 0] = 1.0
    chosen, weights = router(states)
    scores = {e: math.sqrt(math.log1p(math.exp(x))) for e, x in ((1, 1.0), (2, 0.5))}
    assert set(chosen[0].tolist()) == {1, 2}  # the best is biased away
    for expert, weight in zip(chosen[0].tolist(), weights[0].tolist(), strict=True):
        assert weight == pytest.approx(1.5 * scores[expert] / sum(scores.values()))


def test_gradient_where_softplus_is_nothing() -> None:
    """A logit below -104 has a softplus of 0 in float32, whose root has no slope: the gradient stays finite."""
    router = Router(v4_shape())
    with torch.no_grad():
        router.weight.zero_()
        router.weight[1:, 0] = -1.0
    states = torch.zeros(2, 32)
    states[:, 0] = 200.0
    states.requires_grad_(True)
    router(states)[1].sum().backward()
    assert states.grad is not None and bool(torch.isfinite(states.grad).all())
    assert router.weight.grad is not None and bool(torch.isfinite(router.weight.grad).all())


def test_bias_moves_towards_the_mean_load() -> None:
    bias = torch.tensor([0.0, 0.1, 0.0, -0.1])
    move_bias(bias, torch.tensor([4.0, 1.0, 2.0, 1.0]), 1e-3)  # mean 2
    torch.testing.assert_close(bias, torch.tensor([-1e-3, 0.101, 0.0, -0.099]))


def test_bias_evens_out_a_lopsided_router() -> None:
    router = Router(v4_shape(num_experts=8, experts_per_token=2))
    torch.manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 32) * 0.05)
        router.weight[:, 0] += torch.linspace(-1.0, 1.0, 8)
    states = torch.randn(256, 32) * 0.3
    states[:, 0] = 1.0

    def busiest() -> float:
        chosen, _ = router(states)
        load = expert_load(chosen, torch.ones(256, dtype=torch.bool), 8)
        move_bias(router.bias, load, 1e-2)
        return load_statistics(load.tolist(), router.bias)["max_load"]

    before = busiest()
    for _ in range(200):
        after = busiest()
    assert before > 3.0 and after < 1.5, (before, after)


def test_load_counts_only_what_counts() -> None:
    chosen = torch.tensor([[0, 1], [1, 2], [1, 0]])
    assert expert_load(chosen, torch.tensor([True, False, True]), 4).tolist() == [2.0, 2.0, 0.0, 0.0]


def test_statistics() -> None:
    found = load_statistics([2.0, 2.0, 0.0, 0.0], torch.tensor([0.1, -0.2, 0.0, 0.0]))
    assert found["max_load"] == 2.0 and found["used"] == 0.5
    assert found["effective"] == pytest.approx(2.0) and found["bias_range"] == pytest.approx(0.3)
    assert load_statistics([0.0, 0.0], torch.zeros(2))["max_load"] == 0.0


def test_a_cast_leaves_the_bias_exact() -> None:
    model = v4_drafter(torch.float32)
    model.gates[0].bias.fill_(0.1234567)
    for moved in (model.to(torch.bfloat16), model.half(), model.to("cpu")):
        assert moved.gates[0].bias.dtype == torch.float32 and float(moved.gates[0].bias[0]) == pytest.approx(0.1234567)
    assert model.layers[0].attn.wq_a.weight.dtype == torch.float16


def test_sinkhorn_is_doubly_stochastic() -> None:
    comb = sinkhorn(torch.rand(50, 4, 4, dtype=torch.float64) + 1e-3, 20, 1e-6)
    for axis in (-1, -2):
        torch.testing.assert_close(comb.sum(dim=axis), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=2e-3)
