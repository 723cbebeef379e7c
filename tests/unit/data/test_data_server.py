"""Answers from OpenAI-compatible servers: what is sent, what is stored, what is tried again, when the job stops."""

import itertools
import threading
from pathlib import Path
from typing import Any, Optional

import pytest
from fake_server import Answer, FakeServer, delayed, last_user, reply
from tiny_data import END, MASK, ROWS, tiny_tokenizer

import deepspec.data.server as server_module
from deepspec.data.dialogue import AnswerLimits
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts
from deepspec.data.prompt_rows import conversation
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer
from deepspec.data.responses import ResponseRow, read_responses
from deepspec.data.server_job import Request, answer_from_servers
from deepspec.data.server_pool import BreakerOptions
from deepspec.errors import InputRefused, UserError
from deepspec.targets.sampling import Sampling


def prompt(name: str, *turns: str, tools: Optional[list] = None) -> PromptRow:
    messages, _ = conversation({"turns": list(turns or (name,))})
    return PromptRow(name, "chat", "train", "own", tuple(messages), tuple(tools) if tools else None)


def job(folder: Path, urls: list[str], rows: list[PromptRow], *, strict: bool = False, thinking: Optional[bool] = None,
        **options: Any) -> dict[str, Any]:
    """One run over what is not answered yet."""
    renderer = Renderer(tiny_tokenizer(strict), thinking)
    prepare_parts(folder)
    todo = mine(rows, answered(folder), 0, 1)
    settings: dict[str, Any] = {
        "model": None, "concurrency": 4, "retries": 2, "seconds_per_token": 0.2, "failure_limit": 100,
        "retry_wait": 0.001, "breaker": BreakerOptions(5, patience=0.3, first_rest=0.02),
    }
    limits = AnswerLimits(options.pop("max_tokens", 16), options.pop("max_length", 400), MASK,
                          options.pop("share", None))
    request = Request(Sampling(0.7, 0.8, 20, seed=3), thinking, (END, 0), ROWS)
    with PartWriter(folder) as writer:
        return answer_from_servers(urls, todo, renderer, writer, request, limits, **(settings | options))


def stored(folder: Path, rows: list[PromptRow], **options: Any) -> dict[str, ResponseRow]:
    join_parts(folder, rows, drop_truncated=options.get("drop_truncated", False))
    return {row.id: row for row in read_responses(folder)}


def failures(folder: Path, rows: list[PromptRow]) -> dict[str, str]:
    import json

    join_parts(folder, rows, drop_truncated=False)
    lines = (folder / "errors.jsonl").read_text(encoding="utf-8").split("\n")
    return {row["id"]: row["reason"] for row in map(json.loads, filter(None, lines))}


def ask(folder: Path, answer: Answer, **options: Any) -> ResponseRow:
    rows = [prompt("only")]
    with FakeServer(answer) as server:
        job(folder, [server.url], rows, **options)
    found = stored(folder, rows)
    assert found, failures(folder, rows)
    return found["only"]


def test_the_request_says_everything_that_decides_the_answer(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [prompt("a", tools=tools), prompt("b")]
    with FakeServer(lambda body: reply()) as server:
        result = job(tmp_path, [server.url], rows, thinking=False)
    first, second = sorted(server.requests, key=lambda body: last_user(body))
    assert result == {"model": "tiny", "requests": 2, "unbalanced": 0, "retokenised": 2,
                      "servers": {server.url: {"requests": 2, "opened": 0}}}
    assert first["tools"] == tools and "tools" not in second
    for body in (first, second):
        assert body["model"] == "tiny"
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.7, 0.8, 20, 16)
    assert first["seed"] != second["seed"]


def test_ids_of_the_server_are_kept_as_they_are(tmp_path: Path) -> None:
    ids = Renderer(tiny_tokenizer()).prompt_ids([{"role": "user", "content": "only"}])
    row = ask(tmp_path, lambda body: reply("x", prompt_token_ids=ids, token_ids=[300, 301, END]))
    assert row.turns[0].prompt_ids == tuple(ids)
    assert row.turns[0].response_ids == (300, 301, END)


