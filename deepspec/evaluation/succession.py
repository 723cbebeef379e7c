"""A drafter against the one it is to replace: the same prompts, acceptance paired, latency by Eq. 1."""

from dataclasses import asdict, dataclass
from typing import Any, Sequence

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.errors import InputRefused
from deepspec.evaluation.metrics import AcceptanceCounts, acceptance_length, latency_per_token
from deepspec.evaluation.paired import compare
from deepspec.evaluation.summary import Speed
from deepspec.targets.sampling import Sampling

SUCCESSOR, INCUMBENT, NEITHER = "successor", "in service", "neither"


@dataclass(frozen=True)
class DecodeOptions:
    """How both are decoded."""

    temperature: float
    batch_size: int
    max_new_tokens: int
    resamples: int
    seed: int


class _Side:
    def __init__(self, target: Any, drafter: Any, options: DecodeOptions) -> None:
        self.length = drafter.shape.draft_length
        self.results: list[DecodeResult] = []
        self.speed = Speed()
        self._decoder = SpeculativeDecoder(
            target, drafter, Sampling(temperature=options.temperature, seed=options.seed),
            batch_size=options.batch_size, max_new_tokens=options.max_new_tokens)

    def decode(self, requests: Sequence[DecodeRequest], counted: bool = True) -> None:
        """Answer ``requests``; what is not counted only warms up."""
        results = list(self._decoder.decode(requests))
        if counted:
            self.results += results
            self.speed = self.speed.plus(self._decoder.timings)

    def counts(self) -> AcceptanceCounts:
        """Of all prompts, ordered by their ids."""
        return AcceptanceCounts.of(self.results, self.length)

    def document(self) -> dict[str, Any]:
        """Acceptance length, milliseconds of a round's two halves, and Eq. 1."""
        tau = acceptance_length(self.counts())
        times = self.speed.round_ms
        draft, verify = times["draft_ms"] or 0.0, times["verify_ms"] or 0.0
        latency = latency_per_token(draft, verify, tau) if tau else None
        return {"acceptance_length": tau, **times, "latency_per_token_ms": latency, "draft_length": self.length}


def compare_drafters(target: Any, incumbent: Any, successor: Any, requests: Sequence[DecodeRequest],
                     options: DecodeOptions) -> dict[str, Any]:
    """Decode ``requests`` with both, a batch of one and the same batch of the other in turn.

    Returns both sides (``_Side.document``), the paired difference of acceptance lengths, and ``speedup``: the
    incumbent's latency per token (Eq. 1) over the successor's, its interval from that of the ratio of acceptance
    lengths at the measured times. ``better`` is the side that the interval of the speed-up leaves, or neither.
    Raises InputRefused for fewer than two prompts.
    """
    if len(requests) < 2:
        raise InputRefused(f"A comparison needs two prompts at least, there are {len(requests)}. Give more requests.")
    old, new = (_Side(target, drafter, options) for drafter in (incumbent, successor))
    for side in (old, new):
        side.decode(requests[:1], counted=False)
    for start in range(0, len(requests), options.batch_size):
        for side in (old, new):
            side.decode(requests[start:start + options.batch_size])
    paired = compare(new.counts(), old.counts(), options.resamples, options.seed)
    before, after = old.document(), new.document()
    found: dict[str, Any] = {"options": asdict(options), "in_service": before, "successor": after,
                             "acceptance": asdict(paired), "speedup": None, "speedup_ci95": None, "better": NEITHER}
    old_ms, new_ms = (side["draft_ms"] + side["verify_ms"] if side["draft_ms"] and side["verify_ms"] else None
                      for side in (before, after))
    if old_ms and new_ms:
        low, high = (value * old_ms / new_ms for value in paired.ratio_interval)
        found |= {"speedup": paired.ratio * old_ms / new_ms, "speedup_ci95": [low, high],
                  "better": SUCCESSOR if low > 1.0 else INCUMBENT if high < 1.0 else NEITHER}
    return found
