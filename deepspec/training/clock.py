"""Where the time of a step goes."""

import time
from typing import Any

import torch


class StepClock:
    """Seconds by part of a step. On a GPU marks are events of its stream, so nothing waits before ``seconds``."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, part: str) -> None:
        """What ran since the mark before belongs to ``part``."""
        self._marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of every part so far."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        totals: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:]):
            passed = before.elapsed_time(after) / 1000.0 if self._on_gpu else after - before
            totals[part] = totals.get(part, 0.0) + passed
        return totals

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
