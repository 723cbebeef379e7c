"""Intervals that speak of other prompts and of other trainings."""

import numpy as np
import pytest

from deepspec.evaluation.metrics import AcceptanceCounts
from deepspec.evaluation.repeated import acceptance_lengths, gain, mean, shared_prompts


def counts(lengths: np.ndarray, rounds: int = 40, names: str = "p") -> AcceptanceCounts:
    """Prompts with ``lengths`` [P] tokens per round."""
    size = len(lengths)
    whole = np.full(size, float(rounds))
    zeros = np.zeros((size, 2))
    return AcceptanceCounts(whole, whole, whole, lengths * rounds - rounds, whole, zeros, zeros, lengths * rounds,
                            np.array([f"{names}{i:04d}" for i in range(size)]))


def world(random: np.random.Generator, *, drafter: float, trainings: int, prompts: np.ndarray,
          spread: float) -> list[dict[str, AcceptanceCounts]]:
    found = []
    for _ in range(trainings):
        own = drafter + random.normal(0, spread)
        found.append({"a": counts(own * prompts * np.exp(random.normal(0, 0.02, len(prompts))))})
    return found


@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_intervals_hold_what_they_promise(spread: float) -> None:
    """Drafters of known means, prompts and trainings drawn anew: 95 % of the intervals hold the truth."""
    random = np.random.default_rng(0)
    own, ratio = 0, 0
    worlds = 300
    for _ in range(worlds):
        prompts = np.exp(random.normal(0, 0.3, 40))
        prompts /= np.exp(0.045)  # mean 1 over all prompts there could be
        parts = [world(random, drafter=size, trainings=3, prompts=prompts, spread=spread) for size in (3.0, 2.5)]
        first, second = (acceptance_lengths(part, ["a"], resamples=200) for part in parts)
        found, against = mean(first), gain(first, second)
        own += found.interval[0] < 3.0 < found.interval[1]
        ratio += against.interval[0] < 3.0 / 2.5 - 1 < against.interval[1]
    # Binomial with 300 draws: three standard deviations below 0.95 are 0.912; intervals from 3 trainings are wide.
    assert own / worlds > 0.9 and ratio / worlds > 0.9
    assert own / worlds < 1.0


def test_prompts_cancel_in_a_ratio_and_trainings_do_not() -> None:
    random = np.random.default_rng(1)
    prompts = np.exp(random.normal(0, 0.5, 60))
    alike = [{"a": counts(3.0 * prompts)} for _ in range(3)], [{"a": counts(2.0 * prompts)} for _ in range(3)]
    first, second = (acceptance_lengths(part, ["a"], resamples=500) for part in alike)
    found = gain(first, second)
    assert found.value == pytest.approx(0.5) and found.prompt_error < 1e-9
    assert mean(first).prompt_error > 0.05
    other = [{"a": counts(size * prompts)} for size in (2.7, 3.0, 3.3)]
    spread = acceptance_lengths(other, ["a"], resamples=500)
    assert gain(spread, second).training_error == pytest.approx(0.3 / 3 ** 0.5 / 3.0, rel=1e-6)
    low, high = gain(spread, second).interval
    back = gain(second, spread).interval
    assert (1 + back[0]) * (1 + high) == pytest.approx(1.0) and (1 + back[1]) * (1 + low) == pytest.approx(1.0)


def test_three_trainings_know_their_spread_less_well_than_thirty() -> None:
    prompts = np.full(50, 1.0)
    few = mean(acceptance_lengths([{"a": counts(size * prompts)} for size in (2.0, 2.1, 2.2)], ["a"], resamples=100))
    assert few.value == pytest.approx(2.1) and few.training_error == pytest.approx(0.1 / 3 ** 0.5)
    assert few.interval[1] - few.value == pytest.approx(4.303 * few.training_error, rel=1e-3)  # t with 2 degrees
    one = mean(acceptance_lengths([{"a": counts(2.0 * prompts)}], ["a"], resamples=100))
    assert one.training_error is None and one.interval is None, "one training on prompts all alike: nothing tells"


def test_a_factor_per_training_scales_values_and_draws() -> None:
    random = np.random.default_rng(2)
    lengths = [{"a": counts(random.uniform(2, 3, 30))} for _ in range(2)]
    found = acceptance_lengths(lengths, ["a"], resamples=50)
    doubled = found.scaled([2.0, 0.5])
    assert doubled.values == pytest.approx(found.values * [2.0, 0.5])
    assert doubled.draws[1] == pytest.approx(found.draws[1] * 0.5)


def test_macro_is_the_mean_over_benchmarks_and_prompts_are_matched_by_name() -> None:
    short, long = counts(np.full(4, 2.0)), counts(np.full(6, 4.0))
    turned = {"a": long.select(np.arange(5, -1, -1)), "b": short}
    first, second = shared_prompts([{"a": short, "b": short}, turned])
    assert first["a"].prompts.tolist() == second["a"].prompts.tolist() == [f"p{i:04d}" for i in range(4)]
    found = acceptance_lengths([second], ["a", "b"], resamples=10)
    assert found.values.tolist() == [3.0] and found.prompts == 8
    assert acceptance_lengths([{"a": short.select(np.zeros(0, dtype=int))}], ["a"], resamples=10) is None
    assert shared_prompts([]) == [] and acceptance_lengths([], ["a"], resamples=10) is None
