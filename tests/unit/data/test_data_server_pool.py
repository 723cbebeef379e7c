"""Servers that hang, break off, die and come back: where the work goes, and when the job gives up."""

import itertools
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, delayed, last_user, reply
from test_data_server import failures, job, prompt, stored

import deepspec.data.server as server_module
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.parts import answered
from deepspec.data.server_pool import BreakerOptions
from deepspec.errors import UserError

BREAKER = BreakerOptions(failures=3, patience=0.4, first_rest=0.05)


def rows_of(count: int) -> list:
    return [prompt(str(index)) for index in range(count)]


@pytest.fixture()
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(server_module, "_BASE_TIMEOUT", 0.15)
    return {"seconds_per_token": 0.001, "retries": 4, "breaker": BREAKER}


def test_work_leaves_a_server_that_hangs(tmp_path: Path, short_timeout: dict) -> None:
    rows = rows_of(60)
    hang = threading.Event()
    with FakeServer(lambda body: hang.wait(5) and reply()) as dead, \
            FakeServer(lambda body: delayed(0.03, reply())) as alive:
        result = job(tmp_path, [dead.url, alive.url], rows, concurrency=8, **short_timeout)
        hang.set()
    assert len(stored(tmp_path, rows)) == 60 and failures(tmp_path, rows) == {}
    assert result["servers"][dead.url]["opened"] >= 1 and result["servers"][alive.url]["opened"] == 0
    assert len(dead.requests) < 12  # three rows in a row, what was under way with them, and a trial now and then
    assert result["requests"] == len(dead.requests) + len(alive.requests)


def test_a_server_that_hangs_alone_stops_the_job_and_marks_nothing(tmp_path: Path, short_timeout: dict) -> None:
    rows = rows_of(30)
    count, hang = itertools.count(), threading.Event()
    with FakeServer(lambda body: reply() if next(count) < 8 else hang.wait(5) and reply()) as server:
        with pytest.raises(UserError, match="stopped answering.*no reply.*8 rows are finished and kept"):
            job(tmp_path, [server.url], rows, **short_timeout)
        hang.set()
    assert len(answered(tmp_path)) == 8 and failures(tmp_path, rows) == {}
    with FakeServer(lambda body: reply()) as server:
        job(tmp_path, [server.url], rows)
    assert len(server.requests) == 22 and len(stored(tmp_path, rows)) == 30


def test_a_server_that_comes_back_gets_work_again(tmp_path: Path) -> None:
    """It dies half way and starts anew at the same address, well before the patience ends."""
    rows = rows_of(60)
    first = FakeServer(lambda body: delayed(0.01, reply()))
    count = itertools.count()
    second: list[FakeServer] = []

    def restart() -> None:
        first.stop()
        time.sleep(0.3)
        second.append(FakeServer(lambda body: reply(), port=int(first.url.split(":")[-1].split("/")[0])))
        second[0]._thread.start()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if next(count) == 20:
            threading.Thread(target=restart, daemon=True).start()
        return delayed(0.01, reply())

    first._answer = answer
    first._thread.start()
    result = job(tmp_path, [first.url], rows, retries=4, breaker=BreakerOptions(3, patience=10.0, first_rest=0.05))
    second[0].stop()
    assert len(stored(tmp_path, rows)) == 60 and failures(tmp_path, rows) == {}
    assert result["servers"][first.url]["opened"] >= 1
    assert len(second[0].requests) >= 30


def test_a_server_that_starts_late_joins_in(tmp_path: Path) -> None:
    rows = rows_of(40)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    late = FakeServer(lambda body: reply(), port=port, bind=False)
    count = itertools.count()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if next(count) == 4:
            late.open()
        return delayed(0.05, reply())

    with FakeServer(answer) as early:
        job(tmp_path, [early.url, late.url], rows, breaker=BREAKER)
    late.stop()
    assert late.requests and len(late.requests) + len(early.requests) == 40
    assert len(stored(tmp_path, rows)) == 40


