"""Expected rounds against exact enumeration of a tiny vocabulary and against decoding."""

import itertools
from dataclasses import replace
from typing import Any, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspec.data.batch import Sample
from deepspec.data.sources import encode_samples
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import SharedWeights
from deepspec.evaluation.analytic import AnchorValues, survival
from deepspec.evaluation.answers import Answer, answer_values, continued, round_starts, teacher_forced_values
from deepspec.evaluation.bootstrap import acceptance_length_interval
from deepspec.evaluation.drafted import anchors_per_sample, drafted_values, fixed_anchors
from deepspec.evaluation.metrics import AcceptanceCounts, acceptance_length, conditional_acceptance
from deepspec.objective import acceptance_rate
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.tiny import tiny_drafter, tiny_target

K, VOCAB, EOS = 3, 6, 1
PROMPT = (3, 5, 4, 2, 5)  # the last token is the anchor
STOPS = (EOS,)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    target = tiny_target(vocab=VOCAB, padded=8, eos=EOS, scale=4.0)
    return target, tiny_drafter(target, block_size=K)


def distributions(target: Any, drafter: Any, prefix: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """p and q after ``PROMPT`` and drafted ``prefix``, by way of the decoder's own parts for a single row."""
    text = torch.tensor([*PROMPT, *prefix])
    hidden = target.encode(text, [len(text)])
    expected = target.logits(hidden.last_hidden[-1:])
    anchor = len(PROMPT) - 1
    context = drafter.project_context(hidden.features[:anchor])
    keys, values = drafter.context_kv(context, torch.arange(anchor))
    blocks = drafter.block_hidden(text[anchor:anchor + 1], torch.tensor([anchor]), keys[:, None], values[:, None],
                                  torch.tensor([anchor]))
    previous = text[-1:]
    logits = drafter.base_logits(blocks[:, len(prefix)]) + drafter.sequential.transition_bias(previous)
    logits[:, VOCAB:] = float("-inf")
    return tuple(torch.softmax(values[0].double() / sampling.temperature, dim=-1) for values in (expected, logits))


def enumerated(target: Any, drafter: Any, sampling: Sampling) -> tuple[float, float, dict[tuple[int, ...], Any]]:
    """Expected tokens of a round at the end of ``PROMPT``, the biased product along drafts, and every p and q."""
    tokens, product, table = 1.0, 0.0, {}
    level: list[tuple[tuple[int, ...], float, float, float]] = [((), 1.0, 1.0, 1.0)]  # prefix, min(p, q), q, rates
    for _ in range(K):
        following = []
        for prefix, kept, drafted, rates in level:
            p, q = table[prefix] = distributions(target, drafter, prefix, sampling)
            both, rate = torch.minimum(p, q), float(acceptance_rate(q, p))
            tokens += kept * (rate - float(both[EOS]))
            product += drafted * rates * rate
            following += [(prefix + (token,), kept * float(both[token]), drafted * float(q[token]), rates * rate)
                          for token in range(VOCAB) if token not in STOPS]
        level = following
    return tokens, 1.0 + product, table


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafted_prefixes_agree_with_enumeration(models: tuple[Any, Any], temperature: float) -> None:
    target, drafter = models
    sampling = Sampling(temperature=temperature)
    exact, biased, _ = enumerated(target, drafter, sampling)
    ids = torch.tensor([*PROMPT, 3])
    mask = torch.arange(len(ids)) >= len(PROMPT) - 1
    copies = [Sample(f"s{i}", "math", ids, mask) for i in range(1500)]
    values = drafted_values(target, drafter, copies, sampling, num_anchors=4, batch_size=500)
    assert len(values) == 1500 and set(values.position) == {len(PROMPT) - 1}
    error = values.lengths.std() / 1500 ** 0.5
    assert abs(values.lengths.mean() - exact) < 4 * error < 0.1
    assert abs(exact - biased) > 2 * error, "the enumeration could not tell the estimator from the naive product"


def text_of(answer: Sequence[int]) -> Answer:
    ended = answer[-1] in STOPS
    return Answer("-".join(map(str, answer)), "math", PROMPT[:-1], (PROMPT[-1], *answer), ended)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_agree_with_enumeration(models: tuple[Any, Any], temperature: float) -> None:
    """The mean over all continuations, each with the target's probability, is the exact expectation: no tolerance."""
    target, drafter = models
    sampling = Sampling(temperature=temperature)
    exact, _, table = enumerated(target, drafter, sampling)
    answers, chances = [], []
    for path in itertools.product(range(VOCAB), repeat=K):
        end = next((place for place, token in enumerate(path) if token in STOPS), None)
        path = path if end is None else path[:end + 1]
        if text_of(path) in answers:
            continue
        chance = 1.0
        for place, token in enumerate(path):
            chance *= float(table[path[:place]][0][token])
        answers.append(text_of(path))
        chances.append(chance)
    assert sum(chances) == pytest.approx(1.0)
    values = answer_values(target, drafter, answers, sampling, token_budget=300)
    first = values.select(values.position == len(PROMPT) - 1)
    assert set(first.weight) == {1.0}
    weights = dict(zip([item.id for item in answers], chances))
    mean = sum(weights[name] * length for name, length in zip(first.sample.tolist(), first.lengths))
    assert mean == pytest.approx(exact, abs=1e-5)


def decoded(target: Any, drafter: Any, mode: str, sampling: Sampling, prompts: int, tokens: int) -> list[Any]:
    requests = [DecodeRequest(f"p{i}#0", (3 + i % 3, 4, 5), "math") for i in range(prompts)]
    decoder = SpeculativeDecoder(target, drafter, sampling, batch_size=128, max_new_tokens=tokens, mode=mode)
    results = {item.id: item for item in decoder.decode(requests)}
    return [(request, results[request.id]) for request in requests]


def answers_of(pairs: Sequence[Any]) -> list[Answer]:
    return [Answer(request.id, request.domain, request.prompt_ids, result.token_ids, result.finish_reason == "stop")
            for request, result in pairs]


def drafter_of(target: Any, algorithm: str) -> Any:
    """A random drafter, in one pass per block or in one per token."""
    if algorithm == "dspark":
        return tiny_drafter(target, block_size=4)
    shape = replace(tiny_drafter(target, block_size=4).shape, algorithm=algorithm, num_layers=1, head="none",
                    markov_rank=0, confidence_head=False, confidence_with_markov=False)
    torch.manual_seed(5)
    shared = SharedWeights(target.embed_weight, target.lm_head_weight, "tiny")
    return build_drafter(shape, shared).eval().requires_grad_(False)


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_agrees_with_sampled_decoding_within_its_interval(algorithm: str) -> None:
    """Rounds of real decoding begin more often where text is hard to guess; the weights of the anchors know that."""
    target = tiny_target(vocab=24, padded=32, eos=EOS, scale=5.0)
    drafter = drafter_of(target, algorithm)
    sampled = AcceptanceCounts.of([item for _, item in decoded(target, drafter, "fixed", Sampling(), 240, 40)], 4)
    interval = acceptance_length_interval(sampled, 1000)
    texts = continued(target, answers_of(decoded(target, drafter, "none", Sampling(), 240, 40)), Sampling(),
                      length=4, batch_size=128)
    values = answer_values(target, drafter, texts, Sampling())
    expected = values.counts()
    assert interval is not None and interval[0] < acceptance_length(expected) < interval[1]
    for found, wanted, count in zip(conditional_acceptance(expected), conditional_acceptance(sampled),
                                    sampled.reached.sum(axis=0)):
        assert abs(found - wanted) < 4 * (wanted * (1 - wanted) / count) ** 0.5 + 0.01
    assert expected.rounds.sum() == pytest.approx(sampled.rounds.sum(), rel=0.03)
    assert float(expected.accepted.sum()) == pytest.approx(float(expected.survived.sum()))


def test_greedy_rounds_are_those_of_decoding() -> None:
    target = tiny_target(vocab=24, padded=32, eos=EOS)
    drafter = tiny_drafter(target, block_size=4)
    greedy = Sampling(temperature=0.0)
    answers = answers_of(decoded(target, drafter, "none", greedy, 6, 30))
    rounds = AcceptanceCounts.of([item for _, item in decoded(target, drafter, "fixed", greedy, 6, 30)], 4)
    answers = continued(target, answers, greedy, length=4, batch_size=4)
    assert {item.extra for item in answers if not item.ended} == {3}
    expected = answer_values(target, drafter, answers, greedy).counts()
    assert expected.prompts.tolist() == rounds.prompts.tolist()
    for name in ("rounds", "drafted", "accepted", "bonus"):
        assert getattr(expected, name).tolist() == getattr(rounds, name).tolist(), name
    assert expected.survived.tolist() == rounds.survived.tolist()


def test_cut_answers_go_on_as_a_larger_budget_would() -> None:
    target = tiny_target(vocab=24, padded=32, eos=EOS, scale=5.0)
    short, long = (answers_of(decoded(target, None, "none", Sampling(seed=4), 20, tokens)) for tokens in (10, 13))
    found = continued(target, short, Sampling(seed=4), length=4, batch_size=3)
    assert [item.token_ids for item in found] == [item.token_ids for item in long]
    assert [item.ended for item in found] == [item.ended for item in long]
    assert {item.extra for item in found if len(item.token_ids) > 10} <= {1, 2, 3}


def test_teacher_forced_is_what_training_logs(models: tuple[Any, Any]) -> None:
    from deepspec.objective.losses import teacher_forced_lengths

    target, drafter = models
    sample = Sample("a", "math", torch.tensor([3, 4, 5, 3, 2, 4, 5, 5, 3]), torch.arange(9) > 2)
    features = encode_samples(target, [sample])
    values = teacher_forced_values(target, drafter, features, Sampling(), num_anchors=100, seed=0)
    assert values.position.tolist() == [3, 4, 5, 6, 7]
    mask = torch.from_numpy(values.reach > 0)
    lengths = teacher_forced_lengths(torch.from_numpy(values.rate) * mask)
    assert values.lengths == pytest.approx(lengths.numpy())
    assert mask.sum(dim=1).tolist() == [3, 3, 3, 2, 1]


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_along_drafts_and_along_answers_agree_where_nothing_was_drafted_yet(algorithm: str) -> None:
    """The first position depends on the text alone, read once in one piece and once step by step."""
    target = tiny_target(vocab=24, padded=32, eos=EOS, scale=5.0)
    drafter = drafter_of(target, algorithm)
    answers = answers_of(decoded(target, drafter, "none", Sampling(seed=1), 12, 12))
    samples = [replace(item.sample, sample_id=item.id) for item in answers if len(item.token_ids) > 1]
    values = drafted_values(target, drafter, samples, Sampling(), num_anchors=50, batch_size=5)
    along = answer_values(target, drafter, answers, Sampling())
    first = {(name, place): rate for name, place, rate in zip(
        along.sample.tolist(), along.position.tolist(), along.rate[:, 0].tolist())}
    assert len(values) == len(first) > 50
    for name, place, rate in zip(values.sample.tolist(), values.position.tolist(), values.rate[:, 0].tolist()):
        assert rate == pytest.approx(first[name, place], abs=1e-5)


def test_the_same_anchors_and_drafts_whatever_the_batch(models: tuple[Any, Any]) -> None:
    target, drafter = models
    torch.manual_seed(0)
    samples = [Sample(f"s{i}", "code", torch.randint(2, VOCAB, (8 + i,)), torch.arange(8 + i) > 2) for i in range(7)]
    parts = [drafted_values(target, drafter, samples, Sampling(seed=5), num_anchors=4, seed=1, batch_size=size)
             for size in (1, 3, 7)]
    for other in parts[1:]:
        assert parts[0].sample.tolist() == other.sample.tolist()
        assert parts[0].position.tolist() == other.position.tolist()
        assert parts[0].lengths == pytest.approx(other.lengths, abs=1e-5)
    assert parts[0].position.tolist() == sum(fixed_anchors(samples, 4, 1), [])
    moved = drafted_values(target, drafter, samples, Sampling(seed=6), num_anchors=4, seed=1)
    assert not np.allclose(moved.lengths, parts[0].lengths)


def test_as_many_anchors_as_asked_for() -> None:
    samples = [Sample(str(i), "math", torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))
               for i, size in enumerate((3, 11, 21))]  # 2, 10 and 20 anchors
    for total in (1, 3, 6, 9, 22, 25, 32):
        each = anchors_per_sample(samples, total)
        assert sum(min(each, count) for count in (2, 10, 20)) >= total
        assert sum(min(each - 1, count) for count in (2, 10, 20)) < total
    assert anchors_per_sample(samples, 100) == 20


