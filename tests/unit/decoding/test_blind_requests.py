"""Requests that the drafter keeps no context of while drafting does not pay, and how they come to draft after all."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepspec.decoding.policy import ThroughputScheduler
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.test_decoder import LinearCost, answers, decoder, plain
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target


def buffered(base: float, draft: float, share: float) -> tuple[int, Any]:
    """Most features that a row of 300 tokens had waiting for a proposal, and the decoder; the drafter is hopeless."""
    target, sampling = tiny_target(eos=60), Sampling(temperature=1.0)
    scheduler = ThroughputScheduler(LinearCost(base=base, slope=1.0, draft=draft), 4, probe_share=share)
    scheduler.start_from(np.tile([0.05, 0.0, 0.0, 0.0], (40, 1)))
    run = decoder(target, tiny_drafter(target), sampling, "scheduled", batch_size=1, tokens=300, scheduler=scheduler)
    most = 0

    def watch(timings: Any) -> None:
        nonlocal most
        most = max(most, *run._drafts._buffered)

    list(run.decode(prompts(1), on_round=watch))
    return most, run


def test_memory_of_undrafted_rounds_is_bounded() -> None:
    assert 200 < buffered(base=50.0, draft=5.0, share=0.0)[0] <= 257  # a close call: the drafter keeps its context
    most, run = buffered(base=1.0, draft=50.0, share=0.0)  # a clear one: it keeps none
    assert most == 0 and run.timings.draft_steps == 0


def test_a_blind_request_is_read_again_for_a_trial_and_answers_as_before() -> None:
    target, sampling, requests = tiny_target(eos=60), Sampling(temperature=0.0), prompts(3)
    scheduler = ThroughputScheduler(LinearCost(base=1.0, slope=1.0, draft=5.0), 4, probe_share=0.2)
    scheduler.start_from(np.tile([0.05, 0.0, 0.0, 0.0], (40, 1)))
    run = decoder(target, tiny_drafter(target), sampling, "scheduled", batch_size=3, tokens=120, scheduler=scheduler)
    read = []
    step = target.step
    target.step = lambda ids, slots, counts, cache, **options: (  # type: ignore[method-assign]
        read.append((list(counts), options["features"])), step(ids, slots, counts, cache, **options))[1]
    results = list(run.decode(requests))
    again = [(counts, features) for counts, features in read[1:] if max(counts) > 5]
    assert again and all(features for _, features in again)  # a context is fed once more, with its features
    assert 0 < run.timings.draft_steps < run.timings.steps / 4
    assert sum(features for _, features in read) < len(read) / 2
    assert answers(results) == plain(tiny_target(eos=60), requests, 120, sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_are_read_again_when_drafting_pays_at_a_smaller_load(temperature: float) -> None:
    """Sixteen requests are decoded blind; the three long ones that are left then draft."""
    class Load(LinearCost):
        def draft_seconds(self, requests: int) -> float:
            return 0.1 if requests < 4 else 500.0

    target, sampling = tiny_target(eos=60), Sampling(temperature=temperature)
    requests = [replace(item, max_new_tokens=200 if i < 3 else 20) for i, item in enumerate(prompts(16))]
    scheduler = ThroughputScheduler(Load(base=50.0, slope=0.1, draft=0.0), 4)
    scheduler.start_from(np.tile([0.9, 0.8, 0.7, 0.6], (40, 1)))
    run = decoder(target, tiny_drafter(target), sampling, "scheduled", batch_size=16, tokens=200, scheduler=scheduler)
    results = {item.id: item for item in run.decode(requests)}
    first = [next(at for at, item in enumerate(results[f"p{i}"].rounds) if item.drafted) for i in range(3)]
    assert all(19 <= at <= 24 for at in first)
    assert not any(item.drafted for i in range(3, 16) for item in results[f"p{i}"].rounds)
    if temperature == 0:
        assert {name: item.token_ids for name, item in results.items()} == {
            item.id: item.token_ids for item in decoder(target, None, sampling, "none", batch_size=16,
                                                        tokens=200).decode(requests)}