def test_text_is_tokenised_where_the_server_has_no_ids(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda body: reply("the dog\u2028\u0085"))
    renderer = Renderer(tiny_tokenizer())
    assert row.turns[0].response_ids == (*renderer.text_ids("the dog\u2028\u0085"), END)
    assert row.turns[0].text == "the dog\u2028\u0085"


def test_another_rendering_of_the_server_is_a_failure(tmp_path: Path) -> None:
    rows = [prompt("only")]
    with FakeServer(lambda body: reply("x", prompt_token_ids=[1, 2], token_ids=[300])) as server:
        job(tmp_path, [server.url], rows)
    assert "differ from" in failures(tmp_path, rows)["only"]


@pytest.mark.parametrize("answer", [
    reply("r</think>a"), reply("a", reasoning_content="r"), reply("a", reasoning="r"), reply("<think>r</think>a"),
])
@pytest.mark.parametrize("strict", [True, False])
def test_reasoning_is_joined_whichever_way_it_comes(tmp_path: Path, answer: dict, strict: bool) -> None:
    row = ask(tmp_path, lambda body: answer, strict=strict)
    tokenizer = tiny_tokenizer(strict)
    turn = row.turns[0]
    assert turn.text == "<think>r</think>a"
    full = tokenizer.decode(turn.prompt_ids + turn.response_ids)
    assert full.endswith("<think>r</think>a<|im_end|>") and full.count("<think>") == 1


def test_reasoning_cut_at_the_limit_is_not_closed(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda body: reply(None, "length", reasoning_content="because"))
    assert row.turns[0].text == "<think>because"


def test_finish_reasons(tmp_path: Path) -> None:
    answers = {"stop": reply(), "length": reply("cut", "length"), "filter": reply("x", "content_filter"),
               "tools": reply(None, "tool_calls"), "null": reply("x", None), "empty": reply(""), "blank": reply(" \n")}
    rows = [prompt(name) for name in answers]
    with FakeServer(lambda body: answers[last_user(body)]) as server:
        job(tmp_path, [server.url], rows)
    found = stored(tmp_path, rows)
    assert set(found) == {"stop", "length"}
    assert found["stop"].turns[0].response_ids[-1] == END
    assert END not in found["length"].turns[0].response_ids
    assert set(failures(tmp_path, rows)) == {"filter", "tools", "null", "empty", "blank"}
    assert set(stored(tmp_path, rows, drop_truncated=True)) == {"stop"}


def test_every_turn_is_answered_with_the_answers_given_before(tmp_path: Path) -> None:
    rows = [prompt("two", "one", "two"), prompt("cut", "long", "never asked")]
    answers = {"one": reply("<think>r</think>first"), "two": reply("second"), "long": reply("cut", "length")}
    with FakeServer(lambda body: answers[last_user(body)]) as server:
        job(tmp_path, [server.url], rows)
    found = stored(tmp_path, rows)
    assert [turn.text for turn in found["two"].turns] == ["<think>r</think>first", "second"]
    assert len(found["cut"].turns) == 1
    history = next(body["messages"] for body in server.requests if last_user(body) == "two")
    assert history[1] == {"role": "assistant", "content": "first", "reasoning_content": "r"}
    assert len(server.requests) == 3


def test_a_prompt_without_room_is_never_sent(tmp_path: Path) -> None:
    rows = [prompt("long", "x" * 500), prompt("mask", "a <|mask|> b"), prompt("fine"), prompt("later", "ok", "y" * 500)]
    with FakeServer(lambda body: reply()) as server:
        job(tmp_path, [server.url], rows)
    assert set(stored(tmp_path, rows)) == {"fine", "later"}
    assert len(stored(tmp_path, rows)["later"].turns) == 1
    assert "data.max_length" in failures(tmp_path, rows)["long"]
    assert "mask token" in failures(tmp_path, rows)["mask"]
    assert join_parts(tmp_path, rows, drop_truncated=False)["skipped"] == 2
    assert len(server.requests) == 2


def test_a_row_the_template_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    twice = PromptRow("twice", "chat", "train", "own", tuple(conversation(
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})[0]))
    rows = [twice, prompt("fine")]
    with FakeServer(lambda body: reply("r</think>x")) as server:
        job(tmp_path, [server.url], rows, strict=True)
    assert set(stored(tmp_path, rows)) == {"fine"}
    assert "roles must alternate" in failures(tmp_path, rows)["twice"]


