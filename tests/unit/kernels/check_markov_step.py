"""The drafting step against the steps apart. Run by test_kernels.py, interpreted where there is no GPU."""

import pytest
import torch
from drafter_cases import drafter, shape
from torch import Tensor

from deepspec.drafters.sequential import MarkovHead, sample_block
from deepspec.kernels import markov_step
from deepspec.kernels.markov_step import greedy_step, greedy_transition, sample_step
from deepspec.targets.sampling import Sampling, pick, target_probs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def head_and_logits(requests: int, vocab: int, rank: int, dtype: torch.dtype) -> tuple[MarkovHead, Tensor, Tensor]:
    """A head, base logits [R, V] as a view of [R, K, V] as drafting has them, and previous ids [R]."""
    torch.manual_seed(requests + vocab)
    head = MarkovHead(vocab, rank, 8).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=rank**-0.25)
    logits = torch.randn(requests, 2, vocab, device=DEVICE)[:, 1]
    return head, logits, torch.randint(0, vocab, (requests,), device=DEVICE)


def apart(head: MarkovHead, logits: Tensor, previous: Tensor, limit: int) -> Tensor:
    biased = logits + head.transition_bias(previous)
    biased[:, limit:] = float("-inf")
    return biased


@pytest.fixture(autouse=True)
def large_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting takes milliseconds per block, whatever its size: few large ones for the large vocabulary."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if DEVICE == "cpu" and parameters.get("vocab") == 151936:
        monkeypatch.setattr(markov_step, "BLOCK", 4096)


CASES = [(1, 97, 6, 97), (3, 97, 33, 90), (17, 1003, 16, 1003), (2, 151936, 64, 151665)]


@torch.no_grad()
@pytest.mark.parametrize(("requests", "vocab", "rank", "limit"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_token_of_the_steps_apart(
    requests: int, vocab: int, rank: int, limit: int, dtype: torch.dtype,
) -> None:
    head, logits, previous = head_and_logits(requests, vocab, rank, dtype)
    expected = apart(head, logits, previous, limit).argmax(dim=-1)
    factor = head.output_factor()
    assert torch.equal(greedy_step(logits, head.markov_w1.weight, previous, factor, limit), expected)
    transition, rows = head.embed(previous), torch.arange(requests, device=DEVICE)
    assert torch.equal(greedy_step(logits, transition, rows, factor, limit), expected)
    assert not torch.equal(expected, logits[:, :limit].argmax(dim=-1)) or requests < 3  # the bias matters


@torch.no_grad()
def test_transitions_take_the_dtype_of_the_output_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One half of the DeepSeek-V4 style head is float32 beside bfloat16; a GPU multiplies operands of one dtype."""
    head, logits, previous = head_and_logits(3, 97, 6, torch.float32)
    transition, factor, seen = head.embed(previous).bfloat16(), head.output_factor(), []
    blocks = markov_step._blocks
    monkeypatch.setattr(markov_step, "_blocks", lambda logits, table, rows, factor, *more: seen.append(
        (table.dtype, factor.dtype)) or blocks(logits, table, rows, factor, *more))
    found = greedy_transition(logits, transition, factor, 97)
    assert seen == [(torch.float32, torch.float32)]
    assert torch.equal(found, (logits + head.bias(transition.float())).argmax(dim=-1))


@torch.no_grad()
def test_greedy_never_proposes_a_padded_id_and_prefers_the_lowest_of_equals() -> None:
    table, factor = torch.zeros(4, 3, device=DEVICE), torch.zeros(600, 3, device=DEVICE)
    logits = torch.zeros(2, 600, device=DEVICE)
    logits[0, [140, 139, 590]], logits[1, 599] = 5.0, 9.0
    rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert greedy_step(logits, table, rows, factor, 595).tolist() == [139, 0]
    assert greedy_step(logits[:0], table, rows[:0], factor, 595).shape == (0,)


@torch.no_grad()
@pytest.mark.parametrize(("requests", "vocab", "rank", "limit"), CASES)
@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1.0), (torch.bfloat16, 0.7)])
def test_sampling_takes_the_token_of_the_steps_apart(
    requests: int, vocab: int, rank: int, limit: int, dtype: torch.dtype, temperature: float,
) -> None:
    head, logits, previous = head_and_logits(requests, vocab, rank, dtype)
    probs = target_probs(apart(head, logits, previous, limit), Sampling(temperature))
    for draw in range(1 if vocab == 151936 else 3):
        uniforms = torch.rand(requests, dtype=torch.float64, generator=torch.Generator().manual_seed(draw)).to(DEVICE)
        ids, prob = sample_step(logits, head.markov_w1.weight, previous, head.output_factor(), limit, temperature,
                                uniforms)
        assert torch.equal(ids, pick(probs, uniforms))
        torch.testing.assert_close(prob, probs.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_sampling_at_the_ends_of_the_unit_interval(uniform: float) -> None:
    """The first and the last token of positive probability; never one of probability 0, never a padded id."""
    logits = torch.full((1, 700), float("-inf"), device=DEVICE)
    logits[0, [135, 136, 520]] = 1.0
    table, factor = torch.zeros(1, 3, device=DEVICE), torch.zeros(700, 3, device=DEVICE)
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    uniforms = torch.tensor([uniform], dtype=torch.float64, device=DEVICE)
    ids, prob = sample_step(logits, table, rows, factor, 690, 1.0, uniforms)
    assert ids.tolist() == [135 if uniform == 0.0 else 520]
    assert prob.item() == pytest.approx(1 / 3, rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_a_block_drafted_with_the_fused_step(head: str) -> None:
    model = drafter(shape(head=head, vocab_size=149, block_size=4)).to(DEVICE)
    hidden = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    anchors, limit = torch.arange(5, device=DEVICE), 140

    def choose(k: int, logits: Tensor) -> Tensor:
        return logits[:, :limit].argmax(dim=-1)

    expected = sample_block(model, anchors, hidden, choose)
    found = sample_block(model, anchors, hidden, choose,
                         lambda logits, transition, factor: greedy_transition(logits, transition, factor, limit))
    assert torch.equal(found.token_ids, expected.token_ids)
    assert len(found.token_ids.unique()) > 3
    if expected.confidence_logits is not None:
        assert torch.equal(found.confidence_logits, expected.confidence_logits)
