"""Learning rate as a pure function of the optimizer step, so that a resume needs nothing but the step."""

import math
from dataclasses import dataclass

from deepspec.config.schema import OptimizerConfig
from deepspec.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_RATIO = 0.2  # of wsd where optimizer.decay_ratio is null


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then ``kind``: cosine or linear down to ``min_lr_ratio``, constant, or warm-up,
    stable, decay (wsd): the peak until the last ``decay_steps`` steps, which fall linearly.

    Optimizer steps are 0-based. Warm-up step s has factor (s + 1) / warmup_steps: no step trains with 0 and the last
    warm-up step is at the peak. A decay starts at the peak and would reach ``min_lr_ratio`` at step ``total_steps``,
    one after the last, so no step of a short run is spent on a learning rate of 0.
    """

    total_steps: int
    warmup_steps: int
    min_lr_ratio: float = 0.0
    kind: str = "cosine"
    decay_steps: int = 0  # wsd alone; the others decay over all steps after the warm-up

    def factor(self, step: int) -> float:
        """Multiple of the peak learning rate that optimizer step ``step`` uses; 0 <= factor <= 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        span = self.total_steps - self.warmup_steps
        if self.kind == "wsd":
            span = min(span, self.decay_steps)
        if step < self.total_steps - span:
            return 1.0
        progress = min(1.0, (step - (self.total_steps - span)) / span) if span > 0 else 1.0
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left


def make_schedule(total_steps: int, optimizer: OptimizerConfig) -> Schedule:
    """The schedule ``optimizer`` asks for; its shares of ``total_steps`` are rounded. Raises ConfigError (ranges)."""
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    decay = DECAY_RATIO if optimizer.decay_ratio is None else optimizer.decay_ratio
    for name, value in (("warmup_ratio", optimizer.warmup_ratio), ("min_lr_ratio", optimizer.min_lr_ratio),
                        ("decay_ratio", decay)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"optimizer.{name}={value} must lie in [0, 1].")
    return Schedule(total_steps, round(total_steps * optimizer.warmup_ratio), optimizer.min_lr_ratio,
                    optimizer.schedule, round(total_steps * decay))
