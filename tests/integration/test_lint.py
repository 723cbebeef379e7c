"""Types, style and order of imports: what a developer's editor would say, said by the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
CODE = ("deepspec", "launch", "data_prep", "benchmarks")


def run(*words: str) -> str:
    """What a tool of this environment has to say, empty for nothing."""
    result = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def test_types_are_consistent() -> None:
    """mypy with the settings in setup.cfg; its cache makes all but the first run a matter of seconds."""
    assert not (said := run("mypy", "--cache-dir", str(ROOT / ".mypy_cache"), *CODE)), said


def test_style() -> None:
    assert not (said := run("flake8", *CODE, "tests", "setup.py")), said


def test_imports_are_sorted() -> None:
    assert not (said := run("isort", "--check-only", "--diff", *CODE, "tests", "setup.py")), said


def test_the_checkers_see_mistakes(tmp_path: Path) -> None:
    """So that the tests above cannot pass for want of checks."""
    path = tmp_path / "wrong.py"
    path.write_text("import sys\nimport os\n\n\ndef add(one: int) -> str:\n    return one + os.getpid()\n")
    settings = str(ROOT / "setup.cfg")
    assert "return-value" in run("mypy", "--config-file", settings, "--cache-dir", str(tmp_path / "cache"), str(path))
    assert "F401" in run("flake8", "--config", settings, str(path))
    assert "incorrectly sorted" in run("isort", "--check-only", "--settings-file", settings, str(path))
