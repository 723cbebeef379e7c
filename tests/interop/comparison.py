"""Shared by the tests that compare real engines with our decoder: what ours accepts, drafts and says of its drafts."""

import math
from pathlib import Path
from typing import Any, Sequence

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
    tokens = report["tokens"][0]
    expected = our_confidences(target, export, prompt, tokens)
    place, worst, compared = 0, 0.0, 0
    for drafts, confidences in zip(report["drafts"][0], report["confidences"][0], strict=True):
        if place >= len(tokens):
            break
        own_drafts, own = expected[place]
        if own_drafts == drafts:
            worst = max([worst, *(abs(a - b) for a, b in zip(confidences, own, strict=True))])
            compared += 1
        kept = 0
        while kept < len(drafts) and tokens[place + 1 + kept:place + 2 + kept] == [drafts[kept]]:
            kept += 1
        place += kept + 1
    return worst, compared
