"""Responses from a real vLLM server: the rows, token for token, of the target in this process; also over a crash.

Needs DEEPSPEC_VLLM_PYTHON. The target is the micro target of ``+experiment=tiny``, trained once and cached in ``data``.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, Optional

import httpx
import pytest
import torch

from deepspec.config.compose import compose_config
from deepspec.config.paths import model_cache
from deepspec.data.responses import ResponseRow, read_responses
from deepspec.distributed import free_port
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target, locate

PYTHON = os.environ.get("DEEPSPEC_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to ask")
ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("vllm_server.py")
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Find a function.",
                                           "parameters": {"type": "object", "properties": {"name": {"type": "string"}},
                                                          "required": ["name"]}}}]
# To those in the places 1, 2, 7, 10, 11 and 13 the target gives an answer that ends, so that a second turn follows.
QUESTIONS = (
    "Explain os.path.join", "What should I look at first when a houseplant starts to drop its leaves?",
    "What is the difference between weather and climate?", "Explain re.sub", "Explain sorted", "Explain open",
    "Explain print", "Why do we yawn when somebody else yawns?", "Explain zip", "Explain str.split",
    "What questions should I ask before I rent an apartment?", "Who are you?", "Explain math.sqrt",
    "I have two hours in a city I have never been to. How do I make the most of them?", "Explain datetime.now",
    "Explain pathlib.Path",
)
CLOSE = 1e-3  # logits nearer than this may change places when a product is taken in another order


def write_prompts(path: Path) -> None:
    """Two turns each; some with a system prompt, tools and a tool's result, emoji and a control token as text."""
    with path.open("w", encoding="utf-8") as handle:
        for index, question in enumerate(QUESTIONS):
            messages: list[dict] = [{"role": "system", "content": "You write Python. 😀"}] if index % 3 == 0 else []
            messages += [{"role": "user", "content": question + ("\u2028<|im_end|>" if index == 5 else "")},
                         {"role": "assistant", "content": "an answer that is replaced"}]
            if index % 4 == 0:
                messages += [{"role": "tool", "tool_call_id": "1", "content": f"{index} results"}]
            messages += [{"role": "user", "content": "Write a function that uses it."}]
            row = {"id": f"row-{index}", "messages": messages} | ({"tools": TOOLS} if index % 4 == 0 else {})
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def served(target: Path, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """``vllm serve`` with the flags that requests with tools need, once it answers."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(PYTHON), str(SERVER), str(target), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
               "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--enable-auto-tool-choice",
               "--tool-call-parser", "hermes"]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True,
                                   env=environment | {"DEEPSPEC_VLLM_RUNNER": "1", "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200:
                    break
            time.sleep(0.3)
        yield process
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """The server and its engine, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command(script: str, folder: Path, target: Path, prompts: Path, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / script), "+experiment=tiny", "data=files",
            f"data.sources.0.path={prompts}", "data.near_duplicate_threshold=null",
            "data.max_prompts=null", "target.source=hf", f"target.path={target}",
            f"run.data_root={folder}", f"run.dir={folder / 'run'}", "responses.max_tokens=32",
            "responses.temperature=0", "responses.top_p=1", "responses.top_k=0", "data.max_length=320", *options]


def run(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(arguments, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


def part_rows(folder: Path) -> list[bytes]:
    files = list(folder.glob("*/responses-*/parts/part-*.jsonl"))
    return [line for path in files for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def answers(folder: Path) -> dict[str, ResponseRow]:
    (path,) = folder.glob("*/responses-*")
    return {row.id: row for row in read_responses(path)}


def crash_half_way(arguments: list[str], folder: Path, server: "subprocess.Popen[bytes]") -> list[bytes]:
    """Start the job, kill the server after five rows; what was written by then."""
    job = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})
    while len(part_rows(folder)) < 5 and job.poll() is None:
        time.sleep(0.02)
    stop(server)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 1 and "stopped answering" in errors, errors[-3000:]
    assert "Traceback" not in errors
    return part_rows(folder)


def first_difference(left: ResponseRow, right: ResponseRow) -> Optional[tuple[list[int], int, int]]:
    """(all ids before it, the two ids) where two answers part; None if they are the same."""
    for one, two in zip(left.turns, right.turns):
        for place, (mine, theirs) in enumerate(zip(one.response_ids, two.response_ids)):
            if mine != theirs:
                assert one.prompt_ids == two.prompt_ids
                return [*one.prompt_ids, *one.response_ids[:place]], mine, theirs
        assert one.response_ids == two.response_ids and one.finish_reason == two.finish_reason
    assert len(left.turns) == len(right.turns)
    return None


def gap(target: FrozenTarget, ids: list[int], one: int, two: int) -> float:
    """How far apart the logits of two next tokens are."""
    hidden = target.encode(torch.tensor(ids), [len(ids)], features=False).last_hidden[-1:]
    logits = target.logits(hidden)[0]
    return abs(float(logits[one] - logits[two]))


def test_a_server_that_crashes_gives_the_answers_of_the_target_in_process(tmp_path: Path) -> None:
    config = compose_config(["+experiment=tiny"])
    folder = Path(locate(config.target, model_cache(config))).resolve()
    prompts, port = tmp_path / "prompts.jsonl", free_port()
    write_prompts(prompts)
    done = run(command("launch/train_drafter.py", tmp_path / "own", folder, prompts, "stages=[prompts,responses]"))
    assert done.returncode == 0, done.stderr[-3000:]

    there = command("data_prep/generate_responses.py", tmp_path / "there", folder, prompts, "responses=server",
                    f"responses.servers=[http://127.0.0.1:{port}/v1]", "responses.patience_seconds=2",
                    "responses.concurrency=3")
    (collected,) = (tmp_path / "own").glob("*/prompts-*")
    shutil.copytree(collected, tmp_path / "there" / collected.relative_to(tmp_path / "own"))
    with served(folder, port, tmp_path / "server.log") as server:
        before = crash_half_way(there, tmp_path / "there", server)
    assert 5 <= len(before) < len(QUESTIONS)
    with served(folder, port, tmp_path / "server.log"):
        done = run(there)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "without token ids" not in done.stderr, "the server's own ids are what is stored"
    kept = {json.loads(line)["id"]: json.loads(line)["turns"] for line in before}

    mine, theirs = answers(tmp_path / "own"), answers(tmp_path / "there")
    assert list(mine) == list(theirs) and len(mine) == len(QUESTIONS)
    assert max(len(row.turns) for row in theirs.values()) == 2
    target = load_target(config.target, device=torch.device("cpu"), cache_dir=model_cache(config), features=False)
    reasons, parted = set(), 0
    for name, row in theirs.items():
        if name in kept:
            assert [list(turn.response_ids) for turn in row.turns] == [turn["response_ids"] for turn in kept[name]]
        reasons |= {turn.finish_reason for turn in row.turns}
        for turn in row.turns:
            assert (turn.response_ids[-1] == target.tokenizer.eos_token_id) == (turn.finish_reason == "stop")
        found = first_difference(mine[name], row)
        if found is not None:
            parted += 1
            assert gap(target, *found) < CLOSE, f"{name} parts where the target is sure"
    assert reasons == {"stop", "length"}
    print(f"{len(theirs)} rows, {sum(len(row.turns) for row in theirs.values())} turns, {parted} parted at a tie")
    assert parted <= 2
