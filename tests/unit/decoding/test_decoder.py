"""Decoding with real tiny models: greedy answers token by token, sampled ones by counting, whatever the batch."""

from dataclasses import replace
from typing import Any, Iterable, Optional

import numpy as np
import pytest
import torch
from scipy import stats

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.types import DecodeRequest, DecodeResult, DraftProposal
from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.generate import GenerateRequest, generate
from deepspec.targets.sampling import Sampling, target_probs
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target

HEADS: list[dict[str, Any]] = [
    {}, {"head": "gated"}, {"head": "rnn"}, {"sample_from_anchor": False},
    {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
    {"algorithm": "dflash", "head": "none", "markov_rank": 0, "confidence_head": False,
     "confidence_with_markov": False},
]


class LinearCost:
    """Seconds of a round: ``base + slope * B``, drafting apart."""

    def __init__(self, base: float = 10.0, slope: float = 1.0, draft: float = 1.0) -> None:
        self.base, self.slope, self.draft = base, slope, draft

    def verify_curve(self, requests: int) -> Any:
        return lambda size: self.base + self.slope * np.asarray(size, dtype=np.float64)

    def draft_seconds(self, requests: int) -> float:
        return self.draft


def plain(target: FrozenTarget, requests: list[DecodeRequest], tokens: int, sampling: Sampling) -> dict[str, Any]:
    asked = [GenerateRequest(item.id, item.prompt_ids, item.max_new_tokens or tokens) for item in requests]
    return {item.id: (item.response_ids, item.finish_reason) for item in generate(target, asked, sampling, 4)}


def answers(results: Iterable[DecodeResult]) -> dict[str, Any]:
    return {item.id: (item.token_ids, item.finish_reason) for item in results}


def decoder(target: FrozenTarget, drafter: Any, sampling: Sampling, mode: str, batch_size: int = 4, tokens: int = 24,
            **options: Any) -> SpeculativeDecoder:
    if mode == "scheduled" and "scheduler" not in options:
        options["scheduler"] = ThroughputScheduler(LinearCost(), drafter.shape.draft_length)
    return SpeculativeDecoder(target, drafter, sampling, batch_size=batch_size, max_new_tokens=tokens, mode=mode,
                              **options)


class Informed(SpeculativeDecoder):
    """Drafts the known answer with some tokens spoilt, so that blocks of every accepted length occur."""

    known: dict[str, Any]

    def _propose(self) -> Optional[DraftProposal]:
        proposal = super()._propose()
        if proposal is None:
            return None
        ids = proposal.ids.clone()
        for i, slot in enumerate(proposal.rows):
            row = self._rows[slot]
            answer = self.known[row.request.id][0]
            done = len(row.ids) - len(row.request.prompt_ids)
            for k, token in enumerate(answer[done:done + ids.shape[1]]):
                ids[i, k] = token if (done * 7 + k * 3) % 5 else (token + 1) % 48
        return replace(proposal, ids=ids)


@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_greedy_equals_plain_decoding(changes: dict[str, Any]) -> None:
    target, requests, sampling = tiny_target(), prompts(9), Sampling(temperature=0.0)
    drafter = tiny_drafter(target, **changes)
    known = plain(target, requests, 24, sampling)
    assert {reason for _, reason in known.values()} == {"stop", "length"} or changes
    for mode in ("none", "fixed", "scheduled"):
        assert answers(decoder(target, drafter, sampling, mode).decode(requests)) == known


@pytest.mark.parametrize("mode", ["fixed", "scheduled"])
def test_greedy_with_long_accepted_prefixes(mode: str) -> None:
    target, requests, sampling = tiny_target(eos=7), prompts(12), Sampling(temperature=0.0)
    requests = [replace(item, max_new_tokens=5 + 3 * i) for i, item in enumerate(requests)]
    known = plain(target, requests, 24, sampling)
    drafter = tiny_drafter(target)
    scheduler = ThroughputScheduler(LinearCost(draft=0.1), 4) if mode == "scheduled" else None
    informed = Informed(target, drafter, sampling, batch_size=5, max_new_tokens=24, mode=mode, scheduler=scheduler)
    informed.known = known
    results = list(informed.decode(requests))
    assert answers(results) == known
    assert {record.accepted for item in results for record in item.rounds} >= {0, 1, 2, 3}
    for item in results:  # tokens = prefill's + what the rounds say, unless the budget cut the last round
        gained = 1 + sum(record.accepted + record.bonus for record in item.rounds)
        assert gained == len(item.token_ids) or (gained > len(item.token_ids) and item.finish_reason == "length")


@pytest.mark.parametrize("mode", ["none", "fixed"])
def test_a_sampled_answer_does_not_depend_on_its_batch(mode: str) -> None:
    target, requests, sampling = tiny_target(), prompts(9), Sampling(temperature=1.0, seed=5)
    drafter = tiny_drafter(target)
    first = answers(decoder(target, drafter, sampling, mode, batch_size=1).decode(requests))
    assert answers(decoder(target, drafter, sampling, mode, batch_size=4).decode(requests)) == first
    assert answers(decoder(target, drafter, sampling, mode, batch_size=9).decode(requests[::-1])) == first
    if mode == "none":
        assert first == plain(target, requests, 24, sampling)


def test_a_schedule_is_the_same_every_time() -> None:
    target, requests, sampling = tiny_target(), prompts(9), Sampling(temperature=1.0, seed=5)
    scheduled = decoder(target, tiny_drafter(target), sampling, "scheduled")
    assert answers(scheduled.decode(requests)) == answers(scheduled.decode(requests))


def joint(target: FrozenTarget, prompt: tuple[int, ...], sampling: Sampling, vocab: int) -> np.ndarray:
    """Exact probabilities of the first two tokens."""
    texts = [prompt] + [prompt + (token,) for token in range(vocab)]
    flat = torch.tensor([token for text in texts for token in text])
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    hidden = target.encode(flat, [len(text) for text in texts]).last_hidden[ends]
    probs = target_probs(target.logits(hidden), sampling)[:, :vocab].double()
    return (probs[0][:, None] * probs[1:]).reshape(-1).numpy()


@pytest.mark.parametrize("mode, policy", [
    ("fixed", "early_stop"), ("scheduled", "early_stop"), ("scheduled", "lagged")])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.5, top_k=3, seed=1)], ids=str)