def test_rounds_begin_where_others_end() -> None:
    certain = np.zeros((6, 3))
    certain[:, 2] = 1.0  # every round yields three tokens
    assert round_starts(certain).tolist() == [1, 0, 0, 1, 0, 0]
    even = np.full((400, 3), 1 / 3)
    assert round_starts(even)[-1] == pytest.approx(1 / 2, abs=1e-6)  # one in two tokens, rounds yield 2 on average


def test_counts_pool_conversations() -> None:
    values = AnchorValues(
        np.array(["a#0", "a#1", "b"]), np.array(["math"] * 3), np.zeros(3, dtype=np.int64), np.array([1.0, 2.0, 0.5]),
        np.array([[1.0, 0.5]] * 3), np.array([[0.8, 0.4]] * 3), np.array([[0.0, 0.1]] * 3))
    counts = values.counts()
    assert counts.prompts.tolist() == ["a", "b"] and counts.rounds.tolist() == [3.0, 0.5]
    assert acceptance_length(counts) == pytest.approx(1 + 0.8 + 0.5 * (0.4 - 0.1))
    assert values.lengths.tolist() == pytest.approx([1.95] * 3)
    doubled = replace(values, weight=2 * values.weight).counts()
    assert acceptance_length(doubled) == pytest.approx(1.95)


def test_survival_without_mass() -> None:
    ratios = survival(torch.tensor([0.2, 0.0, 0.5, 0.0]), torch.tensor([0.4, 0.3, 0.0, 0.0]))
    assert ratios.tolist() == pytest.approx([0.5, 0.0, 1.0, 0.0])
