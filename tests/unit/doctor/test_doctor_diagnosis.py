"""When too little is accepted: by the gap's interval, or because each prompt's counts speak against the drafter."""

from deepspec.doctor.counts import Counts, PromptCounts
from deepspec.doctor.diagnosis import is_short
from deepspec.doctor.exam import Exam, TextCheck
from deepspec.doctor.faults import AS_TRAINED
from deepspec.doctor.ranking import rank


def prompt(rounds: int, *accepted: int) -> PromptCounts:
    return PromptCounts(rounds, rounds * len(accepted), sum(accepted), accepted)


HEALTHY = Counts((prompt(10, 9, 8), prompt(14, 8, 4), prompt(20, 7, 3), prompt(9, 8, 8)))
# Less on most prompts and more on one, so that few prompts leave the gap's interval around 0.
FAULTY = Counts((prompt(16, 6, 5), prompt(12, 9, 6), prompt(25, 3, 2), prompt(12, 7, 6)))


def exam(served: Counts) -> Exam:
    ranked = rank(served, [(AS_TRAINED, HEALTHY), ("mask_token", FAULTY)], 2)
    return Exam([], served, 2, HEALTHY, HEALTHY, TextCheck(4), ranked=ranked)


def test_counts_of_another_drafter_are_short_even_where_the_interval_is_wide() -> None:
    gap, low, _ = exam(FAULTY).gap()
    assert gap > 0.1 and low < 0.0
    assert is_short(exam(FAULTY), 0.05, 0.9)


def test_counts_as_predicted_are_not() -> None:
    assert not is_short(exam(HEALTHY), 0.05, 0.9)
    assert not is_short(exam(FAULTY), 0.9, 0.9)  # less than the tolerance is missing
