"""Runs the checks of the kernels in a process of their own, and what the kernels take of each architecture.

Triton decides at import whether its functions are compiled or interpreted, so that the choice cannot be made in a
process that may have imported it already.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec import kernels
from deepspec.errors import ConfigError
from deepspec.objective.losses import _chunked_pass

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = HERE.parents[2]
    paths = [str(root), str(HERE.parent / "drafters"), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, capture_output=True, text=True, timeout=600,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(folder), **environment},
    )


@needs_triton
@pytest.mark.parametrize("name", ["slot_loss", "markov_step"])
def test_kernel_against_reference(name: str, tmp_path: Path) -> None:
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    checks = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "-o", "python_files=check_*.py",
              str(HERE / f"check_{name}.py")]
    found = run(checks, tmp_path, **environment)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "passed" in found.stdout and "skipped" not in found.stdout, found.stdout


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90,
                                        pytest.param(100, marks=pytest.mark.slow)])
def test_kernels_fit_the_architecture(capability: int, tmp_path: Path) -> None:
    """No spills; registers and shared memory let at least two blocks run side by side on a multiprocessor."""
    found = run(["-m", "deepspec.kernels.compile", str(capability)], tmp_path)
    assert found.returncode == 0, found.stderr
    usages: list[dict[str, Any]] = [json.loads(line) for line in found.stdout.splitlines()]
    assert {usage["capability"] for usage in usages} == {capability}
    assert len({usage["kernel"] for usage in usages}) == 6
    shared = {80: 166912, 90: 232448, 100: 232448}
    for usage in usages:
        assert usage["spill_bytes"] == 0, usage
        assert usage["shared_bytes"] <= shared[usage["capability"]] // 2, usage
        assert usage["registers"] <= 255 and usage["registers"] * usage["threads"] <= 65536 // 2, usage
        assert usage["blocks"] >= 2, usage
        if usage["kernel"] == "slot_loss_kernel":  # a sweep lives from many loads in flight
            assert usage["blocks"] * usage["threads"] >= 1024, usage


def test_triton_on_a_cpu_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if find_spec("triton") is not None:
        with pytest.raises(ConfigError, match="objective.implementation=triton.*TRITON_INTERPRET=1.*=chunked"):
            _chunked_pass("triton", torch.device("cpu"))
    with pytest.raises(ConfigError, match="objective.implementation=triton.*'mps'|not installed"):
        _chunked_pass("triton", torch.device("mps"))


def test_without_triton_auto_is_chunked_and_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        _chunked_pass("triton", torch.device("cuda"))
    assert _chunked_pass("auto", torch.device("cuda")).__name__ == "ChunkedPass"
