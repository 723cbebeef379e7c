"""Confidence that means what it says: metrics, Sequential Temperature Scaling, and the records both are made from.

Needs numpy only: schedulers and tools read a calibration without torch. ``refit`` and ``head``, which need it, are
imported by name.
"""

from deepspec.calibration.calibration import Calibration
from deepspec.calibration.fit import calibrate
from deepspec.calibration.fold import Fold
from deepspec.calibration.metrics import (
    auc, bootstrap_ece, brier, ece_noise_floor, expected_calibration_error, reliability_curve, sigmoid,
    survival_probability,
)
from deepspec.calibration.records import ConfidenceRecords, RecordsOrigin, balanced_order, split_conversations
from deepspec.calibration.temperatures import TemperatureFit, fit_temperatures, temperature_grid

__all__ = [
    "Calibration", "ConfidenceRecords", "Fold", "RecordsOrigin", "TemperatureFit", "auc", "balanced_order",
    "bootstrap_ece", "brier", "calibrate", "ece_noise_floor", "expected_calibration_error", "fit_temperatures",
    "reliability_curve", "sigmoid", "split_conversations", "survival_probability", "temperature_grid",
]
