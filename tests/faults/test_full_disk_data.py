"""A disk that fills up while prompts are collected and while answers come in: nothing half-done stays for good."""

import contextlib
import errno
import json
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.collect import collect
from deepspec.data.parts import answered, join_parts
from tests.conftest import script
from tests.faults.test_responses_faults import answer_all, answer_server, prompt_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def larger(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def write_prompts(path: Path) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        for index in range(3000):
            words = " ".join(f"word{index * 31 % (place + 991)}" for place in range(40))
            handle.write(json.dumps({"id": str(index), "prompt": f"prompt {index}: {words}"}) + "\n")


def test_prompts_that_fit_but_not_their_temporary_files(small_disk: Path, tmp_path: Path) -> None:
    """Ten prompts are wanted of a megabyte of them, which waits on disk until the choice is made."""
    write_prompts(tmp_path / "p.jsonl")
    result = script("collect_prompts", "+experiment=tiny", "data=files", f"data.sources.0.path={tmp_path}/p.jsonl",
                    "data.max_prompts=10", "data.decontaminate_benchmarks=false", f"run.data_root={small_disk}/data",
                    f"run.dir={tmp_path}/run", "tracking=disabled")
    said = result.stdout + result.stderr
    assert result.returncode == 3 and "Not enough disk" in said and "temporary files" in said, said[-2000:]
    assert not list(small_disk.rglob("*.jsonl"))


def test_a_disk_that_fills_up_while_prompts_are_collected(small_disk: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl")
    data = DataConfig(sources=[SourceConfig("own", "jsonl", str(tmp_path / "p.jsonl"))], max_prompts=10)
    with pytest.raises(OSError) as caught:
        collect(data, 0, small_disk / "prompts")
    assert caught.value.errno == errno.ENOSPC
    assert not [path for path in small_disk.rglob("*") if path.is_file()], "temporary files keep the disk full"
    larger(small_disk)
    assert collect(data, 0, small_disk / "prompts").everything().kept == 10
    collect(data, 0, tmp_path / "whole")
    one, two = (folder / "prompts.jsonl" for folder in (small_disk / "prompts", tmp_path / "whole"))
    assert one.read_bytes() == two.read_bytes()


def test_a_disk_that_fills_up_while_answers_come(small_disk: Path, tmp_path: Path) -> None:
    rows = prompt_rows(1500)
    folder, whole = small_disk / "answers", tmp_path / "whole"
    with answer_server() as (url, _):
        with pytest.raises(OSError) as caught:
            answer_all(folder, url, rows)
        assert caught.value.errno == errno.ENOSPC
        done = answered(folder)
        assert 0 < len(done) < len(rows)
        larger(small_disk)
        answer_all(folder, url, rows)
        answer_all(whole, url, rows)
    lines = b"".join(path.read_bytes() for path in (folder / "parts").glob("part-*.jsonl")).split(b"\n")[:-1]
    assert sorted(json.loads(line)["id"] for line in lines) == sorted(row.id for row in rows)
    for place in (folder, whole):
        join_parts(place, rows, drop_truncated=False)
    assert (folder / "responses.jsonl").read_bytes() == (whole / "responses.jsonl").read_bytes()
    with contextlib.suppress(FileNotFoundError):
        assert (folder / "errors.jsonl").read_bytes() == b""
