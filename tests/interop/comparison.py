"""Shared by the tests that compare real engines with our decoder: what ours accepts, drafts and says of its drafts."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.drafters.sequential import sample_block
from deepspec.export.load import load_exported
from deepspec.targets.sampling import Sampling


def decoded(target: Any, export: Path, prompts: Sequence[Sequence[int]], *, tokens: int, temperature: float = 0.0,
            seed: int = 0) -> list[DecodeResult]:
    """Answers of our decoder with the exported drafter, end-of-turn tokens ignored."""
    drafter, _ = load_exported(export)
    decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=temperature, seed=seed),
                                 batch_size=len(prompts), max_new_tokens=tokens, ignore_eos=True)
    requests = [DecodeRequest(str(number), tuple(prompt)) for number, prompt in enumerate(prompts)]
    return sorted(decoder.decode(requests), key=lambda result: int(result.id))


def accepted(results: Sequence[DecodeResult]) -> list[int]:
    """Accepted draft tokens of every round."""
    return [item.accepted for result in results for item in result.rounds]


def length(rounds: Sequence[int]) -> float:
    """Acceptance length, the bonus token included."""
    return 1 + sum(rounds) / len(rounds)


def standard_errors(report: dict[str, Any], rounds: Sequence[int]) -> tuple[float, float]:
    """How far the engine's acceptance length is from ours, in standard errors of the difference, and that error."""
    spread = torch.tensor(rounds, dtype=torch.float64).std().item()
    error = spread * math.sqrt(1 / report["rounds"] + 1 / len(rounds))
    return (report["acceptance_length"] - length(rounds)) / error, error


@dataclass(frozen=True)
class Drafted:
    """One recorded round: its number, the place of its anchor in the answer, its drafts and how many were accepted."""

    number: int
    place: int
    drafts: list[int]
    accepted: int


def recorded_rounds(report: dict[str, Any], prompt: int = 0) -> Iterator[Drafted]:
    """The engine's recorded rounds of one answer, as far as the answer goes.

    A token that verification puts in place of a rejected one is never that one, so what agrees was accepted, at any
    temperature.
    """
    tokens, place = report["tokens"][prompt], 0
    for number, drafts in enumerate(report["drafts"][prompt]):
        if place >= len(tokens):
            return
        agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, tokens[place + 1:]))
        kept = sum(1 for _ in agree)
        yield Drafted(number, place, drafts, kept)
        place += kept + 1


@torch.no_grad()
def our_drafts(drafter: Any, model: Any, prompt: Sequence[int],
               tokens: Sequence[int]) -> list[tuple[list[int], float]]:
    """Greedy drafts after each of ``tokens``, and the smallest gap between the best two logits on the way. Features
    come from ``model``, Hugging Face's own."""
    ids = torch.tensor([*prompt, *tokens])
    states = model(ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in drafter.shape.feature_layers], dim=-1)
    keys, values = drafter.context_kv(drafter.project_context(features), torch.arange(len(ids)))
    found = []
    for anchor in range(len(prompt), len(ids)):
        hidden = drafter.block_hidden(ids[anchor][None], torch.tensor([anchor]), keys[:, None], values[:, None],
                                      torch.tensor([anchor]))
        gaps: list[float] = []

        def choose(place: int, logits: torch.Tensor, gaps: list[float] = gaps) -> torch.Tensor:
            best = logits[0].topk(2).values
            gaps.append(float(best[0] - best[1]))
            return logits.argmax(dim=-1)

        found.append((sample_block(drafter, ids[anchor][None], hidden, choose).token_ids[0].tolist(), min(gaps)))
    return found


def assert_drafts_are_ours(target: Path, export: Path, prompt: Sequence[int], report: dict[str, Any]) -> None:
    """The engine's drafts for its first prompt, token for token; rounds with a near tie are passed over."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    expected = our_drafts(load_exported(export)[0], model, prompt, report["tokens"][0])
    compared = 0
    for drafted in recorded_rounds(report):
        ours, gap = expected[drafted.place]
        if gap > 1e-3:
            assert drafted.drafts == ours, f"round after token {drafted.place}: {drafted.drafts}, ours {ours}"
            compared += 1
    assert compared > 10


@torch.no_grad()
def our_confidences(target: Any, export: Path, prompt: Sequence[int],
                    tokens: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Greedy drafts after each of ``tokens`` and the sigmoid of the confidence head for each draft."""
    drafter, _ = load_exported(export)
    ids = torch.tensor([*prompt, *tokens])
    features = target.encode(ids, [len(ids)]).features
    keys, values = drafter.context_kv(drafter.project_context(features), torch.arange(len(ids)))
    found = []
    for anchor in range(len(prompt), len(ids)):
        place = torch.tensor([anchor])
        hidden = drafter.block_hidden(ids[place], place, keys[:, None], values[:, None], place)
        block = sample_block(drafter, ids[place], hidden, lambda k, logits: logits.argmax(dim=-1))
        found.append((block.token_ids[0].tolist(), block.confidence_logits[0].sigmoid().tolist()))
    return found


def worst_confidence(target: Any, export: Path, prompt: Sequence[int], report: dict[str, Any]) -> tuple[float, int]:
    """Largest difference between the engine's confidences and ours in the recorded rounds of its first prompt, greedy,
    and the number of rounds with equal drafts."""
    expected = our_confidences(target, export, prompt, report["tokens"][0])
    worst, compared = 0.0, 0
    for drafted in recorded_rounds(report):
        own_drafts, own = expected[drafted.place]
        if own_drafts == drafted.drafts:
            confidences = report["confidences"][0][drafted.number]
            worst = max([worst, *(abs(a - b) for a, b in zip(confidences, own, strict=True))])
            compared += 1
    return worst, compared
