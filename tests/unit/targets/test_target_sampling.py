"""Random numbers and distributions."""

import pytest
import torch

from deepspec.errors import ConfigError
from deepspec.targets.sampling import Sampling, pick, target_probs, uniform


def test_uniforms_depend_on_their_key_alone() -> None:
    ids = ["a", "b", "c"]
    together = uniform(3, ids, [5, 6, 7], 0)
    assert together.dtype == torch.float64
    for index, (prompt, position) in enumerate(zip(ids, [5, 6, 7])):
        assert together[index] == uniform(3, [prompt], [position], 0)[0]
    keys = [(3, "a", 5, 0), (4, "a", 5, 0), (3, "b", 5, 0), (3, "a", 6, 0), (3, "a", 5, 1)]
    values = {float(uniform(seed, [prompt], [position], purpose)[0]) for seed, prompt, position, purpose in keys}
    assert len(values) == len(keys)


@pytest.mark.parametrize("vary", ["position", "prompt", "seed", "purpose"])
def test_uniforms_are_uniform_and_uncorrelated(vary: str) -> None:
    count = 20000
    if vary == "position":
        values = uniform(0, ["p"] * count, list(range(count)), 0)
    elif vary == "prompt":
        values = uniform(0, [f"p{index}" for index in range(count)], [3] * count, 0)
    else:
        count = 4000
        keys = [(index, 0) if vary == "seed" else (0, index) for index in range(count)]
        values = torch.cat([uniform(seed, ["p"], [3], purpose) for seed, purpose in keys])
    assert 0.0 <= float(values.min()) and float(values.max()) < 1.0
    histogram = torch.histc(values.float(), 20, 0, 1)
    chi_square = float(((histogram - count / 20) ** 2 / (count / 20)).sum())
    assert chi_square < 50  # 19 degrees of freedom: p = 1e-4 at 50
    centred = values - 0.5
    lag = float((centred[1:] * centred[:-1]).mean() * 12)
    assert abs(lag) < 4.5 / count ** 0.5


def test_pick_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    draws = torch.tensor([0.0, 0.2499999, 0.25, 0.7, 1.0 - 2.0 ** -53], dtype=torch.float64)
    assert pick(probs, draws).tolist() == [1, 1, 3, 3, 3]
    assert pick(probs * 0.1, draws).tolist() == [1, 1, 3, 3, 3]  # a residual is not normalised


def test_pick_follows_the_probabilities() -> None:
    probs = torch.tensor([0.05, 0.5, 0.0, 0.45])
    count = 20000
    picked = pick(probs.repeat(count, 1), uniform(1, ["x"] * count, list(range(count)), 0))
    counts = torch.bincount(picked, minlength=4).double()
    expected = probs.double() * count
    kept = expected > 0
    assert counts[2] == 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 18.4  # 2 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("size", [4096, 4097, 8192, 49152])
def test_a_large_vocabulary_is_searched_in_two_steps_with_the_same_result(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    probs = torch.softmax(4.0 * torch.randn(300, size, generator=generator), dim=-1)
    probs[:, torch.randperm(size, generator=generator)[:size // 3]] = 0.0
    draws = torch.rand(300, dtype=torch.float64, generator=generator)
    picked = pick(probs, draws)
    assert bool((probs.gather(1, picked[:, None]) > 0).all())
    # By the definition: the cumulative probability first exceeds the draw there, up to the rounding of sums of float32.
    cumulative = probs.double().cumsum(dim=-1) / probs.double().sum(dim=-1, keepdim=True)
    after = cumulative.gather(1, picked[:, None])[:, 0]
    before = after - probs.double().gather(1, picked[:, None])[:, 0] / probs.double().sum(dim=-1)
    assert bool((draws < after + 1e-6).all()) and bool((draws >= before - 1e-6).all())


def test_a_large_vocabulary_reaches_its_first_and_its_last_token() -> None:
    probs = torch.zeros(3, 5000)
    probs[:, 7], probs[:, 4999] = 0.25, 0.75
    draws = torch.tensor([0.0, 0.25, 1.0 - 2.0 ** -53], dtype=torch.float64)
    assert pick(probs, draws).tolist() == pick(0.01 * probs, draws).tolist() == [7, 4999, 4999]
    alone = torch.zeros(2, 5000)
    alone[:, 4999] = 1e-30
    assert pick(alone, draws[[0, 2]]).tolist() == [4999, 4999]


def test_a_large_vocabulary_follows_the_probabilities() -> None:
    probs = torch.zeros(5000)
    places = torch.tensor([0, 127, 128, 3000, 4999])
    probs[places] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    count = 20000
    picked = pick(probs.expand(count, -1), uniform(3, ["x"] * count, list(range(count)), 0))
    counts = torch.bincount(picked, minlength=5000)[places].double()
    assert counts.sum() == count
    expected = probs[places].double() * count
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5  # 4 degrees of freedom: p = 1e-4


def test_probabilities_go_where_they_are_wanted() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.0), Sampling(top_k=3)):
        out = torch.full((3, 11), -1.0)
        assert target_probs(logits, sampling, out=out) is out
        assert torch.equal(out, target_probs(logits, sampling))


def test_greedy_is_one_hot() -> None:
    logits = torch.tensor([[0.1, 2.0, 1.0], [3.0, 3.0, -1.0]])
    assert target_probs(logits, Sampling(temperature=0.0)).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_temperature_top_k_and_top_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    torch.testing.assert_close(target_probs(logits, Sampling()), logits.exp())
    torch.testing.assert_close(target_probs(logits, Sampling(temperature=0.5)), (logits * 2).softmax(-1))
    torch.testing.assert_close(target_probs(logits, Sampling(top_k=2)), torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(target_probs(logits, Sampling(top_p=0.7)), torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(target_probs(logits, Sampling(top_p=0.01)), torch.tensor([[1.0, 0, 0, 0]]))
    both = target_probs(logits, Sampling(top_k=3, top_p=0.6))  # 0.526 0.316 0.158: the second crosses 0.6
    torch.testing.assert_close(both, torch.tensor([[0.625, 0.375, 0, 0]]))


def test_nucleus_wider_than_the_first_candidates() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 17] = 20.0
    probs = target_probs(logits, Sampling(top_p=0.5))
    assert abs(int((probs[0] > 0).sum()) - 2500) <= 1 and int((probs[1] > 0).sum()) == 1
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


def test_padding_rows_get_nothing() -> None:
    logits = torch.tensor([[1.0, 0.0, float("-inf")]])
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.999), Sampling(temperature=0.0)):
        assert target_probs(logits, sampling)[0, 2] == 0


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
                                   {"top_k": -1}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
