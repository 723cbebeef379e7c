"""Algorithm 1 against brute force, the paper's counterexample, Sec. 5.2, and tables that must be refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from deepspec.errors import InputRefused
from deepspec.scheduling import SpsTable, expected_throughput, lower_convex, schedule_budget, schedule_prefixes


def by_table(rates: dict[int, float]):
    return lambda size: np.array([rates[int(value)] for value in np.asarray(size)])


def random_survival(random: np.random.Generator, requests: int, length: int) -> np.ndarray:
    return np.cumprod(random.uniform(0.2, 1.0, (requests, length)), axis=1)


def test_appendix_a_early_stop_admits_nothing_whatever_the_second_token_says() -> None:
    rates = by_table({1: 1.0, 2: 0.5, 3: 0.45})
    for second in (0.9, 0.0):
        survival = np.array([[0.8, 0.8 * second]])
        assert schedule_prefixes(survival, rates).lengths.tolist() == [0]
    values = [expected_throughput([[0.8, 0.72]], [length], rates) for length in (0, 1, 2)]
    assert values == pytest.approx([1.0, 0.9, 1.134])
    assert expected_throughput([[0.8, 0.0]], [2], rates) == pytest.approx(0.81)


def test_appendix_a_global_search_is_allowed_on_settled_confidences_only() -> None:
    rates = by_table({1: 1.0, 2: 0.5, 3: 0.45})
    for second in (0.9, 0.0):  # the current second token changes nothing, the earlier block decides
        current = np.array([[0.8, 0.8 * second]])
        assert schedule_budget(current, [[0.8, 0.72]], rates).lengths.tolist() == [2]
        assert schedule_budget(current, [[0.8, 0.0]], rates).lengths.tolist() == [0]


def test_equals_brute_force_on_convex_costs() -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        requests, length = int(random.integers(1, 4)), int(random.integers(1, 4))
        survival = random_survival(random, requests, length).astype(np.float32).astype(np.float64)
        slopes = np.sort(random.uniform(0.0, 0.5, requests * (1 + length)))
        cost = 1.0 + np.concatenate(([0.0], np.cumsum(slopes)))

        def rates(size, cost=cost):
            return 1.0 / cost[np.asarray(size)]

        best = max(expected_throughput(survival, lengths, rates)
                   for lengths in itertools.product(range(length + 1), repeat=requests))
        chosen = schedule_prefixes(survival, rates)
        assert chosen.throughput == pytest.approx(best, rel=1e-9)
        assert chosen.throughput == pytest.approx(expected_throughput(survival, chosen.lengths, rates))
        assert chosen.batch_tokens == requests + chosen.lengths.sum()


def test_ties_admit_a_prefix_before_its_continuation() -> None:
    survival = np.ones((3, 4))
    rates = by_table({size: 1.0 if size <= 8 else 0.1 for size in range(3, 16)})
    assert schedule_prefixes(survival, rates).lengths.tolist() == [4, 1, 0]


def test_a_decision_never_depends_on_later_tokens_of_the_same_request() -> None:
    random = np.random.default_rng(1)
    rates = SpsTable.from_samples([1, 8, 16, 64], [100, 60, 55, 20]).steps_per_second
    for _ in range(100):
        survival = random_survival(random, 4, 6)
        lengths = schedule_prefixes(survival, rates).lengths
        row = int(random.integers(4))
        changed = survival.copy()
        tail = int(lengths[row]) + 1  # c_{l+2} on depends on tokens after the last verified one
        if tail < 6:
            changed[row, tail:] = changed[row, tail - 1] * np.cumprod(random.uniform(0, 1, 6 - tail))
        assert schedule_prefixes(changed, rates).lengths[row] == lengths[row]


def test_caps() -> None:
    chosen = schedule_prefixes(np.ones((3, 4)), lambda size: np.ones(len(size)), caps=[0, 2, 4])
    assert chosen.lengths.tolist() == [0, 2, 4]


def test_budget_follows_a_staircase_over_its_risers_and_keeps_a_minimum_gain() -> None:
    rates = by_table({size: 1.0 / np.ceil(size / 4) for size in range(1, 13)})
    survival = np.full((1, 8), 0.99) ** np.arange(1, 9)
    assert schedule_budget(survival, survival, rates).lengths.tolist() == [3]
    gain = schedule_budget(survival, survival, rates).throughput / 1.0 - 1.0
    assert schedule_budget(survival, survival, rates, min_gain=gain + 0.01).lengths.tolist() == [0]
    assert schedule_budget(survival, None, rates).lengths.tolist() == [8]
    assert schedule_budget(np.ones((2, 3)), np.ones((1, 3)), rates).batch_tokens in (4, 8)


@pytest.mark.parametrize("stairs", [False, True])
def test_512_requests_and_16_tokens_are_decided_as_a_loop_over_candidates_decides(stairs: bool) -> None:
    """Both forms are one sort and one scan; candidates admitted one by one must give the same."""
    random = np.random.default_rng(2)
    survival, lagged = (random_survival(random, 512, 16).astype(np.float32).astype(np.float64) for _ in range(2))
    size = np.arange(512 * 17 + 1)
    rates = 1.0 / (20.0 + (2.0 * np.ceil(size / 256) if stairs else 0.01 * size + 2e-6 * size ** 2))

    def ranked(values: np.ndarray) -> list[tuple[int, int]]:
        return sorted(np.ndindex(values.shape), key=lambda place: (-values[place], place))

    def thetas(values: np.ndarray) -> np.ndarray:
        tau = 512 + np.cumsum([0.0] + [values[place] for place in ranked(values)])
        return tau * rates[512:]

    def lengths(admitted: int) -> list[int]:
        return np.bincount([row for row, _ in ranked(survival)[:admitted]], minlength=512).tolist()

    theta = thetas(survival)
    first = next(count for count in range(len(theta) - 1) if theta[count + 1] <= theta[count])
    assert schedule_prefixes(survival, lambda at: rates[at]).lengths.tolist() == lengths(first)
    best = int(thetas(lagged).argmax())
    assert schedule_budget(survival, lagged, lambda at: rates[at]).lengths.tolist() == lengths(best)
    assert 0 < best and (first < best if stairs else 0 < first)  # the early stop waits in front of the first riser


def test_lookups_between_and_beyond_probes() -> None:
    samples = ([8, 16, 64], [100.0, 80.0, 50.0], 512)
    linear, floor, ceil = (SpsTable.from_samples(*samples, lookup=name) for name in ("linear", "floor", "ceil"))
    assert floor.steps_per_second([1, 8, 15, 63, 64]) == pytest.approx([100, 100, 100, 80, 50])
    assert ceil.steps_per_second([1, 8, 9, 17, 64]) == pytest.approx([100, 100, 80, 50, 50])
    assert 1 / linear.steps_per_second([12]) == pytest.approx((0.01 + 0.0125) / 2)
    assert 1 / linear.steps_per_second([112]) == pytest.approx(0.02 + (0.02 - 0.0125))
    assert [float(table.steps_per_second([513])[0]) for table in (linear, floor, ceil)] == [0.0, 0.0, 0.0]
    assert (np.diff(linear.step_seconds(np.arange(1, 512))) >= 0).all()


def test_noise_never_rewards_a_larger_step() -> None:
    table = SpsTable.from_samples([1, 2, 4, 8], [100, 60, 65, 50])
    assert table.step_seconds([4])[0] == pytest.approx(1 / 60)


@pytest.mark.parametrize("tokens, rates, limit, word", [
    ([8], [100.0], None, "two"),
    ([8, 16], [100.0], None, "rates"),
    ([8.0, 16], [100.0, 90.0], None, "integers"),
    ([True, 16], [100.0, 90.0], None, "integers"),
    ([16, 8], [100.0, 90.0], None, "increase"),
    ([8, 8], [100.0, 90.0], None, "increase"),
    ([8, 16], [100.0, 0.0], None, "positive"),
    ([8, 16], [100.0, float("nan")], None, "positive"),
    ([8, 16], [100.0, 90.0], 9, "below"),
    ([8, 16, 64], [100.0, 99.0, 97.0], None, "less than"),
])
def test_tables_that_cannot_inform_are_refused(tokens, rates, limit, word) -> None:
    with pytest.raises(InputRefused, match=word):
        SpsTable.from_samples(tokens, rates, limit)


def test_a_table_of_other_conditions_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    values = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9.0, 5.0], "max_batch_tokens": 8,
              "dtype": "float32"}
    path.write_text(json.dumps(values))
    assert SpsTable.load(path, dtype="float32").max_batch_tokens == 8
    with pytest.raises(InputRefused, match="dtype is 'float32', here it is 'bfloat16'"):
        SpsTable.load(path, dtype="bfloat16")
    with pytest.raises(InputRefused, match="not found"):
        SpsTable.load(tmp_path / "missing.json")
    path.write_text("{")
    with pytest.raises(InputRefused, match="not a throughput table"):
        SpsTable.load(path)


def test_envelope_lies_below_a_staircase_and_touches_the_ends_of_its_treads() -> None:
    points = np.arange(1.0, 17.0)
    values = np.ceil(points / 4)
    corners, costs = lower_convex(points, values)
    assert (np.interp(points, corners, costs) <= values + 1e-12).all()
    assert (np.diff(np.diff(costs) / np.diff(corners)) > 0).all()
    assert {1.0, 4.0, 16.0} <= set(corners.tolist())
