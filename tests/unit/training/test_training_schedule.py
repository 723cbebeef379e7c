"""The learning rate is a pure function of the step and never leaves [0, peak]."""

import pytest

from deepspec.errors import ConfigError
from deepspec.training.schedule import Schedule, make_schedule


@pytest.mark.parametrize("warmup,total", [(5, 15), (0, 10), (10, 10), (1, 1), (0, 1), (3, 4), (1, 2), (100, 10000)])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_peak_is_reached_and_never_passed(warmup, total, floor):
    factors = [Schedule(total, warmup, floor).factor(step) for step in range(total)]
    assert max(factors) == 1.0
    assert min(factors) >= 0.0
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(factor >= floor for factor in factors[warmup:])


def test_written_out():
    factors = [round(Schedule(15, 5).factor(step), 6) for step in range(15)]
    assert factors[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert factors[10] == 0.5
    assert factors[14] == 0.024472


def test_beyond_the_end_stays_at_the_floor():
    assert Schedule(10, 2, 0.25).factor(10) == 0.25
    assert Schedule(10, 2, 0.25).factor(1000) == 0.25


def test_ratio_and_wrong_values():
    assert make_schedule(15, 0.34, 0.0).warmup_steps == 5
    assert make_schedule(7, 1.0, 0.0).warmup_steps == 7
    with pytest.raises(ConfigError, match="warmup_ratio=1.5"):
        make_schedule(10, 1.5, 0.0)
    with pytest.raises(ConfigError, match="min_lr_ratio=-0.1"):
        make_schedule(10, 0.1, -0.1)