def test_resume_goes_by_id_after_out_of_order_answers(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(6)]
    broken = {"1", "2", "4"}
    with FakeServer(lambda body: {"status": 400} if last_user(body) in broken
                    else delayed(0.05 * (5 - int(last_user(body))), reply(last_user(body)))) as server:
        job(tmp_path, [server.url], rows)
    assert answered(tmp_path) and {key[0] for key in answered(tmp_path)} == {"0", "3", "5"}
    part = tmp_path / "parts" / "part-00000.jsonl"
    last = part.read_text(encoding="utf-8").split("\n")[-2]
    part.write_bytes(part.read_bytes()[:-10])  # a kill in the middle of the last row
    with FakeServer(lambda body: reply(last_user(body))) as server:
        job(tmp_path, [server.url], rows)
    assert len(server.requests) == 4  # the three that failed and the torn one
    assert list(stored(tmp_path, rows)) == [str(index) for index in range(6)]
    assert failures(tmp_path, rows) == {} and last
    complete = (tmp_path / "responses.jsonl").read_bytes()
    with FakeServer(lambda body: reply("never")) as server:
        job(tmp_path, [server.url], rows)
    stored(tmp_path, rows)
    assert server.requests == [] and (tmp_path / "responses.jsonl").read_bytes() == complete


def test_an_edited_prompt_with_the_same_id_is_answered_again(tmp_path: Path) -> None:
    with FakeServer(lambda body: reply(last_user(body))) as server:
        job(tmp_path, [server.url], [prompt("a", "old wording")])
        rows = [prompt("a", "new wording")]
        job(tmp_path, [server.url], rows)
    assert stored(tmp_path, rows)["a"].turns[0].text == "new wording"


def test_one_slow_request_holds_nothing_up(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(40)]
    release = threading.Event()
    part = tmp_path / "parts" / "part-00000.jsonl"

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if last_user(body) == "0":
            release.wait(20)
        elif last_user(body) == "39":
            # Everything before is on disk although the first request is still open.
            for _ in range(400):
                if part.read_bytes().count(b"\n") >= 38:
                    release.set()
                    break
                release.wait(0.01)
        return reply(last_user(body))

    with FakeServer(answer) as server:
        job(tmp_path, [server.url], rows, concurrency=5)
    assert release.is_set()
    assert server.most_in_flight <= 5
    assert len(stored(tmp_path, rows)) == 40


def test_timeouts_scale_and_retries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_BASE_TIMEOUT", 0.05)
    rows = [prompt("slow"), prompt("quick")]
    with FakeServer(lambda body: delayed(0.4, reply()) if last_user(body) == "slow" else reply()) as server:
        result = job(tmp_path, [server.url], rows, retries=2, seconds_per_token=0.002)
    assert set(stored(tmp_path, rows)) == {"quick"}
    assert "no reply" in failures(tmp_path, rows)["slow"] and "after 3 attempts" in failures(tmp_path, rows)["slow"]
    assert result["requests"] <= len(rows) * 3
    assert server_module.ChatClient([], model=None, retries=0, seconds_per_token=0.2, connections=1).timeout(4096) > 800


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    calls = itertools.count()
    row = ask(tmp_path, lambda body: {"status": 503} if next(calls) < 2 else reply("late"))
    assert row.turns[0].text == "late"


def test_one_poisonous_row_is_passed_over(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(12)]
    with FakeServer(lambda body: {"status": 500, "text": "boom"} if last_user(body) == "7" else reply()) as server:
        job(tmp_path, [server.url], rows)
    assert set(failures(tmp_path, rows)) == {"7"}
    assert "HTTP 500" in failures(tmp_path, rows)["7"]
    assert len(stored(tmp_path, rows)) == 11


