"""Rows of all forms, ids, duplicates, mixture and split."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gathered import gather, source, write
from tiny_data import chat

from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.collect import collect
from deepspec.data.mixture import apportion
from deepspec.data.prompt_rows import SLOT, RowRefused, content_id, conversation
from deepspec.errors import ConfigError, InputRefused

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
TOOL = {"role": "tool", "content": "7", "tool_call_id": "x"}


@pytest.mark.parametrize("row", [
    {"prompt": "a"},
    {"turns": ["a"]},
    {"messages": [USER]},
    {"messages": [USER, ANSWER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "prompt": None},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"conversations": [{"role": "user", "content": "a"}]},
    {"prompt": [USER], "system": None},
    {"prompt": "a", "system": "  "},
])
def test_all_forms_of_a_prompt_are_one_conversation(row: dict[str, Any]) -> None:
    assert conversation(row) == ([USER, SLOT], None)


def test_turns_are_answered_one_by_one() -> None:
    assert conversation({"turns": ["a", "c"]})[0] == [USER, SLOT, {"role": "user", "content": "c"}, SLOT]
    assert conversation({"messages": [USER, USER, ANSWER]})[0] == [USER, USER, SLOT]
    assert conversation({"messages": [USER, ANSWER, USER]})[0] == [USER, SLOT, USER, SLOT]
    assert conversation({"messages": [USER, ANSWER, ANSWER, USER]})[0] == [USER, SLOT, USER, SLOT]


def test_a_system_text_beside_the_turns_comes_first() -> None:
    assert conversation({"prompt": "a", "system": "s"})[0][0] == {"role": "system", "content": "s"}
    system = {"role": "system", "content": "mine"}
    assert conversation({"messages": [system, USER], "system": "s"})[0] == [system, USER, SLOT]


def test_a_greeting_stays_as_context() -> None:
    assert conversation({"messages": [ANSWER, USER, ANSWER]})[0] == [ANSWER, USER, SLOT]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_turns_are_kept_whole(content: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages, found = conversation({"messages": [USER, CALL | content, TOOL, ANSWER, USER], "tools": tools})
    assert messages == [USER, CALL | {"content": ""}, TOOL, SLOT, USER, SLOT]
    assert found == tools
    assert conversation({"messages": [USER], "tools": json.dumps(tools)})[1] == tools
    assert conversation({"messages": [USER, CALL]})[0] == [USER, SLOT]  # a last call is the target's to make


@pytest.mark.parametrize("row,reason", [
    ({"messages": []}, "empty messages"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no user"),
    ({"messages": [ANSWER]}, "no user"),
    ({"text": "a"}, "no prompt"),
    ({"prompt": "  "}, "empty user turn"),
    ({"messages": [USER, {"role": "critic", "content": "x"}]}, "unknown role"),
    ({"messages": "a"}, "wrong type"),
    ({"messages": [["user", "a"]]}, "wrong type"),
    ({"messages": [{"role": "user", "content": 7}]}, "content is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not text"),
    ({"prompt": "a", "tools": "{"}, "bad tools"),
    ({"prompt": "a", "tools": ["f"]}, "bad tools"),
])
def test_a_row_that_is_no_prompt_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refusal:
        conversation(row)
    assert refusal.value.reason == reason


def test_bad_rows_are_counted_and_the_others_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": []}, chat("good"), {"messages": [ANSWER]}, chat("good", "again"))
    with caplog.at_level(logging.INFO):
        rows, counts = gather(source(path))
    assert [row.messages[0]["content"] for row in rows] == ["good"]
    assert str(counts["own"]) == "read 4, valid 1, kept 1, duplicate 1, empty messages 1, no user 1"
    assert any("p.jsonl:3: skipped, no user" in message for message in caplog.messages)


def test_nothing_kept_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": []}, {"messages": [ANSWER]})
    with pytest.raises(InputRefused, match="read 2, valid 0, kept 0, empty messages 1, no user 1"):
        gather(source(path))


@pytest.mark.parametrize("content,problem", [("", "0 prompts"), ('[{"messages":[]}]', "JSON array")])
def test_an_unusable_file_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputRefused, match="p.jsonl") as refusal:
        gather(source(path))
    assert problem in str(refusal.value)


def test_ids_are_given_or_of_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", chat("one", id="x"), chat("two", id=7), chat("three"), chat("four", id="x"))
    rows, counts = gather(source(path))
    assert {row.id for row in rows} == {"x", "7", content_id([{"role": "user", "content": "three"}, SLOT], None)}
    assert counts["own"].refused == {"duplicate id": 1}
    other = write(tmp_path / "q.jsonl", chat("five", id="x"))
    rows, _ = gather(source(path), source(other, name="other", domain="code"))
    assert {row.id for row in rows if row.source == "other"} == {"other/x"}
    assert {row.domain for row in rows if row.source == "other"} == {"code"}


def test_a_domain_of_the_row_wins(tmp_path: Path) -> None:
    rows, _ = gather(source(write(tmp_path / "p.jsonl", chat("a", domain="math"), chat("b"))))
    assert {row.messages[0]["content"]: row.domain for row in rows} == {"a": "math", "b": "chat"}


def test_the_result_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    contents = [chat(f"prompt {index}", system=None) for index in range(60)] + [chat("last", system="late")]
    one = gather(source(write(tmp_path / "a.jsonl", *contents)), max_prompts=20)[0]
    two = gather(source(write(tmp_path / "b.jsonl", *reversed(contents))), max_prompts=20)[0]
    assert one == two


def test_a_larger_number_keeps_every_prompt_and_its_split(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *(chat(f"prompt {index}") for index in range(300)))
    few = gather(source(path), max_prompts=100, min_held_out=0)[0]
    many = gather(source(path), max_prompts=250, min_held_out=0)[0]
    splits = {row.id: row.split for row in many}
    assert {row.id: row.split for row in few}.items() <= splits.items()


def test_held_out_is_a_share_with_a_minimum_per_domain(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *(chat(f"p {index}") for index in range(1000)),
                 *(chat(f"m {index}", domain="math") for index in range(20)), chat("alone", domain="code"))
    rows, _ = gather(source(path), held_out_fraction=0.05, min_held_out=8)
    held_out = {domain: sum(row.split == "held_out" for row in rows if row.domain == domain)
                for domain in ("chat", "math", "code")}
    assert 30 <= held_out["chat"] <= 70
    assert held_out["math"] == 8
    assert held_out["code"] == 0  # a single prompt is trained on


def test_mixture_follows_weights_and_caps(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", *(chat(f"{name} {index}") for index in range(100))) for name in "abc"]
    sources = [source(path, name=path.stem, weight=weight, cap=cap)
               for path, weight, cap in zip(paths, (1, 2, 1), (None, None, 10))]
    _, counts = gather(*sources, max_prompts=80)
    assert [counts[name].kept for name in "abc"] == [23, 47, 10]
    _, counts = gather(*sources)
    assert [counts[name].kept for name in "abc"] == [100, 100, 10]


def test_no_share_falls_when_the_total_grows() -> None:
    available, weights = (9, 40, 100, 7), (3.0, 1.0, 0.7, 0.0)
    previous = [0] * 4
    for total in range(1, 160):
        current = apportion(available, weights, total)
        assert all(now >= before for now, before in zip(current, previous))
        assert sum(current) == min(total, sum(available) if total >= sum(available) else 149)
        previous = current


@pytest.mark.parametrize("options,problem", [
    ({"sources": []}, "sources is empty"),
    ({"sources": [SourceConfig("x", "jsonl", "p"), SourceConfig("x", "jsonl", "q")]}, "one name"),
    ({"sources": [SourceConfig("x", "csv", "p")]}, "kind='csv'"),
    ({"sources": [SourceConfig("x", "embedded", "poetry")]}, "path='poetry'"),
    ({"sources": [SourceConfig("x", "jsonl", "p", weight=-1)]}, "weight=-1"),
    ({"sources": [SourceConfig("x", "jsonl", "p")], "held_out_fraction": 1.0}, "held_out_fraction=1.0"),
    ({"sources": [SourceConfig("x", "jsonl", "p")], "max_prompts": 0}, "max_prompts=0"),
])
def test_wrong_options_are_named(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        collect(DataConfig(**options), 0, tmp_path)
    assert problem in str(refusal.value)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="does not exist"):
        gather(source(tmp_path / "nowhere"))
    with pytest.raises(InputRefused, match=r"no \*.jsonl"):
        gather(source(tmp_path))


def test_a_folder_of_files_is_one_source(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", chat("a"))
    write(tmp_path / "b.jsonl", chat("b"))
    assert len(gather(source(tmp_path))[0]) == 2


def test_parquet_is_read_row_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    table = pyarrow.table({"messages": [[USER, ANSWER], [USER | {"content": "c"}]], "id": ["x", None]})
    parquet.write_table(table, path)
    rows, _ = gather(source(path, kind="parquet"))
    assert sorted(row.messages[0]["content"] for row in rows) == ["a", "c"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputRefused, match="bad.parquet: not readable as Parquet"):
        gather(source(tmp_path / "bad.parquet", kind="parquet"))


def test_an_unreachable_dataset_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach it\nlong explanation")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputRefused, match="kind=jsonl") as refusal:
        gather(source("owner/name", kind="hf"))
    assert "ConnectionError: Couldn't reach it)" in str(refusal.value)


def test_a_dataset_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split, revision: [chat(f"{path} {split}")])
    rows, _ = gather(source("owner/name", kind="hf"))
    assert rows[0].messages[0]["content"] == "owner/name train"


def test_reading_prompts_does_not_load_optional_packages() -> None:
    code = ("import sys, deepspec.data.collect, deepspec.data.embedded\n"
            "names = {'datasets', 'datasketch', 'pyarrow', 'reasoning_gym', 'torch', 'transformers'}\n"
            "assert not names & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
