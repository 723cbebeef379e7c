"""Shared by all tests: quiet, reproducible processes, and the real scripts run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: a rare one is found by whoever looks for it, not by whoever changes something else.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

ROOT = Path(__file__).resolve().parents[1]
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def script(name: str, *overrides: str, ranks: int = 0, timeout: float = 570, cwd: Path = ROOT,
           **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``launch/NAME.py`` (or ``data_prep/NAME.py``); under ``deepspeed`` when ``ranks`` is given."""
    folder = "data_prep" if (ROOT / "data_prep" / f"{name}.py").is_file() else "launch"
    command = [sys.executable, str(ROOT / folder / f"{name}.py"), *overrides]
    if ranks:
        from deepspec.distributed import free_port

        command = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(ranks),
                   "--master_port", str(free_port()), *command[1:]]
    clean = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    variables = clean | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Where the micro target is trained once and kept: the repository's own data folder unless told otherwise."""
    return Path(os.environ.get("DEEPSPEC_TEST_DATA", ROOT / "data"))
