"""What a user can get wrong, through the real scripts: one clear paragraph, the documented exit code, nothing lost."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import script

pytestmark = pytest.mark.slow
TINY = (
    "+experiment=tiny", "tracking=disabled", "run.threads=1", "run.seed=12", "data.max_prompts=24",
    "data.min_held_out=3", "responses.max_tokens=24", "trainer.epochs=1", "trainer.global_batch_size=8",
    "trainer.num_anchors=6",
)


def refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One paragraph on stderr with all ``words``, no traceback, exit ``code``."""
    assert result.returncode == code, (result.returncode, result.stdout[-1500:], result.stderr[-3000:])
    assert "Traceback" not in result.stderr
    report = result.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in report, report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> tuple[Path, Path]:
    """A run of prompts to train: its directory, and a data root of its own that shares the micro target."""
    root = tmp_path_factory.mktemp("faults")
    data = root / "data"
    data.mkdir()
    (data_root / "targets").mkdir(parents=True, exist_ok=True)
    (data / "targets").symlink_to((data_root / "targets").resolve())
    result = script("train_drafter", *TINY, f"run.dir={root}/run", f"run.data_root={data}",
                    "stages=[prompts,responses,features,train]", timeout=900)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return root / "run", data


def test_unknown_key_and_wrong_values(tmp_path: Path) -> None:
    run = f"run.dir={tmp_path}/run"
    refused(script("train_drafter", *TINY, run, "+drafter.blok_size=8"), 2, "drafter.blok_size", "drafter.block_size")
    refused(script("train_drafter", *TINY, run, "drafter.block_size=0"), 2, "drafter.block_size", "0")
    refused(script("train_drafter", *TINY, run, "target.mask_token_id=2112"), 2, "mask_token_id", "2112")
    refused(script("train_drafter", *TINY, run, "target.feature_layers=[1,8]"), 2, "feature_layers", "8")
    refused(script("train_drafter", *TINY, run, "target.feature_layers=[1,7]"), 2, "feature_layers", "last")
    refused(script("train_drafter", *TINY, run, "trainer.global_batch_size=7"), 2, "global_batch_size=7", "multiple")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_missing_responses_name_the_command(tmp_path: Path) -> None:
    places = (f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data")
    refused(script("train_drafter", *TINY, *places, "stages=[train]"), 3, "features", "extract_features.py")
    refused(script("extract_features", *TINY, *places), 3, "responses", "generate_responses.py")
    refused(script("generate_responses", *TINY, *places), 3, "prompts", "collect_prompts.py")


def prompts_file(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return ("data=files", f"data.sources.0.path={path}", f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data")


def test_empty_prompts_file(tmp_path: Path) -> None:
    refused(script("collect_prompts", *TINY, *prompts_file(tmp_path, "")), 3, "p.jsonl", "0 prompts")


def test_a_bad_row_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    text = '{"prompt": "one"}\n{"messages": []}\n\n{"prompt": "two\u2028lines"}\n'
    result = script("collect_prompts", *TINY, *prompts_file(tmp_path, text))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "p.jsonl:2" in result.stdout + result.stderr
    rows = next((tmp_path / "data").rglob("prompts.jsonl")).read_bytes().decode().split("\n")[:-1]
    assert sorted(json.loads(row)["messages"][0]["content"] for row in rows) == ["one", "two\u2028lines"]


def test_a_row_that_is_not_json_is_named(tmp_path: Path) -> None:
    result = script("collect_prompts", *TINY, *prompts_file(tmp_path, '{"prompt": "one"}\n{"prompt": \n'))
    assert "p.jsonl:2" in result.stdout + result.stderr
    assert result.returncode in (0, 3) and "Traceback" not in result.stderr


def test_features_of_another_target_are_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = trained
    features = next(data.rglob("features-*"))
    manifest = features / "manifest.json"
    original = manifest.read_text()
    fingerprint = re.search(r'"target_fingerprint": "(\w+)"', original).group(1)
    try:
        manifest.write_text(original.replace(fingerprint, "0" * len(fingerprint)))
        result = script("train_drafter", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={data}", "stages=[train]")
        refused(result, 3, "target_fingerprint", "extract_features.py")
    finally:
        manifest.write_text(original)


def test_a_damaged_feature_shard_names_the_file_and_the_repair(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = trained
    copy = tmp_path / "data"
    shutil.copytree(data, copy, symlinks=True)
    shard = max((path for path in next(copy.rglob("features-*")).iterdir()), key=lambda path: path.stat().st_size)
    with open(shard, "r+b") as handle:
        handle.truncate(shard.stat().st_size // 2)
    result = script("train_drafter", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={copy}", "stages=[train]")
    refused(result, 3, shard.name)


def test_a_checkpoint_of_another_drafter_is_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = trained
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    result = script("train_drafter", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={data}", "stages=[train]",
                    "drafter.num_layers=1")
    refused(result, 3, "num_layers")


def test_a_wrong_resume_path_is_fatal(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = trained
    result = script("train_drafter", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={data}", "stages=[train]",
                    f"trainer.resume={tmp_path}/typo")
    refused(result, 3, "typo")


def test_a_stage_script_needs_a_run(tmp_path: Path) -> None:
    refused(script("evaluate_drafter", f"run.dir={tmp_path}/none"), 2, "none", "+experiment=")


def test_no_disk(tmp_path: Path, data_root: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "targets").symlink_to((data_root / "targets").resolve())
        result = script("train_drafter", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data",
                        "stages=[prompts,responses,features]")
        refused(result, 3, "disk")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=False)


def test_two_jobs_never_share_a_run_directory(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        result = script("collect_prompts", *TINY, f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data")
    refused(result, 3, "in use", "run.name=")
