"""kill -9 while answers are made, servers that die or fail: the ids and bytes are those of an undisturbed run."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

import pytest

from tests.conftest import ROOT, script

sys.path.insert(0, str(ROOT / "tests" / "unit" / "data"))

from tiny_data import END, MASK, ROWS, save_target, tiny_config, tiny_tokenizer  # noqa: E402

import deepspec.data.server as server_module  # noqa: E402
from deepspec.config import paths  # noqa: E402
from deepspec.config.schema import Config  # noqa: E402
from deepspec.data.dialogue import AnswerLimits  # noqa: E402
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts  # noqa: E402
from deepspec.data.prompts import PromptRow  # noqa: E402
from deepspec.data.rendering import Renderer  # noqa: E402
from deepspec.data.server_job import Request, answer_from_servers  # noqa: E402
from deepspec.errors import UserError  # noqa: E402
from deepspec.stages import prompts, responses  # noqa: E402
from deepspec.targets.sampling import Sampling  # noqa: E402

pytestmark = pytest.mark.slow
KILLS = 20
SHAPE = ["target.mask_token_id=3", "target.feature_layers=[0,2]"] + [
    f"target.shape.{name}={value}" for name, value in {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_layers": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "vocab_size": ROWS,
    }.items()]
TOOLS = ({"type": "function", "function": {"name": "f"}},)


@contextlib.contextmanager
def answer_server() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(address, process) of a server that gives the same conversation the same answer."""
    command = [sys.executable, str(ROOT / "tests" / "faults" / "answer_server.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def prompt_rows(count: int) -> list[PromptRow]:
    """Conversations with one to three answers, some with a system prompt, some with tools."""
    rows: list[PromptRow] = []
    for index in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be short"}] if index % 4 == 0 else []
        for turn in range(1 + index % 3):
            messages += [{"role": "user", "content": f"row {index} turn {turn} 😀"}, {"role": "assistant"}]
        tools = TOOLS if index % 5 == 0 else None
        rows.append(PromptRow(f"id-{index}", "chat", "train", "own", tuple(messages), tools))
    return rows


def answer_all(folder: Path, url: str, rows: list[PromptRow]) -> None:
    """What the stage does on one rank."""
    prepare_parts(folder)
    renderer = Renderer(tiny_tokenizer(), False)
    limits = AnswerLimits(16, 4000, MASK, thinking_share=0.5)
    request = Request(Sampling(0.7, 0.8, 20, seed=3), False, (END, 0), ROWS)
    todo = mine(rows, answered(folder), 0, 1)
    with PartWriter(folder) as writer:
        answer_from_servers([url], todo, renderer, writer, request, limits, model=None, concurrency=8, retries=2,
                            seconds_per_token=1.0, failure_limit=10)


def forked(folder: Path, url: str, rows: list[PromptRow]) -> int:
    """The same in a child; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            sys.stdout = sys.stderr = open(os.devnull, "w")
            answer_all(folder, url, rows)
            code = 0
        os._exit(code)
    return child


def part_size(folder: Path) -> int:
    path = folder / "parts" / "part-00000.jsonl"
    return path.stat().st_size if path.exists() else 0


def test_killed_at_any_time_it_gives_the_same_ids_and_bytes(tmp_path: Path) -> None:
    rows = prompt_rows(700)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    chance = random.Random(7)
    with answer_server() as (url, _):
        answer_all(whole, url, rows)
        step = part_size(whole) / (2 * KILLS)
        for kill in range(KILLS):
            before, child = part_size(killed), forked(killed, url, rows)
            enough, deadline = before + max(61, chance.random() * step), time.monotonic() + 60
            while part_size(killed) < enough:
                assert time.monotonic() < deadline
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it could be killed"
                time.sleep(0.001)
            time.sleep(chance.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if kill % 3 == 2:  # what had not reached the disk when power failed
                os.truncate(killed / "parts" / "part-00000.jsonl", part_size(killed) - chance.randint(1, 60))
        left = len(rows) - len(answered(killed))
        assert 0 < left < len(rows)
        answer_all(killed, url, rows)
    lines = (killed / "parts" / "part-00000.jsonl").read_bytes().split(b"\n")
    assert Counter(json.loads(line)["id"] for line in lines[:-1]) == Counter(row.id for row in rows)
    assert lines[-1] == b""
    for folder in (whole, killed):
        counts = join_parts(folder, rows, drop_truncated=True)
        assert counts["dropped_truncated"] > 10 and counts["failed"] == counts["missing"] == 0
    assert (killed / "responses.jsonl").read_bytes() == (whole / "responses.jsonl").read_bytes()
    assert (killed / "errors.jsonl").read_bytes() == b""


@pytest.fixture()
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The stage with 60 prompts, and a patience of half a second."""
    monkeypatch.setattr(server_module, "_BASE_TIMEOUT", 1.0)
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, [f"row {index}" for index in range(60)])
    result = tiny_config(tmp_path / "data", save_target(tmp_path / "target"), path)
    result.responses = replace(result.responses, backend="server", retries=1, seconds_per_token=0.001, concurrency=4,
                               patience_seconds=0.5, error_limit=0.05)
    prompts.run(result)
    return result


def write_prompts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"id": str(index), "prompt": text}) + "\n" for index, text in enumerate(texts)))


