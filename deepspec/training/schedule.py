"""Learning rate as a pure function of the optimizer step, so that a resume needs nothing but the step."""

import math
from dataclasses import dataclass

from deepspec.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, cosine down to ``min_lr_ratio`` of it.

    Optimizer steps are 0-based. Warm-up step s has factor (s + 1) / warmup_steps: no step trains with 0 and the last
    warm-up step is at the peak. The cosine starts at the peak and would reach ``min_lr_ratio`` at step
    ``total_steps``, one after the last, so no step of a short run is spent on a learning rate of 0.
    """

    total_steps: int
    warmup_steps: int
    min_lr_ratio: float = 0.0

    def factor(self, step: int) -> float:
        """Multiple of the peak learning rate that optimizer step ``step`` uses; 0 <= factor <= 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(total_steps: int, warmup_ratio: float, min_lr_ratio: float) -> Schedule:
    """Schedule whose warm-up is ``warmup_ratio`` of ``total_steps``, rounded. Raises ConfigError outside [0, 1]."""
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    for name, value in (("warmup_ratio", warmup_ratio), ("min_lr_ratio", min_lr_ratio)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"optimizer.{name}={value} must lie in [0, 1].")
    return Schedule(total_steps, round(total_steps * warmup_ratio), min_lr_ratio)
