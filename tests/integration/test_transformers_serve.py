"""Answers from ``transformers serve``: a real server, stopped in the middle and started again.

It gives no token ids, but counts prompt tokens, so a prompt that it renders otherwise would be refused. With greedy
decoding its answers are those of the target in process.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import httpx
import pytest
import torch

from deepspec.distributed import free_port
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit" / "data"))

from tiny_data import END, MASK, ROWS, save_target, tiny_config, tiny_tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from deepspec.data.dialogue import AnswerLimits  # noqa: E402
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts  # noqa: E402
from deepspec.data.prompt_rows import conversation  # noqa: E402
from deepspec.data.prompts import PromptRow  # noqa: E402
from deepspec.data.regenerate import answer_in_process  # noqa: E402
from deepspec.data.rendering import Renderer  # noqa: E402
from deepspec.data.responses import ResponseRow, read_responses  # noqa: E402
from deepspec.data.server_job import Request, answer_from_servers  # noqa: E402
from deepspec.data.server_pool import BreakerOptions  # noqa: E402
from deepspec.errors import UserError  # noqa: E402
from deepspec.targets.load import load_target  # noqa: E402
from deepspec.targets.sampling import Sampling  # noqa: E402

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytestmark = pytest.mark.slow

GREEDY = Sampling(0.0, 1.0, 0, 0)
LIMITS = AnswerLimits(12, 400, MASK, thinking_share=0.5)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def talkative_target(folder: Path) -> Path:
    """A random target that says words alone: one feature of the hidden state is always on and speaks against every
    other token. So its text has all its bytes, and no space at its beginning, which the server would cut off."""
    save_target(folder, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    words = [token for token in range(5, len(tokenizer)) if tokenizer.decode([token]).isalpha()
             and tokenizer.decode([token]).isascii()] + [END]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.model.embed_tokens.weight[:, 1:] *= 8.0
        for layer in model.model.layers:  # what was said before matters
            for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
                part.weight *= 8.0
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.weight[:, 0] = 0.0
        model.lm_head.weight[:, 1:] *= 8.0
        model.lm_head.weight[:, 0] = -30.0
        model.lm_head.weight[words, 0] = 0.0
        model.lm_head.weight[END, 1:] *= 1.8  # now and then
    model.save_pretrained(folder)
    return folder


def rows() -> list[PromptRow]:
    """Two turns each, some with a system prompt or tools."""
    result = []
    for index in range(12):
        messages: list[dict[str, object]] = [{"role": "system", "content": "short"}] if index % 3 == 0 else []
        messages += [{"role": "user", "content": f"fox {index} 😀"}, {"role": "assistant", "content": ""},
                     {"role": "user", "content": "and the dog?"}]
        found, tools = conversation({"messages": messages} | ({"tools": TOOLS} if index % 4 == 0 else {}))
        result.append(PromptRow(f"id-{index}", "chat", "train", "own", tuple(found), tuple(tools) if tools else None))
    return result


@contextlib.contextmanager
def served(target: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """``transformers serve`` with this model alone, once it answers."""
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(target),
               "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200:
                    break
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


def ask_server(folder: Path, port: int, prompts: list[PromptRow]) -> dict[str, object]:
    prepare_parts(folder)
    request = Request(GREEDY, None, (END, 0), ROWS)
    todo = mine(prompts, answered(folder), 0, 1)
    with PartWriter(folder) as writer:
        return answer_from_servers([f"http://127.0.0.1:{port}/v1"], todo, Renderer(tiny_tokenizer()), writer, request,
                                   LIMITS, model=None, concurrency=3, retries=1, seconds_per_token=1.0,
                                   failure_limit=20, breaker=BreakerOptions(patience=0.5))


def stored(folder: Path, prompts: list[PromptRow]) -> dict[str, ResponseRow]:
    join_parts(folder, prompts, drop_truncated=False)
    return {row.id: row for row in read_responses(folder)}


def test_answers_are_those_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts, port = talkative_target(tmp_path / "target"), rows(), free_port()
    original = PartWriter.answer
    with served(target, port) as server:
        def answer(self: PartWriter, row: ResponseRow) -> None:
            original(self, row)
            if self.counts["answered"] == 5:
                server.kill()

        with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped answering"):
            patch.setattr(PartWriter, "answer", answer)
            ask_server(tmp_path / "served", port, prompts)
    before = len(answered(tmp_path / "served"))
    assert 5 <= before < 10
    with served(target, port):
        result = ask_server(tmp_path / "served", port, prompts)
    assert result["model"] == str(target) and 0 < result["retokenised"] <= 2 * (len(prompts) - before)
    found = stored(tmp_path / "served", prompts)

    config = tiny_config(tmp_path / "data", target, tmp_path / "prompts.jsonl")
    prepare_parts(tmp_path / "own")
    with PartWriter(tmp_path / "own") as writer:
        answer_in_process(load_target(config.target, device=torch.device("cpu"), cache_dir=tmp_path,
                                      features=False),
                          Renderer(tiny_tokenizer()), prompts, writer, limits=LIMITS, sampling=GREEDY, batch_size=4)
    own = stored(tmp_path / "own", prompts)
    assert list(found) == list(own) and len(found) >= 8  # an empty answer is no answer, here as there
    assert len({turn.text for row in found.values() for turn in row.turns}) >= 5
    kinds = set()
    for name, row in found.items():
        assert [turn.text for turn in row.turns] == [turn.text for turn in own[name].turns]
        assert [turn.prompt_ids for turn in row.turns[:1]] == [turn.prompt_ids for turn in own[name].turns[:1]]
        assert row.thinking == own[name].thinking
        for turn in row.turns:
            kinds.add(turn.finish_reason)
            assert (turn.response_ids[-1] == END) == (turn.finish_reason == "stop")
    assert kinds == {"stop", "length"} and {row.thinking for row in found.values()} == {True, False}
    assert max(len(row.turns) for row in found.values()) == 2
