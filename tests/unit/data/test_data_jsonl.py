"""Strict reading and durable writing of JSON Lines."""

import json
from pathlib import Path

import pytest

from deepspec.data.jsonl import DurableWriter, ReadCounts, dump_row, read_nonempty, read_rows, repair_tail
from deepspec.errors import InputRefused


def rows(path: Path) -> list:
    return [row for _, row in read_rows(path)]


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"a"}]}\n\n   \n{"a":1}')
    counts = ReadCounts()
    assert [number for number, _ in read_rows(path, counts=counts)] == [1, 4]
    assert (counts.rows, counts.blank) == (2, 2)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_says_what_was_expected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputRefused, match="p.jsonl: 0 prompts, expected one JSON object per line"):
        list(read_nonempty(path, "prompts"))


def test_separators_of_unicode_do_not_split_a_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = "a\u2028b\u2029c\u0085d\x0be"
    path.write_bytes(json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n")
    assert rows(path) == [{"prompt": text}]
    assert len(path.read_text(encoding="utf-8").splitlines()) > 1  # what a reader must not do
    with DurableWriter(tmp_path / "out.jsonl") as writer:
        writer.write({"prompt": text})
    assert rows(tmp_path / "out.jsonl") == [{"prompt": text}]


def test_types_may_change_between_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"content":"a","system":null}\n{"content":[{"type":"text","text":"b"}],"system":"late"}\n')
    assert [row["system"] for row in rows(path)] == [None, "late"]


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a":1}\n')
    assert rows(path) == [{"a": 1}]


@pytest.mark.parametrize("line,problem", [
    ('{"a":NaN}', "NaN is not JSON"),
    ('{"a":-Infinity}', "-Infinity is not JSON"),
    ('{"a":1e999}', "too large"),
    ('{"a":1,"a":2}', "'a' occurs twice"),
    ('{"a":{"b":1,"b":1}}', "'b' occurs twice"),
    ('{"prompt":"\\ud83d hi"}', "lone surrogate"),
    ('{"\\udc00":1}', "lone surrogate"),
    ('{"a":', "not a valid JSON row"),
    ("17", "found int"),
    ('["a"]', "JSON array"),
    ("[" * 100000, "not a valid JSON row"),
])
def test_what_could_not_be_written_back_is_refused_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"fine":"\\ud83d\\ude00"}\n' + line + "\n")
    with pytest.raises(InputRefused, match="p.jsonl:2") as refusal:
        rows(path)
    assert problem in str(refusal.value)


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":"\xff"}\n')
    with pytest.raises(InputRefused, match="p.jsonl:2: not UTF-8"):
        rows(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="nowhere.jsonl"):
        rows(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("cut", [1, 5, 10])
def test_a_torn_tail_is_cut_before_an_append(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "out.jsonl"
    with DurableWriter(path) as writer:
        for index in range(3):
            writer.write({"id": index, "text": "x" * 100})
    path.write_bytes(path.read_bytes()[:-cut])
    with DurableWriter(path) as writer:
        writer.write({"id": 3})
    assert [row["id"] for row in rows(path)] == [0, 1, 3]
    assert sum("incomplete last row" in message for message in caplog.messages) == 1


def test_a_block_of_zeros_at_the_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(dump_row({"id": 0}) + b"\0" * 70000 + b"\n")
    assert repair_tail(path) == 70001
    assert rows(path) == [{"id": 0}]
    path.write_bytes(b'{"id":')
    repair_tail(path)
    assert path.read_bytes() == b""


def test_a_live_file_of_another_process_is_read_to_its_last_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(dump_row({"id": 0}) + b'{"id":1')
    assert [row for _, row in read_rows(path, torn_tail=True)] == [{"id": 0}]


def test_rows_are_in_the_file_before_close(tmp_path: Path) -> None:
    writer = DurableWriter(tmp_path / "out.jsonl")
    writer.write({"id": 0})
    assert rows(tmp_path / "out.jsonl") == [{"id": 0}]
    with pytest.raises(ValueError):
        writer.write({"id": float("nan")})
    writer.close()
    writer.close()
    assert rows(tmp_path / "out.jsonl") == [{"id": 0}]