def test_a_server_with_another_model_after_its_return_gets_nothing(tmp_path: Path) -> None:
    rows = rows_of(30)
    swapped: list[dict[str, Any]] = []
    with FakeServer(lambda body: delayed(0.02, reply())) as good, FakeServer(lambda body: reply()) as other:
        def broken(body: dict[str, Any]) -> dict[str, Any]:
            other._models = ("something else",)
            swapped.append(body)
            return {"status": 500, "text": "out of memory"}

        other._answer = broken
        result = job(tmp_path, [good.url, other.url], rows, retries=4, breaker=BREAKER)
    assert result["servers"][other.url]["opened"] == 1
    assert len(swapped) < 8 and len(stored(tmp_path, rows)) == 30


def test_rows_that_break_the_only_server_do_not_stop_the_job(tmp_path: Path) -> None:
    """More of them in a row than the breaker takes: they are the ones at fault, and a resume would meet them again."""
    rows = rows_of(20)
    bad = {str(index) for index in range(12, 20)}
    with FakeServer(lambda body: {"status": 500, "text": "boom"} if last_user(body) in bad else reply()) as server:
        result = job(tmp_path, [server.url], rows, breaker=BREAKER)
    assert set(failures(tmp_path, rows)) == bad and len(stored(tmp_path, rows)) == 12
    assert result["requests"] <= 12 + len(bad) * 3


@pytest.mark.parametrize("broken", ["half a body", "no json", "cut ids"])
def test_partial_replies_are_never_stored(tmp_path: Path, broken: str) -> None:
    rows = rows_of(10)
    count = itertools.count()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if last_user(body) != "3" or (broken != "cut ids" and next(count) >= 1):
            return reply("whole")
        if broken == "cut ids":
            return reply("whole", token_ids=[300, 301]) | {"usage": {"completion_tokens": 5}}
        return {"raw": b'{"choices":[{"mess', "length": 5000 if broken == "half a body" else None}

    with FakeServer(answer) as server:
        result = job(tmp_path, [server.url], rows, breaker=BREAKER)
    found = stored(tmp_path, rows)
    if broken == "cut ids":
        assert "2 token ids for an answer of 5 tokens" in failures(tmp_path, rows)["3"]
        assert len(found) == 9 and result["requests"] == 10
    else:
        assert {row.turns[0].text for row in found.values()} == {"whole"} and len(found) == 10
        assert result["requests"] == 11 and failures(tmp_path, rows) == {}


def test_a_count_of_prompt_tokens_gives_another_rendering_away(tmp_path: Path) -> None:
    rows = rows_of(1)
    with FakeServer(lambda body: reply() | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}) as server:
        job(tmp_path, [server.url], rows)
    assert "rendered 3 prompt tokens that differ" in failures(tmp_path, rows)["0"]


def test_a_share_of_the_rows_thinks(tmp_path: Path) -> None:
    rows = [prompt(str(index), "first", "second") for index in range(24)]

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return reply("a", reasoning_content="r") if body["chat_template_kwargs"]["enable_thinking"] else reply("a")

    with FakeServer(answer) as server:
        job(tmp_path / "one", [server.url], rows, share=0.5, thinking=False)
        once = stored(tmp_path / "one", rows)
        job(tmp_path / "two", [server.url], rows[::-1], share=0.5, concurrency=1)
    thinking = {name: row.thinking for name, row in once.items()}
    assert thinking == {name: row.thinking for name, row in stored(tmp_path / "two", rows).items()}
    assert 4 < sum(thinking.values()) < 20
    for row in once.values():
        assert len(row.turns) == 2
        for turn in row.turns:  # the prompt in training is the one of the request
            assert ("<think>r</think>" in turn.text) == row.thinking
            closed = "</think>" in _text(turn.prompt_ids)
            assert closed != row.thinking


def _text(ids: tuple[int, ...]) -> str:
    from tiny_data import tiny_tokenizer

    return tiny_tokenizer().decode(ids)


def test_answers_with_and_without_thinking_have_a_place_of_their_own() -> None:
    config = Config()
    config.target.name, config.target.path = "t", "p"
    plain = paths.responses_dir(config)
    config.responses.thinking_share = 0.25
    quarter = paths.responses_dir(config)
    config.responses.thinking_share = 0.5
    assert len({plain, quarter, paths.responses_dir(config)}) == 3
    config.responses.patience_seconds = 5.0  # how they are asked for is no part of it
    config.responses.breaker_failures = 9
    assert len({plain, quarter, paths.responses_dir(config)}) == 3
