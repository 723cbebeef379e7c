"""python -m deepspec.runs: what a tree of runs holds, and that cleaning takes only what nothing needs."""

import fcntl
import json
import socket
from pathlib import Path

import pytest

from deepspec.runs.__main__ import main
from deepspec.runs.tree import find, listing, removable, unused_data

CHECKPOINT = {"producer": "train", "status": "complete", "fingerprint": "f", "schema_version": 1}


def make_run(path: Path, *, features: Path, steps: tuple[int, ...] = (50, 100), state: str = "complete",
             length: float = 2.0) -> Path:
    stages = {"features": {"status": "complete", "seconds": 5.0, "outputs": {str(features / "manifest.json"): "x"}},
              "train": {"status": state, "seconds": 70.0, "outputs": {}}}
    config = {"drafter": {"algorithm": "dspark"}, "target": {"name": "micro"}}
    for step in steps:
        tag = path / "checkpoints" / f"step-{step}"
        (tag / "drafter").mkdir(parents=True)
        (tag / "drafter" / "model.safetensors").write_bytes(b"x" * 1000)
        (tag / "manifest.json").write_text(json.dumps(CHECKPOINT))
        (tag / "state.json").write_text("{}")
    (path / "checkpoints" / "latest").write_text(f"step-{max(steps)}\n")
    (path / "manifest.json").write_text(json.dumps({"name": path.name, "stages": stages, "config": config}))
    (path / ".lock").touch()
    values = {"acceptance_length": length, "acceptance_length_ci95": [length - 0.1, length + 0.1]}
    (path / "evaluation.json").write_text(json.dumps({"settings": {"t1-b8-fixed": {
        "decoding": "fixed", "domains": {"chat": values}, "macro": values | {"tokens_per_second": 12.5}}}}))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("used", "unused"):
        (tmp_path / "data" / "micro" / f"features-{name}").mkdir(parents=True)
        (tmp_path / "data" / "micro" / f"features-{name}" / "shard-0").write_bytes(b"x" * 5000)
    (tmp_path / "data" / "micro" / "responses-1").mkdir()
    used = tmp_path / "data" / "micro" / "features-used"
    make_run(tmp_path / "runs" / "a", features=used, steps=(50, 100, 150))
    make_run(tmp_path / "runs" / "sweeps" / "s" / "b", features=used, state="running", length=3.0)
    return tmp_path


def test_runs_are_found_and_listed(tree: Path) -> None:
    assert [run.path.name for run in find(tree / "runs")] == ["a", "b"]
    lines = listing(tree / "runs").splitlines()
    assert lines[1].split()[1:6] == ["dspark", "micro", "complete", "2.000", "12.5"]
    assert lines[2].split()[1:6] == ["dspark", "micro", "train", "killed", "3.000"], "nobody holds its lock"


def test_a_tree_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["list", str(tmp_path)]) == 3


def test_show_and_compare(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert main(["show", str(tree / "runs" / "a")]) == 0
    assert "features  complete" in caplog.text and "2.00" in caplog.text
    caplog.clear()
    assert main(["compare", str(tree / "runs" / "a"), str(tree / "runs" / "sweeps" / "s" / "b")]) == 0
    assert "2.00 (1.90-2.10)" in caplog.text and "3.00 (2.90-3.10)" in caplog.text


def test_what_can_go(tree: Path) -> None:
    run = tree / "runs" / "a"
    (run / "checkpoints" / "best").write_text("step-50\n")
    (run / "checkpoints" / ".step-170.tmp").mkdir()
    found = {path.name for path, _ in removable(run)}
    assert found == {"step-100", ".step-170.tmp"}
    assert [path.name for path, _ in unused_data(tree / "data", find(tree / "runs"))] == ["features-unused"]


def test_a_store_that_a_run_filled_while_training_is_used_and_a_run_that_does_not_say_keeps_all(tree: Path) -> None:
    for name, train in (("hybrid", {"reads": ["/elsewhere/micro/features-unused"]}), ("old", {})):
        run = tree / "runs" / name
        make_run(run, features=tree / "data" / "micro" / "features-used")
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["stages"] = {"train": manifest["stages"]["train"] | train}
        manifest["config"]["features"] = {"mode": "hybrid"}
        (run / "manifest.json").write_text(json.dumps(manifest))
        assert unused_data(tree / "data", find(tree / "runs")) == []
        manifest["config"]["features"] = {"mode": "online"}
        manifest["stages"]["train"].pop("reads", None)
        (run / "manifest.json").write_text(json.dumps(manifest))
        assert [path.name for path, _ in unused_data(tree / "data", find(tree / "runs"))] == ["features-unused"]


def test_clean_tells_first_and_removes_when_told_to(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = sorted(tree.rglob("*"))
    words = ["clean", str(tree / "runs"), "--data", str(tree / "data")]
    assert main(words) == 0 and sorted(tree.rglob("*")) == before and "--yes" in caplog.text
    with open(tree / "runs" / "sweeps" / "s" / "b" / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert main([*words, "--yes"]) == 0
    kept = {path.name for path in (tree / "runs" / "a" / "checkpoints").iterdir()}
    assert kept == {"step-150", "latest"}
    assert "in use" in caplog.text and (tree / "runs" / "sweeps" / "s" / "b" / "checkpoints" / "step-50").is_dir()
    assert not (tree / "data" / "micro" / "features-unused").exists()
    assert (tree / "data" / "micro" / "features-used").is_dir() and (tree / "data" / "micro" / "responses-1").is_dir()


def test_a_mistyped_data_folder_is_not_an_empty_one(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["clean", str(tree / "runs"), "--data", str(tree / "date"), "--yes"]) == 3
    assert "date is not a directory" in caplog.text
    assert (tree / "runs" / "a" / "checkpoints" / "step-100").is_dir()


def test_a_stage_without_a_process_was_killed(tree: Path) -> None:
    """The lock tells; a run on another host is believed, for its lock may not be seen here."""
    path = tree / "runs" / "sweeps" / "s" / "b"
    with open(path / ".lock", "r+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert find(path)[0].state == "train running"
    assert find(path)[0].state == "train killed"
    manifest = json.loads((path / "manifest.json").read_text())
    for host, status in ((socket.gethostname(), "killed"), ("another", "running")):
        manifest["stages"]["train"]["host"] = host
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert find(path)[0].status("train") == status
