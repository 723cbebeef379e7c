"""kill -9 while prompts are read, compared and written; then the same command gives the bytes of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
ROWS = 6000


def command(folder: Path) -> list[str]:
    return [sys.executable, str(ROOT / "data_prep" / "collect_prompts.py"), "+experiment=tiny", "data=files",
            f"data.sources.0.path={folder.parent}/p.jsonl", "tracking=disabled", "data.max_prompts=4000",
            f"run.dir={folder}/run", f"run.data_root={folder}/data"]


def start(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"})


MOMENTS = {  # a file of the folder "collecting" and the bytes it has by then
    "begun": ("pool.jsonl", 0), "reading": ("pool.jsonl", 100_000), "half read": ("signatures", ROWS // 2 * 512),
    "writing": ("prompts.jsonl", 0),
}


def reached(folder: Path, name: str, size: int, since: float) -> bool:
    """Whether a run started at ``since`` (the folder still holds what the one before left) has come this far."""
    for place in (folder / "data").glob("*/prompts-*/collecting"):
        try:
            found = (place / name).stat()
        except FileNotFoundError:
            continue
        if found.st_mtime >= since and found.st_size >= size:
            return True
    return False


def test_a_kill_at_any_time_and_again(tmp_path: Path) -> None:
    with open(tmp_path / "p.jsonl", "w", encoding="utf-8") as handle:
        for index in range(ROWS):
            words = f"prompt {index} asks about {index * 7} things, {index * index % 911} of them new, and more"
            handle.write(json.dumps({"id": str(index), "prompt": words}) + "\n")
            if index % 10 == 0:
                handle.write(json.dumps({"id": f"{index}-again", "prompt": f"{words} or less"}) + "\n")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(timeout=240) == 0
    for name, (file, size) in MOMENTS.items():
        since, process = time.time(), start(killed)
        deadline = time.monotonic() + 120
        while not reached(killed, file, size, since):
            assert process.poll() is None, f"finished before {name}"
            assert time.monotonic() < deadline, name
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        manifest = next(killed.rglob("manifest.json"))
        assert json.loads(manifest.read_text())["status"] == "incomplete", name
    assert start(killed).wait(timeout=240) == 0
    one, two = (next(folder.rglob("prompts.jsonl")).parent for folder in (whole, killed))
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    for path in one.iterdir():
        if path.name != "manifest.json":
            assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    totals = json.loads((two / "totals.json").read_text())["total"]
    assert totals["kept"] == 4000 and totals["dropped"]["near duplicate"] > 0
    assert one.name == two.name
