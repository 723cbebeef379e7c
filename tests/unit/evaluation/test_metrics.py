"""Acceptance by hand-counted rounds, intervals by known distributions."""

import time
from typing import Optional

import numpy as np
import pytest

from deepspec.decoding.types import DecodeResult, RoundRecord
from deepspec.errors import InputRefused
from deepspec.evaluation.bootstrap import acceptance_length_interval, percentile_interval, ratio_bootstrap
from deepspec.evaluation.metrics import (
    DEFINITIONS, AcceptanceCounts, acceptance_length, accepted_histogram, conditional_acceptance, latency_per_token,
    require_proposals, summary,
)
from deepspec.evaluation.paired import compare


def answer(name: str, accepted: list[int], *, length: int = 4, ended: Optional[int] = None) -> DecodeResult:
    """Rounds that accepted so many drafts; ``ended``: accepted drafts of a last round that ended the answer."""
    rounds = [RoundRecord(length, length, length, count, 1) for count in accepted]
    if ended is not None:
        rounds.append(RoundRecord(length, length, ended, ended, 0))
    tokens = 1 + sum(record.accepted + record.bonus for record in rounds)
    return DecodeResult(name, "math", 3, tuple(range(tokens)), "stop", tuple(rounds), 1.0)


def test_the_bonus_token_counts() -> None:
    counts = AcceptanceCounts.of([answer("a", [0, 2, 4])], 4)
    assert acceptance_length(counts) == 3.0
    values = summary(counts)
    assert (values["accepted"], values["drafted"], values["rounds"]) == (6, 12, 3)
    assert values["accepted_per_position"] == [2, 2, 1, 1] and values["accepted_histogram"] == [1, 0, 1, 0, 1]
    assert "bonus" in DEFINITIONS and "prefill" in DEFINITIONS


def test_an_accepted_end_of_turn_has_no_bonus_and_no_verdict_on_what_follows() -> None:
    counts = AcceptanceCounts.of([answer("a", [4], ended=2)], 4)
    assert acceptance_length(counts) == (5 + 2) / 2
    assert conditional_acceptance(counts) == [1.0, 1.0, 1.0, 1.0]
    assert counts.reached.tolist() == [[2, 2, 1, 1]]


def test_pooled_not_averaged() -> None:
    counts = AcceptanceCounts.of([answer("a", [7] * 100, length=8), answer("b", [0] * 10, length=8)], 8)
    assert acceptance_length(counts) == pytest.approx((800 + 10) / 110)


def test_true_prefixes_not_products_of_marginals() -> None:
    """Blocks 1111 and 0000: 2 accepted on average, where the product of marginals says 0.94."""
    counts = AcceptanceCounts.of([answer("a", [4, 0])], 4)
    assert acceptance_length(counts) == 3.0
    assert conditional_acceptance(counts) == [0.5, 1.0, 1.0, 1.0]


def test_every_window_counts() -> None:
    results = [answer(f"p{i}", [4 if i % 2 else 0]) for i in range(40)]
    parts = [AcceptanceCounts.of(results[i::2], 4) for i in range(2)]
    assert acceptance_length(AcceptanceCounts.concatenate(parts)) == 3.0


def test_turns_of_a_conversation_are_one_prompt() -> None:
    counts = AcceptanceCounts.of([answer("x#0", [1]), answer("x#1", [3]), answer("y#0", [2])], 4)
    assert len(counts) == 2 and counts.rounds.tolist() == [2, 1] and counts.accepted.tolist() == [4, 2]


def test_nothing_is_null_not_nan() -> None:
    counts = AcceptanceCounts.of([], 4)
    values = summary(counts)
    assert values["acceptance_length"] is None and values["conditional_acceptance"] == [None] * 4
    assert acceptance_length_interval(counts, 100) is None
    assert accepted_histogram(counts) == [0, 0, 0, 0, 0]
    assert acceptance_length_interval(AcceptanceCounts.of([answer("a", [1])], 4), 100) is None


def test_a_drafter_that_never_drafts_is_an_error() -> None:
    silent = DecodeResult("a", "math", 3, (1, 2), "stop", (RoundRecord(0, 0, 0, 0, 1),), 1.0)
    with pytest.raises(InputRefused, match="not one drafted token"):
        require_proposals(AcceptanceCounts.of([silent], 4), "evaluation of x")
    require_proposals(AcceptanceCounts.of([answer("a", [0])], 4), "evaluation of x")
    require_proposals(AcceptanceCounts.of([], 4), "evaluation of x")


def test_latency_per_token() -> None:
    assert latency_per_token(0.01, 0.05, 3.0) == pytest.approx(0.02)


def random_counts(random: np.random.Generator, prompts: int, rate: float) -> AcceptanceCounts:
    rounds = random.integers(5, 30, prompts)
    accepted = random.binomial(rounds * 4, rate)
    zero = np.zeros((prompts, 4), dtype=np.int64)
    return AcceptanceCounts(rounds, rounds * 4, rounds * 4, accepted, rounds, zero, zero, rounds)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        low, high = acceptance_length_interval(random_counts(random, 60, 0.4), 400, seed=trial) or (0.0, 0.0)
        covered += low <= 1 + 4 * 0.4 <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_resampling_matches_a_plain_loop() -> None:
    random = np.random.default_rng(1)
    top, bottom = random.integers(0, 50, 40), random.integers(1, 20, 40)
    values = []
    for _ in range(4000):
        chosen = random.integers(0, 40, 40)
        values.append(top[chosen].sum() / bottom[chosen].sum())
    low, high = percentile_interval(ratio_bootstrap(top, bottom, 4000, 7)) or (0.0, 0.0)
    assert (low, high) == pytest.approx(np.percentile(values, (2.5, 97.5)).tolist(), rel=0.03)


def test_paired_comparison() -> None:
    random = np.random.default_rng(2)
    first = random_counts(random, 80, 0.5)
    worse = AcceptanceCounts(**{**vars(first), "accepted": first.accepted - first.rounds // 4})
    result = compare(first, worse, 2000)
    assert result.effect == pytest.approx(0.25, abs=0.06) and result.interval[0] > 0 and result.p_value < 0.01
    assert result.ratio > 1 and result.prompts == 80
    same = compare(first, first, 500)
    assert same.effect == 0.0 and same.p_value == 1.0
    with pytest.raises(ValueError, match="same two or more"):
        compare(first, random_counts(random, 79, 0.5))


def test_bootstrap_is_vectorised() -> None:
    counts = random_counts(np.random.default_rng(3), 1000, 0.5)
    began = time.perf_counter()
    acceptance_length_interval(counts, 2000)
    assert time.perf_counter() - began < 2.0
