"""Checks of the options of the evaluation."""

import math

from deepspec.config.schema import Config
from deepspec.config.schema_evaluation import ESTIMATORS, MIXED
from deepspec.decoding.modes import MODES
from deepspec.planning.require import choice, require, whole, wholes, within


def check_evaluation(config: Config) -> None:
    """Benchmarks, ways of decoding and estimators. Raises ConfigError."""
    evaluate = config.evaluate
    if "evaluate" in config.stages:
        for name in ("benchmarks", "temperatures", "modes", "estimators"):
            values = list(getattr(evaluate, name))
            require(bool(values), f"evaluate.{name}", values, "a non-empty list, or stages without evaluate")
    names = [benchmark.name for benchmark in evaluate.benchmarks]
    lists = ("temperatures", "modes", "batch_sizes", "thinking", "estimators")
    for key, values in (("benchmarks[].name", names), *((name, list(getattr(evaluate, name))) for name in lists)):
        require(len(set(values)) == len(values), f"evaluate.{key}", values, "without repetition")
    for index, benchmark in enumerate(evaluate.benchmarks):
        if benchmark.limit is not None:
            whole(f"evaluate.benchmarks[{index}].limit", benchmark.limit, 1)
    for value in evaluate.temperatures:
        within("evaluate.temperatures", value, 0.0, math.inf)
    for mode in evaluate.modes:
        choice("evaluate.modes", mode, MODES)
    for estimator in evaluate.estimators:
        choice("evaluate.estimators", estimator, ESTIMATORS)
    for size in evaluate.batch_sizes:
        whole("evaluate.batch_sizes", size, 1)
    for value in evaluate.thinking:
        require(isinstance(value, bool) or value == MIXED, "evaluate.thinking", value, "true, false or mixed")
    for value in evaluate.context_buckets:
        whole("evaluate.context_buckets", value, 1)
    buckets = list(evaluate.context_buckets)
    require(buckets == sorted(set(buckets)), "evaluate.context_buckets", buckets, "strictly ascending")
    wholes("evaluate", evaluate, ("max_new_tokens", "batch_size", "anchors"), 1)
    wholes("evaluate", evaluate, ("bootstrap", "check_greedy"), 0)
