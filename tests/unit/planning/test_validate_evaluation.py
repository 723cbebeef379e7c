"""Options of the evaluation that make no sense are told by name."""

from typing import Any

import pytest

from deepspec.config.compose import compose_config
from deepspec.errors import ConfigError
from deepspec.planning.validate import validate


@pytest.mark.parametrize("override, message", [
    ("evaluate.estimators=[guessed]", "evaluate.estimators"), ("evaluate.estimators=[]", "evaluate.estimators"),
    ("evaluate.estimators=[sampled,sampled]", "without repetition"), ("evaluate.batch_sizes=[0]", "batch_sizes"),
    ("evaluate.batch_sizes=[4,4]", "without repetition"), ("evaluate.thinking=[1]", "true, false or mixed"),
    ("evaluate.thinking=[sometimes]", "true, false or mixed"), ("evaluate.anchors=0", "evaluate.anchors"),
    ("evaluate.modes=[often]", "evaluate.modes"),
    ("evaluate.temperatures=[-1]", "evaluate.temperatures"), ("evaluate.benchmarks=[]", "evaluate.benchmarks"),
])
def test_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(compose_config(["+experiment=tiny", override]))


@pytest.mark.parametrize("overrides", [
    ["evaluate.thinking=[true,false,mixed]", "evaluate.batch_sizes=[1,8,32]"],
    ["evaluate.estimators=[sampled,analytic,drafted,teacher_forced]"],
    ["evaluate.estimators=[analytic]"],
])
def test_accepted(overrides: list[Any]) -> None:
    config = compose_config(["+experiment=tiny", *overrides])
    validate(config)
