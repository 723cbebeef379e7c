"""Real speculative decoding while training: held-out prompts, the current weights, every rank its share of the prompts.

The engine's parameters may be partitions, so the drafter that decodes is a plain copy filled with gathered weights.
"""

import logging
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepspec import distributed
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.drafters.base import Drafter
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.evaluation.metrics import AcceptanceCounts
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.sampling import Sampling
from deepspec.training.state import each_weight

logger = logging.getLogger(__name__)
_BATCH = 16  # prompts of one rank decoded side by side
_SEED_OFFSET = 15013  # other draws than the confidence stage's and evaluation's on the same prompts
_COUNTS = ("num_prompts", "rounds", "accepted", "bonus", "tokens")


@dataclass
class LiveDecoder:
    """Callable that decodes ``requests`` with an engine's weights at temperature 1, all K drafts verified.

    A prompt's random numbers follow from the seed and its id, so the answer depends on the weights alone.
    """

    target: FrozenTarget
    shape: DrafterShape
    shared: SharedWeights
    requests: tuple[DecodeRequest, ...]
    every: int  # optimizer steps
    max_new_tokens: int
    seed: int
    _drafter: Optional[Drafter] = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is one after which to decode."""
        return step % self.every == 0

    def __call__(self, engine: Any, step: int) -> dict[str, Any]:
        """Decode, and return the pooled numbers and those per domain, the same on every rank. Collective."""
        drafter = self._current(engine)
        sampling = Sampling(temperature=1.0, seed=self.seed + _SEED_OFFSET)
        decoder = SpeculativeDecoder(self.target, drafter, sampling, batch_size=_BATCH,
                                     max_new_tokens=self.max_new_tokens, mode="fixed")
        mine = self.requests[distributed.rank()::distributed.world_size()]
        row = self._row(list(decoder.decode(mine)))
        logger.info("decoded %d held-out prompts at step %d: acceptance length %s over %d rounds (%s)",
                    row["num_prompts"], step, _shown(row["acceptance_length"]), row["rounds"],
                    ", ".join(f"{name} {_shown(part['acceptance_length'])}" for name, part in row["domains"].items()))
        return row

    def _current(self, engine: Any) -> Drafter:
        """A plain drafter with the engine's weights, in the dtype that evaluation and serving use."""
        if self._drafter is None:
            with torch.random.fork_rng(devices=[]):
                drafter = build_drafter(self.shape, self.shared)
            self._drafter = drafter.to(self.target.device).cast(self.target.dtype).eval().requires_grad_(False)
        own = self._drafter.tensors()
        for name, weight in (*each_weight(engine), *engine.module.drafter.named_buffers()):
            own[name].copy_(weight)
        return self._drafter

    def _row(self, results: Sequence[DecodeResult]) -> dict[str, Any]:
        """Sums of all ranks, per domain and pooled, each ratio divided once."""
        names = sorted({request.domain for request in self.requests})
        sums = [self._sums([item for item in results if item.domain == name]) for name in names]
        reduced = np.array(distributed.all_reduce_sum(np.concatenate(sums).tolist())).reshape(len(names), -1)
        domains = {name: _numbers(values) for name, values in zip(names, reduced, strict=True)}
        return {"temperature": 1.0, "max_new_tokens": self.max_new_tokens, **_numbers(reduced.sum(axis=0)),
                "domains": domains}

    def _sums(self, results: Sequence[DecodeResult]) -> NDArray[np.float64]:
        """[5 + 2K]: ``_COUNTS``, then rounds that accepted, and that judged, each position."""
        counts = AcceptanceCounts.of(results, self.shape.draft_length)
        scalars = [len(counts), *(getattr(counts, name).sum() for name in _COUNTS[1:])]
        return np.concatenate([scalars, counts.survived.sum(axis=0), counts.reached.sum(axis=0)]).astype(np.float64)


def _numbers(values: NDArray[np.float64]) -> dict[str, Any]:
    """Counts and ratios of reduced sums [5 + 2K]; undefined ratios are None."""
    row: dict[str, Any] = {name: int(value) for name, value in zip(_COUNTS, values)}
    survived, reached = np.split(values[len(_COUNTS):], 2)
    rounds = row["rounds"]
    return row | {
        "acceptance_length": (row["accepted"] + row["bonus"]) / rounds if rounds else None,
        "accepted_per_position": [int(value) for value in survived],
        "conditional_acceptance": [float(hits / base) if base else None for hits, base in zip(survived, reached)],
    }


def _shown(length: Optional[float]) -> str:
    return "n/a" if length is None else f"{length:.3f}"
