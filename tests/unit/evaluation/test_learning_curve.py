"""Power laws that are known, with and without noise."""

import numpy as np
import pytest

from deepspec.errors import InputRefused
from deepspec.evaluation.learning_curve import Cost, decoded_length, fit_learning_curve

SAMPLES = np.array([100, 200, 400, 800, 1600, 3200], dtype=float)


def test_a_clean_power_law_is_found_again() -> None:
    lengths = 4.5 - 12.0 * SAMPLES ** -0.4
    curve = fit_learning_curve(SAMPLES, lengths, most=8.0, resamples=20)
    assert (curve.limit, curve.scale, curve.power) == pytest.approx((4.5, 12.0, 0.4), rel=1e-3)
    found = curve.at(32000)
    assert found.acceptance_length == pytest.approx(4.5 - 12.0 * 32000 ** -0.4, abs=1e-3)
    assert found.interval[1] - found.interval[0] < 0.01


def test_intervals_cover_the_truth() -> None:
    covered, widths = 0, []
    samples = np.geomspace(100, 3200, 10)
    for trial in range(30):
        noise = np.random.default_rng(trial).normal(0, 0.03, len(samples))
        curve = fit_learning_curve(samples, 3.5 - 6.0 * samples ** -0.35 + noise, most=8.0, resamples=60, seed=trial)
        found = curve.at(6400)
        covered += found.interval[0] <= 3.5 - 6.0 * 6400 ** -0.35 <= found.interval[1]
        widths.append(found.interval[1] - found.interval[0])
    assert covered >= 25 and np.median(widths) < 0.6


def test_the_farther_the_wider() -> None:
    noise = np.random.default_rng(3).normal(0, 0.03, 6)
    curve = fit_learning_curve(SAMPLES, 3.5 - 6.0 * SAMPLES ** -0.35 + noise, most=8.0)
    widths = [high - low for low, high in (curve.at(x).interval for x in (3200, 32000, 320000))]
    assert widths[0] < widths[1] <= widths[2]


@pytest.mark.parametrize("samples, lengths, message", [
    ([1, 2, 3], [1.0, 1.1, 1.2], "at least 4"), ([1, 2, 2, 3], [1.0] * 4, "growing"),
    ([1, 2, 3, 4], [1.0, 1.1, float("nan"), 1.2], "finite")])
def test_what_cannot_be_fitted_is_refused(samples: list[float], lengths: list[float], message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        fit_learning_curve(samples, lengths, most=8.0)


def test_from_validation_to_speed() -> None:
    assert decoded_length(3.0, now=3.0, decoded=2.0) == 2.0
    assert decoded_length(5.0, now=3.0, decoded=2.0) == 3.0
    assert decoded_length(2.0, now=1.0, decoded=1.0) == 1.0
    assert Cost(draft_ms=2.0, verify_ms=10.0, alone_ms=8.0).speedup(3.0) == pytest.approx(2.0)
