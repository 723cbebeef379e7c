"""Losslessness at temperature 0: speculative answers against the target's own, token by token."""

import logging
from typing import Any, Sequence

import torch

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)
NEAR_TIE = 1e-3  # logits; another matmul shape may order two closer ones differently


def top_two_gap(target: Any, ids: Sequence[int]) -> float:
    """Difference of the two largest logits after ``ids``."""
    hidden = target.encode(torch.tensor(list(ids)), [len(ids)]).last_hidden[-1:]
    best = target.logits(hidden)[0].topk(2).values
    return float(best[0] - best[1])


def check_greedy(target: Any, drafter: Any, requests: Sequence[DecodeRequest], *, batch_size: int,
                 max_new_tokens: int) -> dict[str, int]:
    """Counts of answers that are identical, that part ways at a near-tie (and may differ after it), and that differ
    without one, which a lossless decoder does not do in float32. An empty list gives zeros."""
    answers = []
    for mode in ("none", "fixed"):
        decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=0.0), batch_size=batch_size,
                                     max_new_tokens=max_new_tokens, mode=mode)
        answers.append({item.id: item.token_ids for item in decoder.decode(requests)})
    counts = {"prompts": len(requests), "identical": 0, "near_ties": 0, "mismatches": 0}
    for request in requests:
        own, speculative = (part[request.id] for part in answers)
        if own == speculative:
            counts["identical"] += 1
            continue
        shared = min(len(own), len(speculative))
        place = next((i for i in range(shared) if own[i] != speculative[i]), shared)
        gap = top_two_gap(target, request.prompt_ids + own[:place])
        counts["near_ties" if gap < NEAR_TIE else "mismatches"] += 1
        if gap >= NEAR_TIE:
            log.error("greedy check: %s differs from the target's own answer at token %d, where the top two logits are "
                      "%.3g apart", request.id, place, gap)
    return counts
