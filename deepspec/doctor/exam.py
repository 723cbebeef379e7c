"""The examination: the server's answers and counts on the reference prompts, and what our decoder says of them."""

import logging
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

import numpy as np

from deepspec.doctor.counts import Counts, PromptCounts, missing_length
from deepspec.doctor.coverage import Coverage, coverage, silent_limit
from deepspec.doctor.endpoint import Answer, Engine
from deepspec.doctor.faults import Bench, Hypothesis, catalogue, needed_layers
from deepspec.doctor.ranking import Ranked, rank
from deepspec.doctor.reference import Prompt, Text, greedy_answers, greedy_margin, layer_outputs
from deepspec.doctor.replay import Variant, accepted_by_round, replay
from deepspec.doctor.variants import rebuild, with_length
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextCheck:
    """Greedy texts of server and target: prompts that differ, where first, and by how much the target would mind."""

    prompts: int
    different: tuple[int, ...] = ()  # prompts
    first: tuple[int, ...] = ()  # index of the first token that differs, for each of them
    margins: tuple[float, ...] = ()  # logits between the target's own token and the server's there

    @property
    def margin(self) -> Optional[float]:
        """Median margin, None where all texts are equal."""
        return float(np.median(self.margins)) if self.margins else None


@dataclass
class Exam:
    """All that was measured. Lengths are acceptance lengths, the bonus token included."""

    prompts: list[Prompt]
    served: Counts
    draft_length: int  # of the engine
    offline: Counts  # as trained, on the target's own texts, with the trained number of draft tokens
    expected: Counts  # as trained, on the texts that were served, with the engine's number
    text: TextCheck
    traffic: Optional[PromptCounts] = None  # rounds the server had counted before
    alone: bool = True
    hypotheses: list[Hypothesis] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)  # what each hypothesis makes of the drafter
    predictions: list[Counts] = field(default_factory=list)
    ranked: list[Ranked] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)  # as served, as far as they were drafted
    coverage: Coverage = Coverage(())
    silent: Optional[tuple[int, int]] = None  # sequence lengths from which on rounds accept nothing
    trials: Optional[Counts] = None  # of answers restricted to what suspects would draft
    trial_predictions: list[Counts] = field(default_factory=list)

    def gap(self) -> tuple[float, float, float]:
        """Acceptance length missing against the offline figure, and its 95 % interval."""
        return missing_length(self.offline, self.served)

    @property
    def judged(self) -> int:
        """Answers whose counts were compared, trials included."""
        return len(self.served.prompts) + (0 if self.trials is None else len(self.trials.prompts))

    def layers(self) -> list[int]:
        """Layers whose outputs some hypothesis reads."""
        return needed_layers(self.variants)

    def named(self) -> list[tuple[str, Counts]]:
        """Cause and predicted counts of every hypothesis."""
        return [(item.cause, found) for item, found in zip(self.hypotheses, self.predictions)]


def ask_all(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[Answer], Counts]:
    """Answers to all prompts, one after the other, so that counters can be read in between.

    Raises InputRefused when the engine speculates in none of them.
    """
    answers = [engine.answer(ids, tokens) for ids in prompts]
    counted = [answer.counts for answer in answers if answer.counts is not None and answer.counts.rounds]
    if not counted:
        raise InputRefused("The server answered every prompt without one speculative round: it runs without a drafter. "
                           "Start it with the command of export/serving/launch.md and look for the drafter in its log.")
    empty = PromptCounts(0, 0, 0)
    return answers, Counts(tuple(answer.counts or empty for answer in answers))


def compare_texts(target: Any, prompts: Sequence[Prompt], answers: Sequence[Answer],
                  ours: Sequence[Sequence[int]]) -> TextCheck:
    """Where greedy texts part, and whether the two tokens were nearly equal for the target."""
    different, first, margins = [], [], []
    for number, (prompt, answer, own) in enumerate(zip(prompts, answers, ours)):
        place = next((i for i, (theirs, mine) in enumerate(zip(answer.token_ids, own)) if theirs != mine), None)
        if place is not None:
            whole = [*prompt.ids, *answer.token_ids]
            different.append(number)
            first.append(place)
            margins.append(greedy_margin(target, whole, len(prompt.ids) + place, answer.token_ids[place]))
    return TextCheck(len(prompts), tuple(different), tuple(first), tuple(margins))


def served_texts(prompts: Sequence[Prompt], answers: Sequence[Answer], ours: Sequence[tuple[int, ...]],
                 drafted: Sequence[int]) -> list[Text]:
    """Texts as served, as far as rounds made them (``drafted`` tokens); where ours agrees, its further tokens let the
    last round be judged in full."""
    texts = []
    for prompt, answer, own, made in zip(prompts, answers, ours, drafted):
        same = own[:len(answer.token_ids)] == answer.token_ids
        more = own[made:] if same else answer.token_ids[made:]
        texts.append(Text(prompt.ids, answer.token_ids[:made], more))
    return texts


def states_of(target: Any, texts: Sequence[Text], layers: Sequence[int]) -> list[dict[int, Any]]:
    """Outputs of ``layers`` for every text."""
    return [layer_outputs(target, text.ids, layers) for text in texts]


def examine(engine: Engine, target: Any, drafter: Any, prompts: list[Prompt], tokens: int, *,
            served: Optional[Any] = None, differences: str = "") -> Exam:
    """Measure and compare. ``served``: the drafter as the served folder describes it, if that is another one.

    Raises InputRefused when the server does not speculate.
    """
    traffic = engine.totals()
    answers, counts = ask_all(engine, [prompt.ids for prompt in prompts], tokens)
    trained = drafter.shape.draft_length
    length = counts.draft_length or engine.facts.draft_length or trained
    log.info("the engine accepts %.3f tokens per round over %d rounds of %d draft tokens",
             counts.acceptance_length or 0.0, counts.rounds, length)
    ours = greedy_answers(target, drafter, prompts, tokens + max(length, trained) + 1)
    own = [Text(prompt.ids, answer[:tokens], answer[tokens:]) for prompt, answer in zip(prompts, ours)]
    sized = drafter if length == trained else rebuild(drafter, with_length(drafter.shape, length))
    if served is not None and served.shape.draft_length != length:
        served = rebuild(served, with_length(served.shape, length))
    special = [token for token in getattr(target.tokenizer, "all_special_ids", ())]
    bench = Bench(sized, special, target.spec.num_layers - 1, served, differences)
    hypotheses = catalogue(bench)
    variants = [item.build() for item in hypotheses]
    states = states_of(target, own, drafter.shape.feature_layers)
    offline = replay(bench.variant(drafter), own, states, target.tokenizer_size)
    alone = all(answer.alone for answer in answers)
    covered = coverage([prompt.ids for prompt in prompts], answers, length) if alone else Coverage(
        tuple(len(answer.token_ids) for answer in answers))
    texts = served_texts(prompts, answers, ours, covered.drafted)
    states = states_of(target, texts, needed_layers(variants))
    predictions = [replay(variant, texts, states, target.tokenizer_size) for variant in variants]
    exam = Exam(prompts, counts, length, offline, predictions[0], compare_texts(target, prompts, answers, ours),
                traffic, alone, hypotheses, variants, predictions, texts=texts, coverage=covered)
    exam.ranked = rank(counts, exam.named(), length)
    if alone and not covered.plain:
        kept = accepted_by_round(variants[0], texts, states, target.tokenizer_size)
        exam.silent = silent_limit([len(text.prompt) for text in texts], [len(text.answer) for text in texts], counts,
                                   kept, length)
    return exam
