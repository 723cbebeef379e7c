"""What the doctor and the closed loop say of folders that are not there: one paragraph, exit code 2."""

from pathlib import Path

import pytest

from deepspec.config.schema import Config
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.jobs import check_job


def config(tmp_path: Path) -> Config:
    made = Config()
    made.run.dir, made.doctor.endpoint = str(tmp_path / "run"), "http://127.0.0.1:9"
    made.target.source, made.target.path = "hf", "owner/name"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return made


def export(tmp_path: Path) -> None:
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "export" / "config.json").write_text("{}")


@pytest.mark.parametrize("folder, says", [
    (None, "It holds no export: .*export_drafter.py"), ("/nowhere", "drafter=DIR")])
def test_a_missing_export_is_a_wrong_option(tmp_path: Path, folder: str, says: str) -> None:
    made = config(tmp_path)
    made.doctor.drafter = folder
    with pytest.raises(ConfigError, match=f"is not there, so the served drafter cannot be compared.*{says}") as found:
        check_job(made, "doctor")
    assert found.value.exit_code == 2 and "\n" not in str(found.value)


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "run" / "export").mkdir()
    with pytest.raises(InputRefused, match="has no config.json: it is no drafter"):
        check_job(made, "doctor")


def test_a_missing_target_is_named_before_anything_that_depends_on_it(tmp_path: Path) -> None:
    made = config(tmp_path)
    export(tmp_path)
    made.target.path = "/nowhere/target"
    with pytest.raises(ConfigError, match="target.path=/nowhere/target is not a folder on this machine") as found:
        check_job(made, "doctor")
    assert found.value.exit_code == 2


def test_the_loop_needs_the_export_in_service(tmp_path: Path) -> None:
    made = config(tmp_path)
    made.loop.records, made.loop.action = str(tmp_path / "records.jsonl"), "recalibrate"
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no run whose drafter is in service"):
        check_job(made, "loop")
