"""Manifests and atomic writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepspec import artifacts
from deepspec.errors import InputRefused


def test_a_directory_is_incomplete_until_completed(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    manifest = artifacts.begin(folder, "extract_features", "f" * 64, inputs={"responses": "a"}, seed=3)
    assert not artifacts.is_complete(folder)
    with pytest.raises(InputRefused, match="unfinished.*make-it"):
        artifacts.require_complete(folder, "Features", "make-it")
    (folder / "x.bin").write_bytes(b"abc")
    artifacts.complete(folder, manifest, ["x.bin"], {"rows": 1})
    assert artifacts.is_complete(folder, "f" * 64)
    assert not artifacts.is_complete(folder, "0" * 64)
    stored = artifacts.read_manifest(folder)
    assert stored is not None
    assert stored.files == {"x.bin": artifacts.sha256_file(folder / "x.bin")}
    assert (stored.facts, stored.inputs, stored.seed) == ({"rows": 1}, {"responses": "a"}, 3)
    assert "torch" in stored.packages


def test_missing_artifact_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="Responses not found.*python make.py"):
        artifacts.require_complete(tmp_path / "none", "Responses", "python make.py")


def test_unreadable_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{half")
    with pytest.raises(InputRefused, match="not readable as JSON"):
        artifacts.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(InputRefused, match="schema_version 99"):
        artifacts.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "stages": {}}))
    with pytest.raises(InputRefused, match="not the manifest of an artifact.*producer, status, fingerprint"):
        artifacts.read_manifest(tmp_path)
    with pytest.raises(InputRefused, match="manifest.json/manifest.json cannot be read .Not a directory."):
        artifacts.read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize("table", ["inputs", "files", "facts", "config", "packages"])
@pytest.mark.parametrize("value", [None, [1], "text"])
def test_a_manifest_whose_tables_are_none_is_refused(tmp_path: Path, table: str, value: object) -> None:
    artifacts.begin(tmp_path, "features", "f")
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {table: value}))
    with pytest.raises(InputRefused, match=f"manifest.json is damaged: {table}="):
        artifacts.read_manifest(tmp_path)


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    artifacts.atomic_write_json(path, {"a": 1})

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.os, "fsync", full_disk)
    with pytest.raises(OSError):
        artifacts.atomic_write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        artifacts.atomic_write_json(tmp_path / "x.json", {"a": float("nan")})


def test_canonical_hash_ignores_key_order_and_sees_values() -> None:
    assert artifacts.canonical_hash({"a": 1, "b": [2]}) == artifacts.canonical_hash({"b": [2], "a": 1})
    assert artifacts.canonical_hash({"a": 1}) != artifacts.canonical_hash({"a": 2})


def test_tensors_can_be_read_by_whoever_may_read_other_new_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "own")
    artifacts.write_readable(tmp_path / "shared", lambda path: save_file({"a": torch.zeros(2)}, path))
    (tmp_path / "plain").touch()
    assert (tmp_path / "shared").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "own").read_bytes()
