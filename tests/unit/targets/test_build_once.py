"""Directories that are made once."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from deepspec.artifacts import is_complete, read_manifest
from deepspec.errors import UserError
from deepspec.targets.once import build_once


def _make(directory: Path, build: Any, fingerprint: str = "f") -> Path:
    return build_once(directory, producer="tests", fingerprint=fingerprint, config={}, seed=0, build=build)


def _slow(folder: Path) -> dict[str, Any]:
    with open(folder.parent / "builds.txt", "a") as handle:
        handle.write("x")
    (folder / "half").write_text("1")
    time.sleep(0.5)
    (folder / "half").write_text("12")
    return {"size": 2}


def _child(directory: Path) -> None:
    _make(directory, _slow)
    assert (directory / "half").read_text() == "12"


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(directory,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "builds.txt").read_text() == "x"
    manifest = read_manifest(directory)
    assert manifest is not None and manifest.status == "complete" and manifest.facts == {"size": 2}
    assert list(manifest.files) == ["half"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("1")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        _make(tmp_path / "made", fail)
    assert not (tmp_path / "made").exists() and not list(tmp_path.glob(".*.tmp"))
    stale = tmp_path / ".made.1.tmp"  # of a builder that was killed
    stale.mkdir()
    _make(tmp_path / "made", _slow)
    assert is_complete(tmp_path / "made", "f") and not stale.exists()


def test_another_fingerprint_builds_again(tmp_path: Path) -> None:
    for fingerprint in ("f", "f", "g"):
        _make(tmp_path / "made", _slow, fingerprint)
    assert (tmp_path / "builds.txt").read_text() == "xx" and is_complete(tmp_path / "made", "g")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run.data_root"):
        _make(tmp_path / "file" / "made", _slow)
