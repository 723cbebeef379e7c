"""Promises to users and trials of the worse choice; the lag of the asynchronous schedule."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepspec.decoding.drift import CostDrift, Trials, trial_gap
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.scheduling import SpsTable, schedule_budget, schedule_prefixes
from tests.unit.test_scheduling import random_survival


class Cost:
    """Seconds of a round: ``base + slope * B``, drafting apart."""

    def __init__(self, base: float = 10.0, slope: float = 1.0, draft: float = 1.0) -> None:
        self.base, self.slope, self.draft = base, slope, draft

    def verify_curve(self, requests: int) -> Any:
        return lambda size: self.base + self.slope * np.asarray(size, dtype=np.float64)

    def draft_seconds(self, requests: int) -> float:
        return self.draft


def worst(survival: np.ndarray, lengths: Any, floors: np.ndarray, rate: float) -> float:
    """Rate of the worst-served request relative to its promise."""
    gained = [1.0 + survival[row, :length].sum() for row, length in enumerate(lengths)]
    return min(value * rate / floor for value, floor in zip(gained, floors))


def admissions(survival: np.ndarray, caps: Any) -> list[int]:
    """Rows in the order of admission, done plainly."""
    found = [(-np.float32(survival[row, k]), row, k) for row in range(len(survival)) for k in range(caps[row])]
    return [row for _, row, _ in sorted(found, key=lambda item: (item[0], item[1], item[2]))]


def test_a_promise_ends_the_early_stop_search_like_a_plain_loop_does() -> None:
    random = np.random.default_rng(5)
    stopped = 0
    for _ in range(200):
        requests, length = int(random.integers(1, 5)), int(random.integers(1, 5))
        survival = random_survival(random, requests, length).astype(np.float32).astype(np.float64)
        caps = random.integers(0, length + 1, requests)
        floors = random.uniform(0.08, 0.2, requests)
        cost = 5.0 + np.cumsum(random.uniform(0.0, 1.0, requests * (1 + length) + 1))
        lengths = np.zeros(requests, dtype=int)
        theta = requests / cost[requests]
        share = worst(survival, lengths, floors, 1 / cost[requests])
        for row in admissions(survival, caps):
            trial = lengths.copy()
            trial[row] += 1
            size = requests + trial.sum()
            tau = requests + sum(survival[r, :n].sum() for r, n in enumerate(trial))
            after = worst(survival, trial, floors, 1 / cost[size])
            if tau / cost[size] <= theta:
                break
            if after < 1.0 and after < share:
                stopped += 1
                break
            lengths, theta, share = trial, tau / cost[size], after
        chosen = schedule_prefixes(survival, lambda size, cost=cost: 1.0 / cost[size], caps=caps, floors=floors)
        assert chosen.lengths.tolist() == lengths.tolist()
    assert stopped > 20  # the promise decided, not only the throughput


def test_a_budget_keeps_every_promise_or_comes_nearest() -> None:
    random = np.random.default_rng(6)
    kept = missed = 0
    for _ in range(150):
        requests, length = int(random.integers(1, 4)), int(random.integers(1, 4))
        survival = random_survival(random, requests, length).astype(np.float32).astype(np.float64)
        floors = random.uniform(0.05, 0.22, requests)
        cost = 5.0 + np.cumsum(random.uniform(0.0, 1.0, requests * (1 + length) + 1))
        plans, lengths = [], [0] * requests
        for row in [-1, *admissions(survival, [length] * requests)]:
            if row >= 0:
                lengths = [n + (index == row) for index, n in enumerate(lengths)]
            size = requests + sum(lengths)
            tau = requests + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
            plans.append((tau / cost[size], worst(survival, lengths, floors, 1 / cost[size]), list(lengths)))
        keeping = [plan for plan in plans if plan[1] >= 1.0]
        best = max(keeping, key=lambda plan: plan[0]) if keeping else max(plans, key=lambda plan: plan[1])
        chosen = schedule_budget(survival, survival, lambda size, cost=cost: 1.0 / cost[size], floors=floors)
        assert chosen.lengths.tolist() == best[2]
        kept, missed = kept + bool(keeping), missed + (not keeping)
    assert kept > 10 and missed > 10


def test_one_promise_may_stand_for_all() -> None:
    survival = random_survival(np.random.default_rng(1), 3, 4)
    rates = SpsTable.from_samples([1, 8, 16, 64], [100, 60, 55, 20]).steps_per_second
    one = schedule_prefixes(survival, rates, floors=70.0).lengths.tolist()
    assert one == schedule_prefixes(survival, rates, floors=[70.0] * 3).lengths.tolist()
    assert sum(one) < sum(schedule_prefixes(survival, rates).lengths)


def test_the_capacity_comes_from_confidences_two_rounds_old() -> None:
    scheduler = ThroughputScheduler(Cost(base=1.0, slope=1.0, draft=0.0), 2, policy="lagged")
    sure, unsure = np.array([[0.99, 0.98]]), np.array([[0.05, 0.01]])
    caps = np.array([2])
    assert scheduler.lengths(sure, caps).tolist() == [2]  # nothing settled: all
    scheduler.observe(unsure, np.array([2]), np.array([0]))
    assert scheduler.lengths(sure, caps).tolist() == [2]  # one round old: not yet
    scheduler.observe(sure, np.array([2]), np.array([2]))
    assert scheduler.lengths(sure, caps).tolist() == [0]  # the unsure block is two rounds old now
    scheduler.observe(sure, np.array([2]), np.array([2]))
    assert scheduler.lengths(sure, caps).tolist() == scheduler.lengths(unsure, caps).tolist()


def test_caps_of_the_scheduler_hold_whatever_the_policy() -> None:
    sure = np.array([[0.99, 0.98, 0.97]] * 2)
    for policy in ("early_stop", "lagged"):
        scheduler = ThroughputScheduler(Cost(base=50.0, slope=0.1), 3, policy=policy, max_verify=2)
        assert scheduler.lengths(sure, np.array([3, 1])).tolist() == [2, 1]


def test_a_promise_limits_the_scheduler() -> None:
    sure = np.array([[0.99, 0.2, 0.1], [0.6, 0.5, 0.4]])
    free = ThroughputScheduler(Cost(base=10.0, slope=0.5, draft=0.0), 3)
    # Two requests at base 10 + 0.5 B: a step of 11 s gives each 1/11 tokens per second.
    held = ThroughputScheduler(Cost(base=10.0, slope=0.5, draft=0.0), 3, floor=1 / 11.4)
    assert held.lengths(sure, np.array([3, 3])).sum() < free.lengths(sure, np.array([3, 3])).sum()


def test_known_blocks_spare_the_first_trials() -> None:
    hopeless = np.tile([0.05, 0.002], (40, 1))
    cost = Cost(base=1.0, slope=1.0, draft=5.0)
    fresh, informed = ThroughputScheduler(cost, 2), ThroughputScheduler(cost, 2).start_from(hopeless)
    assert fresh.should_draft(4) and not informed.should_draft(4)
    promising = np.tile([0.95, 0.9], (40, 1))
    assert ThroughputScheduler(Cost(base=50.0, slope=0.1), 2).start_from(promising).should_draft(4)
    informed.reset()
    assert not informed.should_draft(4)


@pytest.mark.parametrize("share", [0.1, 0.02, 0.005])
@pytest.mark.parametrize("accepted", [0.05, 0.3])
def test_trials_of_the_worse_choice_cost_the_stated_share_at_most(share: float, accepted: float) -> None:
    cost = Cost(base=10.0, slope=0.5, draft=8.0)
    survival = np.tile([accepted, accepted ** 2], (9, 1))
    scheduler = ThroughputScheduler(cost, 2, probe_share=share).start_from(survival)
    length = int(scheduler.lengths(survival[:1], np.array([2]))[0])

    def lost(drafted: NDArray[np.bool_]) -> float:
        """Share of the throughput of plain decoding."""
        seconds = np.where(drafted, 8.0 + 10.0 + 0.5 * (1 + length), 10.5)
        tokens = np.where(drafted, 1.0 + survival[0, :length].sum(), 1.0)
        return float(1.0 - tokens.sum() / seconds.sum() * 10.5)

    drafted = np.array([scheduler.should_draft(1) for _ in range(20_000)])
    trials = np.flatnonzero(drafted)
    gaps = np.diff(trials)
    assert len(trials) > 2 and 0 < lost(drafted) < share
    assert lost(drafted[:trials[0] + 1]) == pytest.approx(share, abs=0.15 * share + 0.001)
    assert (np.diff(gaps) >= 0).all() and gaps[0] == 2 * (trials[0] + 1) and gaps[-1] <= 16 * (trials[0] + 1)


def alternate(scheduler: ThroughputScheduler, drafting: float, plain: float, rounds: int = 400) -> float:
    """Share of rounds that draft when they really take so long (s), one request."""
    drafted = []
    for _ in range(rounds):
        drafted.append(scheduler.should_draft(1))
        scheduler.observe_seconds(1, 3 if drafted[-1] else 1, drafted[-1], drafting if drafted[-1] else plain)
    return float(np.mean(drafted[rounds // 2:]))


def test_measured_rounds_correct_a_profile_that_is_off() -> None:
    cost = Cost(base=10.0, slope=0.5, draft=8.0)  # 19.5 s for three tokens against 10.5 s
    for accepted, profile_says in ((0.95, True), (0.3, False)):
        survival = np.tile([accepted, accepted ** 2], (40, 1))

        def fresh(drift: Any) -> ThroughputScheduler:
            return ThroughputScheduler(cost, 2, drift=drift).start_from(survival)

        assert fresh(None).should_draft(1) is profile_says
        assert (alternate(fresh(CostDrift()), 19.5, 10.5) > 0.5) is profile_says
        assert alternate(fresh(CostDrift()), 60.0, 10.5) < 0.2  # drafting is dearer than the profile thinks
        assert alternate(fresh(CostDrift()), 11.0, 10.5) > 0.8  # or cheaper
        assert (alternate(fresh(CostDrift()), 39.0, 21.0) > 0.5) is profile_says  # slower as a whole: no difference
        assert (alternate(fresh(None), 60.0, 10.5) > 0.5) is profile_says  # and without a clock the profile rules


def test_what_is_learnt_of_the_machine_stays_for_the_next_decode() -> None:
    cost, drift = Cost(base=10.0, slope=0.5, draft=8.0), CostDrift()
    survival = np.tile([0.95, 0.9], (40, 1))
    first = ThroughputScheduler(cost, 2, drift=drift).start_from(survival)
    alternate(first, 60.0, 10.5)
    first.reset()
    second = ThroughputScheduler(cost, 2, drift=drift).start_from(survival)
    assert not first.should_draft(1) and not second.should_draft(1)
    assert any(second.should_draft(64) for _ in range(2))  # another load: nothing is known there


def test_gaps_of_trials_stay_within_bounds() -> None:
    assert trial_gap(1.0, 1.0, 0.5, 100) == 4 and trial_gap(5.0, 3.0, 0.0, 100) == 100
    assert trial_gap(2.0, 2.0, 0.01, 4096) == round(49 * 2.0)
    assert trial_gap(2.0, 2.0, 0.01, 4096, failed=3) == 8 * 98 and trial_gap(2.0, 2.0, 0.01, 500, failed=3) == 500


def test_trials_count_anew_when_the_choice_changes_and_per_load() -> None:
    trials = Trials()
    for _ in range(9):
        trials.count(1, False)
    assert trials.failed(1, False) == 4 and trials.failed(1, True) == 0 and trials.failed(16, False) == 0
    trials.count(1, True)
    assert trials.failed(1, True) == 1 and trials.failed(1, False) == 0
