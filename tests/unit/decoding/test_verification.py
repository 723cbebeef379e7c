"""The acceptance rule leaves the target's distribution as it is: counted outcomes against exact probabilities."""

import numpy as np
import pytest
import torch
from scipy import stats

from deepspec.calibration import survival_probability
from deepspec.decoding.types import DraftProposal
from deepspec.decoding.verification import accept_draft, analytic_acceptance, sample_residual, verify
from deepspec.scheduling import schedule_budget, schedule_prefixes
from deepspec.targets.sampling import Sampling, pick, target_probs

SAMPLES = 100_000
STEPS = 3


def chain(vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a Markov target and of a Markov drafter, [V, V]: row = previous token."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(vocab, vocab, generator=generator)
    return target, target + torch.randn(vocab, vocab, generator=generator)


def propose(table: torch.Tensor, anchors: torch.Tensor, length: int, sampling: Sampling) -> DraftProposal:
    probs, ids, previous = [], [], anchors
    for _ in range(length):
        probs.append(target_probs(table[previous], sampling))
        previous = pick(probs[-1], torch.rand(len(anchors), dtype=torch.float64))
        ids.append(previous)
    drafted, distributions = torch.stack(ids, dim=1), torch.stack(probs, dim=1)
    before = torch.cat([anchors[:, None], drafted[:, :-1]], dim=1)
    return DraftProposal(rows=tuple(range(len(anchors))), ids=drafted,
                         token_probs=distributions.gather(2, drafted[..., None])[..., 0], probs=distributions,
                         confidence_logits=None, hidden=distributions, previous_ids=before)


def schedule(name: str, confidence: np.ndarray) -> np.ndarray:
    """Verified lengths of groups of 20 requests."""
    if name == "fixed":
        return np.full(len(confidence), confidence.shape[1])
    lengths, lagged = [], None
    for group in survival_probability(confidence).reshape(-1, 20, confidence.shape[1]):
        if name == "early_stop":
            lengths.append(schedule_prefixes(group, lambda size: 1.0 / (15.0 + np.asarray(size))).lengths)
        else:
            lengths.append(schedule_budget(group, lagged, lambda size: 1.0 / np.ceil(np.asarray(size) / 25)).lengths)
            lagged = group
    return np.concatenate(lengths)


def decode(target: torch.Tensor, draft: torch.Tensor, sampling: Sampling, policy: str) -> torch.Tensor:
    """First STEPS tokens [n, STEPS] of SAMPLES chains that start at token 0, by real proposals and verification."""
    length = 2
    answers = torch.zeros(SAMPLES, STEPS + length + 1, dtype=torch.int64)
    filled = torch.zeros(SAMPLES, dtype=torch.int64)
    # A confidence that depends on the previous token, as the real one does.
    trust = torch.sigmoid(2.0 * torch.randn(len(target), generator=torch.Generator().manual_seed(7)))
    while True:
        rows = (filled < STEPS).nonzero()[:, 0]
        rows = rows[:len(rows) - len(rows) % 20] if len(rows) >= 20 else rows.new_zeros(0)
        if not len(rows):
            return answers[filled >= STEPS, :STEPS]
        anchors = torch.where(filled[rows] > 0, answers[rows, (filled[rows] - 1).clamp(min=0)], 0)
        proposal = propose(draft, anchors, length, sampling)
        lengths = torch.from_numpy(schedule(policy, trust[proposal.previous_ids].numpy()))
        starts = torch.cumsum(lengths + 1, 0) - lengths - 1
        inputs = torch.cat([anchors[:, None], proposal.ids], dim=1)
        verified = torch.arange(length + 1) <= lengths[:, None]
        outcome = verify(target[inputs[verified]], starts, lengths, proposal, torch.arange(len(rows)),
                         torch.rand(len(rows), length, dtype=torch.float64),
                         torch.rand(len(rows), length + 1, dtype=torch.float64), sampling)
        for k in range(length):
            taken = outcome.accepted > k
            answers[rows[taken], filled[rows[taken]] + k] = proposal.ids[taken, k]
        answers[rows, filled[rows] + outcome.accepted] = outcome.emitted
        filled[rows] += outcome.accepted + 1


@pytest.mark.parametrize("policy", ["fixed", "early_stop", "lagged"])
@pytest.mark.parametrize("vocab, sampling", [
    (5, Sampling(temperature=1.0)), (5, Sampling(temperature=0.5)), (5, Sampling(temperature=1.0, top_k=2)),
    (8, Sampling(temperature=1.0, top_p=0.8)),
])
def test_output_distribution_is_the_targets(policy: str, vocab: int, sampling: Sampling) -> None:
    torch.manual_seed(vocab)
    target, draft = chain(vocab, seed=vocab)
    answers = decode(target, draft, sampling, policy)
    probs = target_probs(target, sampling).double()
    joint = (probs[0][:, None, None] * probs[:, :, None] * probs[None]).reshape(-1)
    cells = answers @ torch.tensor([vocab ** 2, vocab, 1])
    counts = torch.bincount(cells, minlength=vocab ** 3).double()
    assert counts[joint == 0].sum() == 0
    expected = joint * len(answers)
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).numpy()
    wanted = torch.cat([expected[large], expected[~large].sum()[None]]).numpy()
    used = wanted > 0
    assert stats.chisquare(observed[used], wanted[used] * observed.sum() / wanted[used].sum()).pvalue > 1e-3


