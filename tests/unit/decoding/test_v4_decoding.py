"""Decoding with the V4-style drafter: the target's own answers, a window that wraps round, and records of h_k."""

from typing import Any

import pytest
import torch

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.draft import DraftState
from deepspec.drafters.types import SharedWeights
from deepspec.drafters.v4.drafter import V4Drafter
from deepspec.drafters.v4.shape import V4Shape
from deepspec.targets.generate import GenerateRequest, generate
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target

WINDOW = 6
OF = V4Shape(q_lora_rank=16, o_groups=2, o_lora_rank=8, rope_head_dim=8, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
             num_experts=6, experts_per_token=2, routed_scaling_factor=1.5, swiglu_limit=10.0)


def v4_drafter(target: Any) -> V4Drafter:
    model: Any = tiny_drafter(target, kind=V4Drafter, algorithm="dspark_v4", num_kv_heads=1, intermediate_size=24,
                              sliding_window=WINDOW, v4=OF)
    assert isinstance(model.shared, SharedWeights)
    for gate in model.gates:
        torch.nn.init.normal_(gate.bias, std=0.3)
    return model


@pytest.mark.parametrize("mode", ["fixed", "scheduled"])
def test_greedy_answers_are_the_targets(mode: str) -> None:
    from deepspec.decoding.policy import ThroughputScheduler
    from tests.unit.decoding.test_decoder import LinearCost

    target, sampling, requests = tiny_target(), Sampling(temperature=0.0), prompts(6)
    drafter = v4_drafter(target)
    options = {"scheduler": ThroughputScheduler(LinearCost(), 4)} if mode == "scheduled" else {}
    decoder = SpeculativeDecoder(target, drafter, sampling, batch_size=4, max_new_tokens=24, mode=mode, **options)
    found = {item.id: item.token_ids for item in decoder.decode(requests)}
    asked = [GenerateRequest(item.id, item.prompt_ids, 24) for item in requests]
    assert found == {item.id: item.response_ids for item in generate(target, asked, sampling, 4)}


@torch.no_grad()
def test_proposals_are_those_of_the_whole_context() -> None:
    """Contexts far longer than the window, buffered and flushed in pieces, give what one pass over all rows gives."""
    target = tiny_target()
    drafter = v4_drafter(target)
    features = torch.randn(23, 2 * 64, generator=torch.Generator().manual_seed(1))
    state = DraftState(drafter, 2, tokenizer_size=48, capacity=8, flush_tokens=4)
    for start, stop in ((0, 3), (3, 4), (4, 15), (15, 23)):
        state.append(1, features[start:stop])
        if stop == 15:
            state.settle()
    sampling = Sampling(temperature=0.0)
    proposal = state.propose([1], [7], torch.zeros(1, 4), sampling)
    keys, values = drafter.context_kv(drafter.project_context(features), torch.arange(23))
    hidden = drafter.block_hidden(torch.tensor([7]), torch.tensor([23]), keys[:, None], values[:, None],
                                  torch.tensor([23]))
    torch.testing.assert_close(proposal.hidden, hidden, rtol=1e-4, atol=1e-5)
    confidence = drafter.confidence(hidden, proposal.previous_ids)
    torch.testing.assert_close(proposal.confidence_logits, confidence, rtol=1e-4, atol=1e-5)


def test_records_hold_what_the_confidence_head_reads() -> None:
    """A refit on the records starts from the very logits that were recorded: h_k before the last norm, no bias."""
    from deepspec.calibration import RecordsOrigin
    from deepspec.calibration.head import BIAS, WEIGHT, head_from_tensors
    from deepspec.calibration.refit import refit_head
    from deepspec.stages.confidence import records_of

    target = tiny_target()
    drafter = v4_drafter(target)
    decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=1.0, seed=2), batch_size=4, max_new_tokens=24,
                                 mode="fixed", record=True)
    results = list(decoder.decode(prompts(8)))
    records = records_of(results, drafter, RecordsOrigin(4, "sha", 1.0, (1.0,) * 4), frozenset({1}), inputs=True)
    assert records is not None and records.inputs is not None
    head = head_from_tensors(drafter.tensors() | {})
    assert head.bias is None and BIAS not in drafter.tensors() and WEIGHT in drafter.tensors()
    difference = abs(head.logits(records.inputs) - records.logits)
    assert float(difference[records.known].max()) < 2e-2  # inputs are kept in half precision
    result = refit_head(records, head, epochs=3, lr=1e-2, seed=0)
    assert result.head.bias is None and result.train_rows > 0
