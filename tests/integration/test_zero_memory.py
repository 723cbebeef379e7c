"""The benchmark of ZeRO's memory on a small drafter: it fails itself where a figure is not what it should be."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.integration.test_training import environ

pytestmark = pytest.mark.slow


def test_bytes_fall_as_one_over_the_ranks() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "zero_memory.py"), "layers=1", "vocab=4000", "ranks=1,2"]
    result = subprocess.run(command, env=environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                            timeout=570)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["wrong"] == []
    two = {stage: row for stage, row in found["ratio_to_one_rank"]["2"].items()}
    assert two["0"] == {"optimizer": 1.0, "gradients": 1.0, "parameters": 1.0}
    assert two["1"]["optimizer"] == pytest.approx(0.5, abs=0.01)
    assert two["3"] == pytest.approx({"optimizer": 0.5, "gradients": 0.5, "parameters": 0.5}, abs=0.01)
