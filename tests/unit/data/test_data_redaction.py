"""Redaction runs on every text before anything is hashed, compared or written."""

import json
from pathlib import Path

import pytest
from gathered import gather, gather_all, source, write
from hypothesis import given, settings, strategies as st

from deepspec.data.prompt_rows import SLOT
from deepspec.data.redaction import builtin, load_redaction, redacted
from deepspec.errors import ConfigError, InputRefused

MODULE = '''
def shout(text):
    return text.upper()

def broken(text):
    if "bad" in text:
        raise RuntimeError("quotes " + text)
    return text

def number(text):
    return 7

def erase(text):
    return ""

def half(text):
    return "\\ud83d"

constant = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"redact_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("text,expected", [
    ("write to ada.l+x@mail.example.org, please", "write to [EMAIL], please"),
    ("call +44 20 7946 0958 now", "call [PHONE] now"),
    ("call (415) 555-2671 or 415-555-2671 or 415.555.2671", "call [PHONE] or [PHONE] or [PHONE]"),
    ("key sk-abcdefghijklmnopqrstuvwx!", "key [KEY]!"),
    ("AKIAABCDEFGHIJKLMNOP", "[KEY]"),
    ("Authorization: Bearer abcdefghijklmnop.qrst", "Authorization: Bearer [KEY]"),
    ('{"api_key": "hunter2hunter2"}', '{"api_key": "[KEY]"}'),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl", "[KEY]"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- end", "[KEY] end"),
])
def test_builtin_patterns(text: str, expected: str) -> None:
    assert builtin(text) == expected


@pytest.mark.parametrize("text", [
    "What is 123 - 456 - 7890?", "100 200 3000", "x = a@b", "3.14159265358979", "2024-01-15 12:30:00",
    "1+2345678901234", "f(415) 555", "token: int", "a decorator @property.setter is fine",
])
def test_mathematics_and_code_stay(text: str) -> None:
    assert builtin(text) == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_builtin_is_stable(text: str) -> None:
    assert builtin(builtin(text)) == builtin(text)


def test_every_text_of_a_row_is_redacted(tmp_path: Path, module: str) -> None:
    tools = [{"type": "function", "function": {"name": "send", "description": "mail a@b.example"}}]
    call = {"id": "c", "type": "function", "function": {"name": "send", "arguments": '{"to": "a@b.example"}'}}
    messages = [
        {"role": "system", "content": "for a@b.example"}, {"role": "user", "content": "u a@b.example", "name": "n"},
        {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sent to a@b.example"},
    ]
    path = write(tmp_path / "p.jsonl", {"id": "a@b.example", "messages": messages, "tools": tools},
                 {"id": "plain", "prompt": "hi", "domain": "x@y.example"})
    gather_all([source(path)], tmp_path / "out", redaction="builtin")
    for file in (tmp_path / "out").iterdir():
        assert b"b.example" not in file.read_bytes() and b"y.example" not in file.read_bytes()
    rows, _ = gather(source(path), redaction=f"{module}:shout")
    row = next(row for row in rows if row.tools)
    assert row.messages[1] == {"role": "user", "content": "U A@B.EXAMPLE", "name": "N"}
    assert row.messages[2]["tool_calls"][0]["type"] == "function"
    assert row.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"TO": "A@B.EXAMPLE"}'
    assert row.tools and row.tools[0]["function"]["description"] == "MAIL A@B.EXAMPLE"
    assert row.messages[-1] == SLOT


def test_redaction_comes_before_hashing(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "mail a@b.example"}, {"prompt": "mail c@d.example"},
                 {"id": "e@f.example", "prompt": "one"}, {"id": "g@h.example", "prompt": "two"})
    rows, counts = gather(source(path), redaction="builtin")
    assert counts["own"].refused == {"duplicate": 1}
    assert sorted(row.messages[0]["content"] for row in rows) == ["mail [EMAIL]", "one", "two"]
    assert all(len(row.id) == 20 for row in rows)  # two ids became the same: their contents identify the rows


@pytest.mark.parametrize("name,problem", [
    ("broken", "p.jsonl:2: data.redaction raised RuntimeError"), ("number", "p.jsonl:1: data.redaction returned int"),
    ("half", "p.jsonl:1: data.redaction returned a lone surrogate"),
])
def test_a_failing_redaction_names_the_row_and_writes_nothing(tmp_path: Path, module: str, name: str,
                                                              problem: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, {"prompt": "bad secret"})
    with pytest.raises(InputRefused, match=problem) as refusal:
        gather_all([source(path)], tmp_path / "out", redaction=f"{module}:{name}")
    assert "secret" not in str(refusal.value)
    assert not list((tmp_path / "out").iterdir())


def test_nothing_left_is_a_reason(tmp_path: Path, module: str) -> None:
    with pytest.raises(InputRefused, match="nothing left after redaction 1"):
        gather(source(write(tmp_path / "p.jsonl", {"prompt": "x"})), redaction=f"{module}:erase")


def test_refusals_do_not_quote_unredacted_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [{"role": "secret@mail.example", "content": "x"}]}, {"prompt": "kept"}]
    gather(source(write(tmp_path / "p.jsonl", *rows)), redaction="builtin")
    assert any("p.jsonl:1: skipped, unknown role" in message for message in caplog.messages)
    assert "secret" not in caplog.text


@pytest.mark.parametrize("spec,problem", [
    ("no_such_module_here:f", "ModuleNotFoundError"), ("json:nothing", "AttributeError"), ("json:__name__", "str"),
])
def test_a_redaction_that_is_none_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_redaction(spec)
    assert load_redaction(None) is None


def test_numbers_and_slots_are_left_alone() -> None:
    value = {"role": "assistant", "n": 1.5, "flag": True, "none": None, "deep": [{"type": "text", "text": "a"}]}
    expected = {"role": "assistant", "n": 1.5, "flag": True, "none": None, "deep": [{"type": "text", "text": "A"}]}
    assert redacted(value, str.upper, "x:1") == expected
    assert json.loads(json.dumps(redacted(SLOT, str.upper, "x:1"))) == SLOT
