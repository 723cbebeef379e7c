"""Training objective: Eqs. 8-12, an eager reference and the same numbers in chunks, in plain PyTorch or with Triton."""

from deepspec.objective.losses import (
    Denominators, LossTerms, acceptance_rate, confidence_loss, cross_entropy_loss, drafter_loss, position_weights,
    slot_weights, total_variation_loss, window_weights,
)

__all__ = [
    "Denominators", "LossTerms", "acceptance_rate", "confidence_loss", "cross_entropy_loss", "drafter_loss",
    "position_weights", "slot_weights", "total_variation_loss", "window_weights",
]
