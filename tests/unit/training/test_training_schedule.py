"""The learning rate is a pure function of the step and never leaves [0, peak]."""

import pytest

from deepspec.config.schema import OptimizerConfig
from deepspec.errors import ConfigError
from deepspec.training.schedule import Schedule, make_schedule


@pytest.mark.parametrize("warmup,total", [(5, 15), (0, 10), (10, 10), (1, 1), (0, 1), (3, 4), (1, 2), (100, 10000)])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind,decay", [("cosine", 0), ("linear", 0), ("constant", 0), ("wsd", 0), ("wsd", 3),
                                        ("wsd", 10**6)])
def test_peak_is_reached_and_never_passed(warmup, total, floor, kind, decay):
    factors = [Schedule(total, warmup, floor, kind, decay).factor(step) for step in range(total)]
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


def made(total, **optimizer):
    return make_schedule(total, OptimizerConfig(**optimizer))


def test_the_other_kinds_written_out():
    def factors(kind, floor=0.0, decay=0):
        return [round(Schedule(8, 2, floor, kind, decay).factor(step), 6) for step in range(9)]

    assert factors("constant", 0.5) == [0.5, 1, 1, 1, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.833333, 0.666667, 0.5, 0.333333, 0.166667, 0]
    assert factors("wsd", 0.2, decay=4) == [0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert factors("wsd", decay=100) == factors("linear")  # warm-up comes first


def test_beyond_the_end_stays_at_the_floor():
    assert Schedule(10, 2, 0.25).factor(10) == 0.25
    assert Schedule(10, 2, 0.25).factor(1000) == 0.25


def test_ratio_and_wrong_values():
    assert made(15, warmup_ratio=0.34).warmup_steps == 5
    assert made(7, warmup_ratio=1.0).warmup_steps == 7
    assert made(50, schedule="wsd").decay_steps == 10 and made(50, schedule="wsd", decay_ratio=0.5).decay_steps == 25
    with pytest.raises(ConfigError, match="warmup_ratio=1.5"):
        made(10, warmup_ratio=1.5)
    with pytest.raises(ConfigError, match="min_lr_ratio=-0.1"):
        made(10, min_lr_ratio=-0.1)
    with pytest.raises(ConfigError, match="decay_ratio=1.1"):
        made(10, decay_ratio=1.1)