def test_the_script_exits_with_an_error_when_the_servers_are_dead(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", [f"row {index}" for index in range(300)])
    options = ["+experiment=tiny", "data=files", f"data.sources.0.path={tmp_path}/prompts.jsonl", "tracking=disabled",
               f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data", "target.source=hf", "target.name=own",
               f"target.path={target}", *SHAPE, "responses.concurrency=2", "responses.patience_seconds=0.5",
               "responses=server", "responses.retries=1"]
    assert script("collect_prompts", *options).returncode == 0
    with answer_server() as (url, process):
        def end() -> None:
            while not (parts := list((tmp_path / "data").rglob("part-*.jsonl"))) or not parts[0].stat().st_size:
                time.sleep(0.005)
            process.kill()

        threading.Thread(target=end, daemon=True).start()
        result = script("generate_responses", *options, f"responses.servers=[{url}]")
    said = result.stdout + result.stderr
    assert result.returncode == 1 and "The servers stopped answering" in said and "Traceback" not in said, said[-3000:]
    parts = next((tmp_path / "data").rglob("part-*.jsonl"))
    assert 1 <= parts.read_bytes().count(b"\n") < 300


def test_a_server_that_dies_half_way_keeps_its_rows(config: Config) -> None:
    with answer_server() as (url, process):
        config.responses.servers = [url]
        original, count = PartWriter.answer, 0

        def answer(self: PartWriter, row: Any) -> None:
            nonlocal count
            original(self, row)
            count += 1
            if count == 20:
                process.kill()

        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="stopped answering.*are finished"):
            patch.setattr(PartWriter, "answer", answer)
            responses.run(config)
    kept = answered(paths.responses_dir(config))
    assert 20 <= len(kept) < 60
    with answer_server() as (url, _):
        config.responses.servers = [url]
        responses.run(config)
    assert (paths.responses_dir(config) / "responses.jsonl").read_bytes().count(b"\n") == 60


def test_the_command_ends_with_an_error_above_the_limit_and_below_it_not(config: Config, tmp_path: Path) -> None:
    """One hanging and one broken row in 60 are less than 5 %; four are more."""
    for bad, limit_passed in ((["hang", "broken"], False), (["hang", "broken", "broken 2", "broken 3"], True)):
        write_prompts(tmp_path / "prompts.jsonl", bad + [f"row {index}" for index in range(len(bad), 60)])
        prompts.run(config)
        with answer_server() as (url, _):
            config.responses.servers = [url]
            if limit_passed:
                with pytest.raises(UserError, match=r"4 failed.*6\.7%.*error_limit is 5\.0%"):
                    responses.run(config)
            else:
                responses.run(config)
        lines = (paths.responses_dir(config) / "errors.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        errors = {row["id"]: row["reason"] for row in map(json.loads, lines)}
        assert set(errors) == {str(index) for index in range(len(bad))}
        assert "no reply" in errors["0"] and "HTTP 500" in errors["1"]
        stored = (paths.responses_dir(config) / "responses.jsonl").read_bytes().count(b"\n")
        assert stored == 60 - len(bad)
