"""Counts, their reading and their explanation, on numbers made by hand."""

import pytest

from deepspec.doctor.counts import Counts, PromptCounts, from_histogram, missing_length
from deepspec.doctor.ranking import UNKNOWN, by_cause, rank
from deepspec.doctor.vllm import difference, read_counters

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+02
"""


def prompt(rounds: int, *accepted: int) -> PromptCounts:
    return PromptCounts(rounds, rounds * len(accepted), sum(accepted), accepted)


def test_counters_of_all_engines_are_summed() -> None:
    counts, tokens = read_counters(METRICS)
    assert counts == PromptCounts(15, 45, 12, (9, 4)) and tokens == 120
    assert difference(counts, PromptCounts(5, 15, 2, (1, 1))) == PromptCounts(10, 30, 10, (8, 3))
    assert read_counters("vllm:generation_tokens_total 3.0\n") == (None, 3)


def test_a_histogram_of_rounds() -> None:
    assert from_histogram([2, 3, 1], 12) == PromptCounts(6, 12, 5, (4, 1))


def test_acceptance_length_pools_over_rounds() -> None:
    counts = Counts((prompt(10, 10, 10), prompt(90, 0, 0)))
    assert counts.acceptance_length == pytest.approx(1.2) and counts.positions == [10, 10]
    assert counts.draft_length == 2 and Counts(()).acceptance_length is None


def test_the_gap_of_equal_counts_is_zero_and_of_worse_ones_certain() -> None:
    good, bad = Counts((prompt(10, 9, 8),) * 8), Counts((prompt(20, 2, 0),) * 8)
    assert missing_length(good, good) == (0.0, 0.0, 0.0)
    gap, low, high = missing_length(good, bad)
    assert gap == pytest.approx(1.6) and low > 1.5 and high < 1.7


HEALTHY = Counts(tuple(prompt(10 + i, 8, 6, 4) for i in range(8)))
SHIFTED = Counts(tuple(prompt(20 + i, 3, 1, 0) for i in range(8)))
SWAPPED = Counts(tuple(prompt(22 - i, 2, 2, 1) for i in range(8)))


def test_counts_that_are_reproduced_exactly_decide() -> None:
    ranked = rank(SHIFTED, [("fine", HEALTHY), ("layers", SHIFTED), ("slots", SWAPPED)], 3)
    assert ranked[0].cause == "layers" and ranked[0].probability > 0.99 and ranked[0].exact == 8
    assert sum(item.probability for item in ranked) == pytest.approx(1.0)


def test_counts_that_are_only_close_still_point_at_their_cause() -> None:
    """Another rounding: every prompt a little off."""
    served = Counts(tuple(prompt(21 + i, 3, 1, 0) for i in range(8)))
    ranked = rank(served, [("fine", HEALTHY), ("layers", SHIFTED)], 3)
    assert ranked[0].cause == "layers" and ranked[0].exact == 0 and by_cause(ranked)["layers"] > 0.9


def test_equal_predictions_are_not_told_apart() -> None:
    ranked = rank(SHIFTED, [("fine", HEALTHY), ("layers", SHIFTED), ("rope", SHIFTED)], 3)
    assert ranked[0].probability == pytest.approx(0.5, abs=0.01) and ranked[0].twins


def test_what_nothing_explains_is_unknown() -> None:
    served = Counts(tuple(prompt(40, 20, 20, 20) for i in range(8)))
    assert rank(served, [("fine", HEALTHY), ("layers", SHIFTED)], 3)[0].cause == UNKNOWN


def test_several_forms_of_one_cause_share_its_prior() -> None:
    ranked = rank(SHIFTED, [("mask", SHIFTED), ("mask", SWAPPED), ("layers", SHIFTED)], 3)
    assert by_cause(ranked)["layers"] > by_cause(ranked)["mask"]


def test_engines_that_report_sums_only() -> None:
    served = Counts(tuple(PromptCounts(item.rounds, item.drafted, item.total) for item in SHIFTED.prompts))
    ranked = rank(served, [("fine", HEALTHY), ("layers", SHIFTED)], 3)
    assert ranked[0].cause == "layers" and ranked[0].probability > 0.9


NOTHING = Counts(tuple(prompt(31, 0, 0, 0) for _ in range(8)))


def trials(*rows: tuple[int, ...]) -> Counts:
    return Counts(tuple(prompt(*row) for row in rows))


def test_trials_decide_between_mistakes_that_look_alike() -> None:
    """Nothing is accepted either way, but one suspect's drafts would have been."""
    both = [("layers", NOTHING), ("lm_head", NOTHING)]
    assert rank(NOTHING, both, 3)[0].twins
    refused, kept = trials((23, 0, 0, 0), (23, 0, 0, 0)), trials((6, 6, 6, 5), (6, 6, 5, 5))
    ranked = rank(NOTHING, both, 3, more=(refused, [kept, refused]))
    assert ranked[0].cause == "lm_head" and ranked[0].probability > 0.99 and ranked[0].exact == 10
    ranked = rank(NOTHING, both, 3, more=(kept, [kept, refused]))
    assert ranked[0].cause == "layers" and ranked[0].probability > 0.99 and not ranked[0].twins


def test_one_surprising_trial_does_not_outweigh_several_clear_ones() -> None:
    """Another head may draft a restricted answer by chance; its stand-in cannot know."""
    both = [("layers", NOTHING), ("lm_head", NOTHING)]
    refused, kept = (23, 0, 0, 0), (6, 6, 6, 5)
    served = trials(refused, refused, (11, 10, 2, 2))
    ranked = rank(NOTHING, both, 3, more=(served, [trials(kept, kept, refused), trials(refused, refused, refused)]))
    assert ranked[0].cause == "lm_head" and ranked[0].probability > 0.9


def test_trials_of_engines_that_report_sums_only() -> None:
    def sums(counts: Counts) -> Counts:
        return Counts(tuple(PromptCounts(item.rounds, item.drafted, item.total) for item in counts.prompts))

    both = [("layers", NOTHING), ("lm_head", NOTHING)]
    refused, kept = trials((23, 0, 0, 0), (23, 0, 0, 0)), trials((6, 6, 6, 5), (6, 6, 5, 5))
    assert rank(sums(NOTHING), both, 3, more=(sums(refused), [kept, refused]))[0].cause == "lm_head"