def test_tokens_drawn_from_one_distribution_and_tested_against_another_are_caught() -> None:
    """The same count rejects a draft whose stated probabilities are not those its tokens came from."""
    torch.manual_seed(0)
    target, draft = chain(5, seed=5)
    sampling = Sampling(temperature=1.0)
    anchors = torch.zeros(SAMPLES, dtype=torch.int64)
    proposal = propose(draft, anchors, 1, Sampling(temperature=0.7))
    stated = target_probs(draft[:1], sampling).expand(SAMPLES, -1)[:, None]
    wrong = DraftProposal(rows=proposal.rows, ids=proposal.ids, token_probs=stated[:, 0].gather(1, proposal.ids),
                          probs=stated, confidence_logits=None, hidden=stated, previous_ids=proposal.previous_ids)
    inputs = torch.cat([anchors[:, None], proposal.ids], dim=1).reshape(-1)
    outcome = verify(target[inputs], torch.arange(SAMPLES) * 2, torch.ones(SAMPLES, dtype=torch.int64), wrong,
                     torch.arange(SAMPLES), torch.rand(SAMPLES, 1, dtype=torch.float64),
                     torch.rand(SAMPLES, 2, dtype=torch.float64), sampling)
    first = torch.where(outcome.accepted > 0, proposal.ids[:, 0], outcome.emitted)
    expected = target_probs(target[:1], sampling)[0].double().numpy() * SAMPLES
    counts = torch.bincount(first, minlength=5).numpy()
    assert stats.chisquare(counts, expected * SAMPLES / expected.sum()).pvalue < 1e-6


def test_first_rejection_discards_the_rest_and_lengths_end_a_row() -> None:
    target_at = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    lengths = torch.tensor([3, 3, 1, 3])
    accepted = accept_draft(target_at, torch.ones(4, 3), lengths, torch.full((4, 3), 0.5, dtype=torch.float64))
    assert accepted.tolist() == [1, 3, 1, 0]


def test_acceptance_probability_is_the_ratio() -> None:
    uniforms = torch.tensor([[0.39], [0.41], [0.99]], dtype=torch.float64)
    accepted = accept_draft(torch.tensor([[0.2], [0.2], [0.9]]), torch.tensor([[0.5], [0.5], [0.5]]),
                            torch.ones(3, dtype=torch.int64), uniforms)
    assert accepted.tolist() == [1, 0, 1]


def test_residual_of_equal_distributions_is_the_target() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.3, 0.0]])
    draft = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    uniforms = torch.tensor([0.99, 0.99], dtype=torch.float64)
    assert sample_residual(rows, draft, uniforms).tolist() == [1, 0]


def test_analytic_acceptance() -> None:
    rate = analytic_acceptance(torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.5, 0.5]]),
                               torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]))
    assert rate.tolist() == pytest.approx([0.8, 0.0, 1.0])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_p=0.8)])
def test_judging_in_turn_is_judging_all(sampling: Sampling) -> None:
    """Recording or not, with ragged lengths, the same tokens are accepted and emitted."""
    target, draft = chain(50, seed=11)
    generator = torch.Generator().manual_seed(5)
    anchors = torch.randint(50, (400,), generator=generator)
    proposal = propose(draft, anchors, 3, sampling)
    lengths = torch.randint(4, (400,), generator=generator)
    lengths[0] = 3
    starts = torch.cumsum(lengths + 1, 0) - lengths - 1
    flat = torch.cat([torch.cat([anchors[i:i + 1], proposal.ids[i, :lengths[i]]]) for i in range(400)])
    accept, emit = (torch.rand(400, width, dtype=torch.float64, generator=generator) for width in (3, 4))
    found = [verify(target[flat], starts, lengths, proposal, torch.arange(400), accept, emit, sampling, analytic=rate)
             for rate in (False, True)]
    assert torch.equal(found[0].accepted, found[1].accepted) and torch.equal(found[0].emitted, found[1].emitted)
    assert found[0].analytic_rate is None and 0 < int(found[0].accepted.sum()) < int(lengths.sum())
    assert {0, 1, 2, 3} == set(found[0].accepted.tolist())