def test_end_to_end_distribution(mode: str, policy: str, sampling: Sampling) -> None:
    vocab, prompt, count = 6, (3, 4, 5), 12_000
    target = tiny_target(vocab=vocab, padded=8, eos=7, scale=8.0)
    drafter = tiny_drafter(target, block_size=2)
    scheduler = ThroughputScheduler(LinearCost(base=500.0, slope=1.0, draft=0.0), 2, policy=policy)
    requests = [DecodeRequest(f"r{i}", prompt, max_new_tokens=2 + i % 2) for i in range(count)]
    run = decoder(target, drafter, sampling, mode, batch_size=256, tokens=4, scheduler=scheduler)
    results = list(run.decode(requests))
    verified = {record.verified for item in results for record in item.rounds if record.drafted}
    assert verified == {2} if mode == "fixed" else len(verified) > 1
    counts = np.bincount([item.token_ids[0] * vocab + item.token_ids[1] for item in results], minlength=vocab ** 2)
    expected = joint(target, prompt, sampling, vocab)
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    assert stats.chisquare(counts[used], expected[used] * count / expected[used].sum()).pvalue > 1e-3


def test_context_is_what_lies_before_the_anchor() -> None:
    """Hidden states of every recorded block, recomputed from one pass over the finished text."""
    target, requests, sampling = tiny_target(), prompts(6), Sampling(temperature=1.0, seed=2)
    drafter = tiny_drafter(target)
    by_id = {item.id: item for item in requests}
    for item in decoder(target, drafter, sampling, "fixed", batch_size=3, record=True).decode(requests):
        text = by_id[item.id].prompt_ids + item.token_ids
        anchor = len(by_id[item.id].prompt_ids)
        for record in item.rounds:
            assert record.detail is not None and record.detail.previous_ids[0] == text[anchor]
            features = target.encode(torch.tensor(text[:anchor]), [anchor]).features
            keys, values = drafter.context_kv(drafter.project_context(features), torch.arange(anchor))
            place = torch.tensor([anchor])
            hidden = drafter.block_hidden(torch.tensor([text[anchor]]), place, keys[:, None], values[:, None], place)
            np.testing.assert_allclose(record.detail.hidden, hidden[0].numpy(), atol=5e-3)
            logits = drafter.confidence(hidden[0], torch.from_numpy(record.detail.previous_ids))
            np.testing.assert_allclose(record.confidence_logits, logits.numpy(), atol=1e-3)
            rates = record.detail.analytic_rate
            assert ((rates >= 0) & (rates <= 1)).all()
            anchor += record.accepted + record.bonus