def test_a_dead_server_stops_the_job_and_marks_nothing(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(60)]
    server = FakeServer(lambda body: reply())
    count = itertools.count()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if next(count) == 20:
            threading.Thread(target=server.stop, daemon=True).start()
        return delayed(0.02, reply())

    server._answer = answer
    server._thread.start()
    with pytest.raises(UserError, match="stopped answering"):
        job(tmp_path, [server.url], rows)
    done = {key[0] for key in answered(tmp_path)}
    assert 15 <= len(done) < 60
    assert failures(tmp_path, rows) == {}
    with FakeServer(lambda body: reply()) as again:
        job(tmp_path, [again.url], rows)
    assert len(again.requests) == 60 - len(done)
    assert len(stored(tmp_path, rows)) == 60


def test_two_servers_share_the_work_and_cover_for_each_other(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(30)]
    with FakeServer(lambda body: delayed(0.01, reply())) as one, FakeServer(lambda body: delayed(0.01, reply())) as two:
        job(tmp_path, [one.url, two.url, "http://127.0.0.1:9/v1"], rows)
        assert min(len(one.requests), len(two.requests)) >= 5
    assert len(stored(tmp_path, rows)) == 30


def test_no_server_at_the_start_is_refused_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="127.0.0.1:9/v1.*responses.servers"):
        job(tmp_path, ["http://127.0.0.1:9/v1"], [prompt("a")])
    with FakeServer(lambda body: reply(), models=("other",)) as server:
        with pytest.raises(InputRefused, match="has other, not mine"):
            job(tmp_path, [server.url], [prompt("a")], model="mine")
        assert server.requests == []


def test_too_many_failures_stop_the_job_early(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(50)]
    with FakeServer(lambda body: {"status": 400, "text": "no"}) as server:
        with pytest.raises(UserError, match="responses.error_limit"):
            job(tmp_path, [server.url], rows, failure_limit=5)
    assert len(server.requests) < 20


def test_several_rows_at_once_learn_that_a_server_does_not_know_token_ids(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(8)]
    refusal = {"status": 422, "text": "Unexpected fields in the request: {'return_token_ids'}"}
    with FakeServer(lambda body: delayed(0.05, refusal) if "return_token_ids" in body else reply()) as server:
        job(tmp_path, [server.url], rows, retries=0, concurrency=4)
    assert len(stored(tmp_path, rows)) == 8 and failures(tmp_path, rows) == {}
    assert sum("return_token_ids" in body for body in server.requests) == 4


def test_a_server_that_does_not_know_token_ids_is_asked_without(tmp_path: Path) -> None:
    rows = [prompt("a"), prompt("b")]
    with FakeServer(lambda body: {"status": 400, "text": "unknown field return_token_ids"} if "return_token_ids" in body
                    else reply()) as server:
        job(tmp_path, [server.url], rows, retries=0, concurrency=1)
    assert len(stored(tmp_path, rows)) == 2
    assert [("return_token_ids" in body) for body in server.requests] == [True, False, False]


def test_ids_outside_the_vocabulary_are_a_failure(tmp_path: Path) -> None:
    rows = [prompt("a"), prompt("b")]
    ids = {name: Renderer(tiny_tokenizer()).prompt_ids([{"role": "user", "content": name}]) for name in "ab"}
    with FakeServer(lambda body: reply("x", prompt_token_ids=ids[last_user(body)],
                                       token_ids=[ROWS if last_user(body) == "a" else MASK, 5])) as server:
        job(tmp_path, [server.url], rows)
    assert str(ROWS) in failures(tmp_path, rows)["a"]
    assert "mask token" in failures(tmp_path, rows)["b"]


def test_bytes_that_are_no_text_need_token_ids(tmp_path: Path) -> None:
    answers = {"cut": reply("caf\ufffd\ufffd", "length"), "lost": reply("a\ufffdb"),
               "known": reply("a\ufffdb", token_ids=[300, 301, END])}
    rows = [prompt(name) for name in answers]
    with FakeServer(lambda body: answers[last_user(body)]) as server:
        result = job(tmp_path, [server.url], rows)
    found = stored(tmp_path, rows)
    assert {name: row.turns[0].text for name, row in found.items()} == {"cut": "caf", "known": "a\ufffdb"}
    assert found["known"].turns[0].response_ids == (300, 301, END)
    assert "U+FFFD" in failures(tmp_path, rows)["lost"] and result["retokenised"] == 1
