"""Logs of OpenAI chat-completions requests as prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from gathered import gather, source, write

from deepspec.data.prompt_rows import SLOT, RowRefused, conversation
from deepspec.data.request_logs import unwrap_request

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
LOGGED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "What the old model said"},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
    {"role": "assistant", "content": "Seven."},
    {"role": "user", "content": "And tomorrow?"},
]
REQUEST = {"model": "m", "temperature": 0.3, "messages": LOGGED, "tools": TOOLS}


@pytest.mark.parametrize("row", [
    REQUEST,
    {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": REQUEST},
    {"request": REQUEST, "response": {"choices": [{"message": {"content": "secret answer"}}]}},
    {"request": {"method": "POST", "body": REQUEST}},
    {"request": {"url": "/v1", "body": json.dumps(REQUEST)}, "status": 200},
    {"request": json.dumps(REQUEST)},
], ids=["plain", "batch", "proxy", "nested", "body as text", "request as text"])
def test_all_envelopes_hold_the_same_conversation(row: dict[str, Any]) -> None:
    messages, tools = conversation(unwrap_request(row))
    assert messages == [
        LOGGED[0], LOGGED[1], SLOT, LOGGED[3], {"role": "assistant", "content": "", "tool_calls": [CALL]}, LOGGED[5],
        SLOT, LOGGED[7], SLOT,
    ]
    assert tools == TOOLS


def test_functions_of_old_logs_become_tools() -> None:
    function = {"name": "f", "parameters": {}}
    row = {"functions": [function], "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "7"},
    ]}
    messages, tools = conversation(unwrap_request(row))
    assert tools == [{"type": "function", "function": function}]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert messages[2:] == [{"role": "tool", "content": "7", "name": "f"}, SLOT]


@pytest.mark.parametrize("row", [
    {"body": {"model": "m", "input": "embed this"}}, {"prompt": "completions"}, {"body": "{broken"}, {"request": 7},
    {"body": {"body": {"body": {"body": {"messages": []}}}}},
])
def test_other_requests_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused) as refusal:
        unwrap_request(row)
    assert refusal.value.reason == "no chat request"


def test_a_log_is_collected_and_its_ids_are_not(tmp_path: Path) -> None:
    rows = [{"custom_id": "same", "id": "user-17", "body": {"messages": [{"role": "user", "content": f"q {index}"}]}}
            for index in range(3)]
    write(tmp_path / "logs" / "a.jsonl", *rows, {"body": {"input": "x"}}, rows[0])
    write(tmp_path / "logs" / "b.jsonl", {"messages": [{"role": "user", "content": "q 9"}], "domain": "support"})
    found, counts = gather(source(tmp_path / "logs", kind="requests"))
    assert sorted(row.messages[0]["content"] for row in found) == ["q 0", "q 1", "q 2", "q 9"]
    assert {row.domain for row in found} == {"chat", "support"}
    assert all(len(row.id) == 20 and "same" not in row.id for row in found)
    assert str(counts["own"]) == "read 6, valid 4, kept 4, duplicate 1, no chat request 1"