def test_prompts_longer_than_a_step_are_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampling = tiny_target(), Sampling(temperature=0.0)
    requests = prompts(7, longest=60)
    known = plain(target, requests, 12, sampling)
    monkeypatch.setattr("deepspec.decoding.rows.PREFILL_TOKENS", 10)
    fed = decoder(target, tiny_drafter(target), sampling, "fixed", tokens=12)
    assert answers(fed.decode(requests)) == known


def test_logits_are_made_in_groups_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests, sampling = tiny_target(), prompts(9), Sampling(temperature=1.0)
    run = decoder(target, tiny_drafter(target), sampling, "fixed", batch_size=9)
    known = answers(run.decode(requests))
    monkeypatch.setattr("deepspec.decoding.decoder._LOGITS_BYTES", 4 * 64 * 11)
    assert answers(run.decode(requests)) == known


def test_a_drafter_that_does_not_pay_is_left_alone_and_asked_again_rarely() -> None:
    target, sampling = tiny_target(eos=60), Sampling(temperature=1.0)
    drafter = tiny_drafter(target)
    scheduler = ThroughputScheduler(LinearCost(base=1.0, slope=1.0, draft=1.0), 4)
    run = decoder(target, drafter, sampling, "scheduled", batch_size=2, tokens=120, scheduler=scheduler)
    results = list(run.decode(prompts(2)))
    assert 1 <= run.timings.draft_steps <= 6
    assert all(len(item.token_ids) == 120 for item in results)
    cheap = ThroughputScheduler(LinearCost(base=100.0, slope=0.01, draft=0.01), 4)
    eager = decoder(target, drafter, sampling, "scheduled", batch_size=2, tokens=120, scheduler=cheap)
    list(eager.decode(prompts(2)))
    assert eager.timings.draft_steps > 0.8 * (eager.timings.steps - 1)


def test_wrong_use_is_refused() -> None:
    target = tiny_target()
    drafter, sampling = tiny_drafter(target), Sampling()
    with pytest.raises(ConfigError, match="profile"):
        SpeculativeDecoder(target, drafter, sampling, batch_size=1, max_new_tokens=4, mode="scheduled")
    with pytest.raises(ConfigError, match="needs a drafter"):
        SpeculativeDecoder(target, None, sampling, batch_size=1, max_new_tokens=4, mode="fixed")
    with pytest.raises(ConfigError, match="mode"):
        SpeculativeDecoder(target, drafter, sampling, batch_size=1, max_new_tokens=4, mode="quick")
    run = decoder(target, drafter, sampling, "fixed")
    with pytest.raises(InputRefused, match="no tokens"):
        list(run.decode([DecodeRequest("a", ())]))
    with pytest.raises(InputRefused, match="twice"):
        list(run.decode([DecodeRequest("a", (3,)), DecodeRequest("a", (4,))]))
    assert list(run.decode([])) == []


def test_a_trial_drafts_for_a_few_requests_only() -> None:
    target, sampling = tiny_target(eos=60), Sampling(temperature=0.0)
    drafter, requests = tiny_drafter(target), prompts(16)
    hopeless = np.tile([0.05, 0.0, 0.0, 0.0], (40, 1))
    scheduler = ThroughputScheduler(LinearCost(base=1.0, slope=1.0, draft=1.0), 4, probe_share=0.2).start_from(hopeless)
    run = decoder(target, drafter, sampling, "scheduled", batch_size=16, tokens=40, scheduler=scheduler)
    results = list(run.decode(requests))
    drafted = sum(item.drafted > 0 for result in results for item in result.rounds)
    assert 0 < run.timings.draft_steps < run.timings.steps / 2
    assert drafted <= 2 * run.timings.draft_steps
    assert answers(results) == plain(target, requests, 40, sampling)
