"""In-process answers."""

import pytest
import torch
from tiny_targets import random_ids, tiny_target

from deepspec.errors import InputRefused
from deepspec.targets.generate import GenerateRequest, GenerateResult, generate
from deepspec.targets.sampling import Sampling


def _requests() -> list[GenerateRequest]:
    lengths = [3, 40, 1, 17, 9, 25, 5]
    return [GenerateRequest(f"p{index}", random_ids(length, index).tolist(), 6 + 5 * (index % 3))
            for index, length in enumerate(lengths)]


def _answers(sampling: Sampling, batch_size: int, requests: list[GenerateRequest]) -> dict[str, GenerateResult]:
    return {result.id: result for result in generate(tiny_target(), requests, sampling, batch_size)}


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(temperature=0.0),
                                      Sampling(temperature=0.7, top_p=0.8, top_k=20, seed=1)])
def test_answers_do_not_depend_on_the_batch(sampling: Sampling) -> None:
    requests = _requests()
    alone = _answers(sampling, 1, requests)
    assert len(alone) == len(requests)
    assert _answers(sampling, 3, requests) == alone
    assert _answers(sampling, 16, list(reversed(requests))) == alone
    assert _answers(sampling, 2, requests[2:4]) == {key: alone[key] for key in ("p2", "p3")}


def test_greedy_equals_repeated_full_passes() -> None:
    target = tiny_target()
    request = _requests()[3]
    ids = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        logits = target.logits(target.encode(torch.tensor(ids), [len(ids)]).last_hidden[-1:])
        ids.append(int(logits.argmax()))
        if ids[-1] in target.spec.eos_token_ids:
            break
    answer = _answers(Sampling(temperature=0.0), 4, [request])["p3"]
    assert list(answer.response_ids) == ids[len(request.prompt_ids):]


def test_the_end_token_stops_a_row_and_is_kept() -> None:
    target = tiny_target()
    free = next(generate(target, [GenerateRequest("x", [5, 6], 8)], Sampling(seed=2), 1))
    stop = free.response_ids[4]
    object.__setattr__(target.spec, "eos_token_ids", (stop,))
    first = free.response_ids.index(stop) + 1
    stopped = next(generate(target, [GenerateRequest("x", [5, 6], 8)], Sampling(seed=2), 1))
    assert stopped.response_ids == free.response_ids[:first] and stopped.finish_reason == "stop"
    assert free.finish_reason == "length" and len(free.response_ids) == 8


def test_padding_ids_are_never_sampled_and_every_result_is_reported() -> None:
    target = tiny_target()
    seen: list[str] = []
    hot = Sampling(temperature=50.0)
    results = list(generate(target, _requests(), hot, 4, on_done=lambda one: seen.append(one.id)))
    assert seen == [result.id for result in results] and sorted(seen) == [f"p{index}" for index in range(7)]
    assert max(max(result.response_ids) for result in results) < target.tokenizer_size


def test_impossible_requests_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(InputRefused, match="'empty' has no tokens"):
        list(generate(target, [GenerateRequest("empty", [], 4)], Sampling(), 1))
    with pytest.raises(InputRefused, match="max_tokens=0"):
        list(generate(target, [GenerateRequest("none", [5], 0)], Sampling(), 1))
    assert list(generate(target, [], Sampling(), 4)) == []
