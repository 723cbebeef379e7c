"""An installation without the repository: a wheel in an environment of its own, its commands run in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Callable

import pytest

from deepspec.cli.scripts import SCRIPTS, console_name
from tests.conftest import _LAUNCHER_VARIABLES, ROOT

pytestmark = pytest.mark.slow
SOURCES = ("deepspec", "conf", "launch", "data_prep", "docs", "tests")
FILES = ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
         "constraints.txt", "constraints-cuda.txt")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is under version control, for builds leave folders behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def environment(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; third-party packages are those of this one, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(built, check=True, timeout=300)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    packages = next(venv.glob("lib/python*/site-packages"))
    # Paths of a .pth file are not searched for .pth files in turn: an editable installation there stays unseen.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheel = next(folder.glob("*.whl"))
    subprocess.run([*pip, "--python", str(venv / "bin" / "python"), "install", "-q", "--no-deps", "--no-index",
                    str(wheel)], check=True, timeout=300)
    return venv


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Run:
    """Runs a console command of the installation in an empty folder."""
    hidden = (*_LAUNCHER_VARIABLES, "PYTHONPATH")
    clean = {key: value for key, value in os.environ.items() if key not in hidden}

    def run(command: str, *arguments: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([str(environment / "bin" / command), *arguments], cwd=tmp_path, capture_output=True,
                              text=True, timeout=timeout, env=clean | {"DS_ACCELERATOR": "cpu"})

    return run


def test_the_plan_of_an_installation_is_the_repositorys(installed: Run, tmp_path: Path) -> None:
    done = installed("deepspec-train", "+experiment=qwen3_8b", "plan=true")
    assert done.returncode == 0, done.stderr
    assert "qwen3_8b" in done.stdout and "H100" in done.stdout
    assert not list(tmp_path.iterdir()), "a plan leaves nothing"


def test_the_configuration_is_in_the_package(installed: Run) -> None:
    done = installed("deepspec-train", "+experiment=tiny", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "block_size: 7" in done.stdout and "num_layers: 2" in done.stdout


@pytest.mark.parametrize("name", ["train_drafter", "collect_prompts", "sweep"])
def test_help_names_the_installed_command(installed: Run, name: str) -> None:
    done = installed(console_name(name), "--help")
    assert done.returncode == 0, done.stderr
    assert SCRIPTS[name].summary in done.stdout and f"    {console_name(name)} " in done.stdout
    assert ".py" not in done.stdout.split("Choices")[0]


def test_messages_name_commands_that_there_are(installed: Run) -> None:
    done = installed("deepspec-calibrate", "+experiment=tiny", "stages=[calibrate]")
    assert done.returncode == 3, done.stderr
    assert "Make it with: deepspec-fit-confidence" in done.stderr and "launch/" not in done.stderr


def test_the_main_job_starts_under_the_launcher(installed: Run, tmp_path: Path) -> None:
    done = installed("deepspec-train", "--num_accelerators", "2", "--", "+experiment=tiny", "stages=[prompts]",
                     "data.max_prompts=12", "data.min_held_out=1", "tracking=disabled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "tiny" / "manifest.json").is_file()
    assert list((tmp_path / "data" / "micro").glob("prompts-*/prompts.jsonl"))
    assert "--module" in done.stdout + done.stderr, "two ranks of the launcher"
    runs = installed("deepspec-runs", "list", "runs")
    assert runs.returncode == 0 and "runs/tiny" in runs.stdout


def test_every_script_has_a_command(environment: Path) -> None:
    there = {path.name for path in (environment / "bin").iterdir()}
    assert {console_name(name) for name in SCRIPTS} <= there


def test_the_source_distribution_builds_and_holds_the_tests(source: Path, tmp_path: Path) -> None:
    """As is the convention: whoever packages the project again can run what checks it."""
    build = "from setuptools import build_meta; build_meta.build_sdist({!r})".format(str(tmp_path))
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in ("tests/run.sh", "tests/unit/test_docs.py", "conf/base.yaml", "launch/train_drafter.py", "setup.py",
                 "constraints.txt", "docs/data.md"):
        assert path in names
