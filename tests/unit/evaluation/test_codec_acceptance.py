"""The arithmetic of benchmarks/codec_acceptance.py; its trainings are too long for here."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[3] / "benchmarks" / "codec_acceptance.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("codec_acceptance", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drafters(shift: float, noise: float, seeds: int = 3, conversations: int = 40) -> dict[tuple[str, int], Any]:
    """Conversations of very different difficulty, on which a codec costs ``shift`` tokens per round."""
    random = np.random.default_rng(0)
    rounds = random.integers(20, 80, conversations).astype(float)
    found = {}
    for seed in range(seeds):
        lengths = random.normal(2.0, 0.5, conversations) + 0.05 * seed
        found["bf16", seed] = {"rounds": rounds, "tokens": rounds * lengths}
        changed = lengths + shift + random.normal(0, noise, conversations)
        found["int8", seed] = {"rounds": rounds, "tokens": rounds * changed}
    return found


def test_a_difference_is_found_below_the_spread_of_conversations(benchmark: Any) -> None:
    measurement = SimpleNamespace(seeds=[0, 1, 2])
    result = benchmark.compared(measurement, drafters(-0.012, 0.01), "int8")
    assert result["ci95"][0] < -0.012 < result["ci95"][1] and result["ci95"][1] < 0
    assert result["ci95"][1] - result["ci95"][0] < 0.02 and len(result["deltas"]) == 3
    assert result["delta"] == pytest.approx(result["acceptance_length"] - result["reference"], abs=2e-4)
    same = benchmark.compared(measurement, drafters(0.0, 0.0), "int8")
    assert same["delta"] == 0.0 and same["ci95"] == [0.0, 0.0]


def test_a_wrong_call_ends_with_the_usage(benchmark: Any) -> None:
    for arguments in ([], ["directory=x", "estimator=guess"]):
        with pytest.raises(SystemExit, match="codec of the feature store"):
            benchmark.main(arguments)
