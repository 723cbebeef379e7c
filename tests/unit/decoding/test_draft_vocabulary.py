"""A drafter that proposes some tokens only: the output is the target's, whatever it cannot say."""

import numpy as np
import pytest
from scipy import stats

from deepspec.decoding.types import DecodeRequest
from deepspec.evaluation.run import tokens_inside
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.test_decoder import answers, decoder, joint, plain
from tests.unit.decoding.test_recurrent_decoding import recurrent_target
from tests.unit.decoding.tiny import prompts, recurrent_drafter, tiny_drafter, tiny_target


@pytest.mark.parametrize("mode", ["fixed", "scheduled"])
def test_greedy_equals_plain_decoding(mode: str) -> None:
    target, requests, sampling = tiny_target(), prompts(9), Sampling(temperature=0.0)
    known = plain(target, requests, 24, sampling)
    said = {token for text, _ in known.values() for token in text}
    ids = tuple(token for token in range(48) if token % 3)
    assert said - set(ids), "the target says tokens that are never proposed"
    results = list(decoder(target, tiny_drafter(target, draft_ids=ids), sampling, mode).decode(requests))
    assert answers(results) == known


def test_greedy_of_a_chain_equals_plain_decoding() -> None:
    target = recurrent_target()["eagle3"]
    requests, sampling = prompts(9), Sampling(temperature=0.0)
    drafter = recurrent_drafter(target, "eagle3", draft_ids=tuple(range(0, 48, 2)))
    results = decoder(target, drafter, sampling, "fixed").decode(requests)
    assert answers(results) == plain(target, requests, 24, sampling)


def test_sampled_distribution_is_the_targets() -> None:
    vocab, prompt, count, ids = 6, (3, 4, 5), 8_000, (0, 3, 5)
    sampling = Sampling(temperature=1.0, seed=1)
    target = tiny_target(vocab=vocab, padded=8, eos=7, scale=4.0)
    drafter = tiny_drafter(target, block_size=2, draft_ids=ids)
    requests = [DecodeRequest(f"r{i}", prompt, max_new_tokens=2 + i % 2) for i in range(count)]
    results = list(decoder(target, drafter, sampling, "fixed", batch_size=256, tokens=4).decode(requests))
    counts = np.bincount([item.token_ids[0] * vocab + item.token_ids[1] for item in results], minlength=vocab ** 2)
    expected = joint(target, prompt, sampling, vocab)
    assert stats.chisquare(counts, expected * count / expected.sum()).pvalue > 1e-3
    inside, total = tokens_inside(drafter, results)
    tokens = [token for item in results for token in item.token_ids]
    assert (inside, total) == (sum(token in ids for token in tokens), len(tokens)) and 0 < inside < total
    accepted = sum(record.accepted for item in results for record in item.rounds)
    assert 0 < accepted <= inside
    assert tokens_inside(tiny_drafter(target), results) == (0, 0)
