"""Decoding with EAGLE-3 and MTP: lossless, whatever the batch, and as long as an overfitted drafter can make it."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_decoder import Informed, LinearCost, answers, decoder, joint, plain

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.collate import collate
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.recurrent import RecurrentDraftState
from deepspec.decoding.types import DecodeRequest
from deepspec.objective import drafter_loss, window_weights
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.tiny import prompts, recurrent_drafter, recurrent_target

ALGORITHMS = ("eagle3", "mtp")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_greedy_equals_plain_decoding(algorithm: str) -> None:
    target, requests, sampling = recurrent_target()[algorithm], prompts(9), Sampling(temperature=0.0)
    drafter = recurrent_drafter(target, algorithm)
    known = plain(target, requests, 24, sampling)
    for mode in ("none", "fixed", "scheduled"):
        assert answers(decoder(target, drafter, sampling, mode).decode(requests)) == known


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_accepted_prefixes_leave_the_right_context(algorithm: str) -> None:
    """Blocks of every accepted length; each chain is the one of a fresh state that saw the whole verified text."""
    target, requests, sampling = recurrent_target(eos=7)[algorithm], prompts(8), Sampling(temperature=0.0)
    drafter = recurrent_drafter(target, algorithm)
    known = plain(target, requests, 24, sampling)
    informed = Informed(target, drafter, sampling, batch_size=5, max_new_tokens=24, mode="fixed", record=True)
    informed.known = known
    results = list(informed.decode(requests))
    assert answers(results) == known
    assert {record.accepted for item in results for record in item.rounds} >= {0, 1, 2, 3}
    by_id = {item.id: item for item in requests}
    for item in results:
        text = by_id[item.id].prompt_ids + item.token_ids
        anchor = len(by_id[item.id].prompt_ids)
        for record in item.rounds:
            features = target.encode(torch.tensor(text[:anchor]), [anchor]).features
            fresh = RecurrentDraftState(drafter, 1, tokenizer_size=target.tokenizer_size)
            fresh.append(0, features, text[1:anchor + 1])
            proposal = fresh.propose([0], [text[anchor]], torch.zeros(1, 4), sampling)
            np.testing.assert_allclose(record.detail.hidden[0], proposal.hidden[0, 0].numpy(), atol=2e-2, rtol=2e-2)
            anchor += record.accepted + record.bonus


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sampled_answer_does_not_depend_on_its_batch(algorithm: str) -> None:
    target, requests, sampling = recurrent_target()[algorithm], prompts(9), Sampling(temperature=1.0, seed=5)
    drafter = recurrent_drafter(target, algorithm)
    first = answers(decoder(target, drafter, sampling, "fixed", batch_size=1).decode(requests))
    assert answers(decoder(target, drafter, sampling, "fixed", batch_size=4).decode(requests)) == first
    assert answers(decoder(target, drafter, sampling, "fixed", batch_size=9).decode(requests[::-1])) == first


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["fixed", "scheduled"])
def test_end_to_end_distribution(algorithm: str, mode: str) -> None:
    vocab, prompt, count, sampling = 6, (3, 4, 5), 8_000, Sampling(temperature=0.5, top_k=3, seed=1)
    target = recurrent_target(vocab=vocab, padded=8, eos=7, scale=8.0)[algorithm]
    drafter = recurrent_drafter(target, algorithm, block_size=2)
    scheduler = ThroughputScheduler(LinearCost(base=500.0, slope=1.0, draft=0.0), 2, policy="lagged")
    requests = [DecodeRequest(f"r{i}", prompt, max_new_tokens=2 + i % 2) for i in range(count)]
    run = decoder(target, drafter, sampling, mode, batch_size=256, tokens=4, scheduler=scheduler)
    results = list(run.decode(requests))
    accepted = {record.accepted for item in results for record in item.rounds}
    assert accepted == {0, 1, 2} if mode == "fixed" else accepted >= {0, 1}
    counts = np.bincount([item.token_ids[0] * vocab + item.token_ids[1] for item in results], minlength=vocab ** 2)
    expected = joint(target, prompt, sampling, vocab)
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    assert stats.chisquare(counts[used], expected[used] * count / expected[used].sum()).pvalue > 1e-3


def test_prompts_fed_in_parts_and_a_slot_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampling = recurrent_target()["eagle3"], Sampling(temperature=0.0)
    requests = prompts(7, longest=60)
    drafter = recurrent_drafter(target, "eagle3")
    known = [item.rounds for item in decoder(target, drafter, sampling, "fixed", tokens=12).decode(requests)]
    monkeypatch.setattr("deepspec.decoding.rows.PREFILL_TOKENS", 10)
    fed = list(decoder(target, drafter, sampling, "fixed", tokens=12, batch_size=1).decode(requests))
    assert sorted(str(item.rounds) for item in fed) == sorted(map(str, known))


def overfitted(target: Any, algorithm: str, request: DecodeRequest, answer: tuple[int, ...], steps: int) -> Any:
    """A drafter that has seen one conversation many times, trained through the real collator and objective."""
    drafter = recurrent_drafter(target, algorithm).requires_grad_(True)
    ids = torch.tensor(request.prompt_ids + answer)
    encoded = target.encode(ids, [len(ids)])
    sample = Sample("only", "chat", ids, torch.arange(len(ids)) >= len(request.prompt_ids))
    batch = collate([FeatureSample(sample, encoded.features, encoded.last_hidden)], num_anchors=64,
                    draft_length=drafter.shape.trained_length, seed=0, epoch=0)
    objective = ObjectiveConfig(ce_weight=1.0, tv_weight=0.0, decay=4.4814)
    denominators = window_weights(batch.blocks, objective, drafter.shape.trained_length)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        drafter_loss(drafter(batch), batch, drafter.shared, objective, denominators, drafter.shape).loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_overfitted_drafter_drafts_all_it_can(algorithm: str) -> None:
    """Greedy: all K accepted in nearly every round; features of a neighbouring token ruin it."""
    target, sampling = recurrent_target(eos=60)[algorithm], Sampling(temperature=0.0)
    request = DecodeRequest("only", (5, 9, 14, 3, 22), max_new_tokens=41)
    answer = plain(target, [request], 41, sampling)["only"][0]
    drafter = overfitted(target, algorithm, request, answer, steps=120)
    (result,) = decoder(target, drafter, sampling, "fixed", tokens=41).decode([request])
    assert result.token_ids == answer
    lengths = [record.accepted + record.bonus for record in result.rounds]
    assert np.mean(lengths) > 4.8  # of 5
    wrong = decoder(target, drafter, sampling, "fixed", tokens=41)
    original = RecurrentDraftState.append

    def shifted(self: Any, row: int, features: torch.Tensor, next_ids: Any) -> None:
        original(self, row, features.roll(1, 0) * (1.0 if len(features) > 1 else -1.0), next_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentDraftState, "append", shifted)
        (other,) = wrong.decode([request])
    assert other.token_ids == answer and len(other.rounds) > 1.5 * len(result.rounds)


def test_features_without_the_ids_that_follow_are_refused() -> None:
    target = recurrent_target()["eagle3"]
    state = RecurrentDraftState(recurrent_drafter(target, "eagle3"), 1, tokenizer_size=48)
    with pytest.raises(ValueError, match="3 rows of features need as many ids"):
        state.append(0, torch.zeros(3, 128), [4, 5])
