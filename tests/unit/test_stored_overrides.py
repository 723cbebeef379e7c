"""The options a run was started with, read again by later scripts."""

from pathlib import Path

import pytest

from deepspec.cli import with_stored_overrides
from deepspec.errors import ConfigError, InputRefused


def test_a_runs_own_options_come_first(tmp_path: Path) -> None:
    (tmp_path / "overrides.json").write_text('["+experiment=tiny", "run.seed=3", "trainer.epochs=2"]')
    given = [f"run.dir={tmp_path}", "run.seed=4"]
    assert with_stored_overrides(given) == ["+experiment=tiny", "trainer.epochs=2", *given]


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'{"run.seed": 3}', b"\xff\xfe"])
def test_damaged_options_are_refused_by_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "overrides.json").write_bytes(content)
    with pytest.raises(InputRefused, match=r"overrides\.json is not.*\+experiment=NAME"):
        with_stored_overrides([f"run.dir={tmp_path}"])
    assert with_stored_overrides([f"run.dir={tmp_path}", "+experiment=tiny"])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        with_stored_overrides([f"run.dir={tmp_path}"])
