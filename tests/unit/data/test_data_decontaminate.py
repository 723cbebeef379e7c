"""Prompts that hold text of a benchmark are left out and reported."""

import json
from pathlib import Path

import pytest
from gathered import gather_all, source, write
from hypothesis import given, settings, strategies as st

from deepspec.data.decontaminate import BenchmarkFile, BenchmarkIndex
from deepspec.errors import InputRefused

LONG = ("Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?")
MIDDLE = "Write a function that returns the perimeter of a square."  # 10 words
SHORT = "Write a limerick."


def user(text: str, *rest: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": item} for item in (text, *rest)]


def index(tmp_path: Path, *rows: dict, ngram: int = 13) -> BenchmarkIndex:
    return BenchmarkIndex([BenchmarkFile("bench", str(write(tmp_path / "bench.jsonl", *rows)))], ngram)


@pytest.mark.parametrize("text", [
    LONG, LONG.upper(), LONG.replace(" ", "\n"), f"Solve this: {LONG[:90]} ... and so on",
    "natalia SOLD clips -- to **48** of her friends in April and then she",
])
def test_thirteen_words_in_a_row_are_enough(tmp_path: Path, text: str) -> None:
    match = index(tmp_path, {"turns": [LONG]}).match(user(text))
    assert match and match.benchmark == "bench" and len(match.ngram.split()) == 13
    assert len(match.hash) == 16


@pytest.mark.parametrize("text", [
    "natalia sold clips to 48 of her friends in april and then", "Something else altogether, in April and May, that "
    "shares single words with it but no long run of them in the same order at all.",
])
def test_twelve_words_are_not(tmp_path: Path, text: str) -> None:
    assert index(tmp_path, {"turns": [LONG]}).match(user(text)) is None


def test_a_text_of_middle_length_must_be_there_whole(tmp_path: Path) -> None:
    found = index(tmp_path, {"prompt": MIDDLE})
    match = found.match(user(f"You are a programmer. {MIDDLE} Use Python."))
    assert match and match.ngram == "write a function that returns the perimeter of a square"
    assert found.match(user(MIDDLE.replace("square", "circle"))) is None
    assert found.match(user("Write a function that returns the perimeter")) is None


def test_a_short_text_must_be_the_whole_first_turn(tmp_path: Path) -> None:
    found = index(tmp_path, {"turns": [SHORT, "Make it shorter."]})
    assert found.match(user("write a LIMERICK!")).ngram == "write a limerick"
    assert found.match(user(f"Hello. {SHORT}")) is None
    assert found.match(user("Hello", SHORT)) is None
    assert found.match(user("Make it shorter.")) is None  # a follow-up of the benchmark says nothing by itself
    assert found.facts["bench"]["turns_too_short"] == 1


def test_every_turn_and_role_is_looked_at(tmp_path: Path) -> None:
    found = index(tmp_path, {"turns": ["x", LONG]})
    assert found.match([{"role": "system", "content": LONG}, *user("hi")])
    assert found.match([*user("hi"), {"role": "assistant"}, *user(LONG)])
    assert found.match([*user("hi"), {"role": "assistant"}]) is None


def test_the_instruction_text_of_a_benchmark_does_not_count(tmp_path: Path) -> None:
    frame = "Read the problem below and enclose your final answer in a fenced block of python code please. "
    rows = [{"prompt": f"{frame}Problem {number}: add {number} apples to {number + 1} pears, subtract {number * 7} "
                       f"plums and report what is left on table {number}"} for number in range(12)]
    found = index(tmp_path, *rows)
    assert found.facts["bench"]["instruction_ngrams"] > 0
    assert found.match(user(frame + "Something of my own that nobody else has asked anywhere before")) is None
    assert found.match(user(rows[4]["prompt"]))
    # Nine rows are too few to call it that.
    assert index(tmp_path, *rows[:9]).match(user(frame + "Something of my own"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=13, max_size=40), st.data())
def test_any_planted_run_is_found(tmp_path_factory: pytest.TempPathFactory, words: list[str],
                                  data: st.DataObject) -> None:
    found = index(tmp_path_factory.mktemp("b"), {"prompt": " ".join(words)})
    start = data.draw(st.integers(0, len(words) - 13))
    around = data.draw(st.lists(st.sampled_from("uvwxyz"), max_size=20))
    place = data.draw(st.integers(0, len(around)))
    planted = around[:place] + words[start:start + 13] + around[place:]
    match = found.match(user(" ".join(planted)))
    assert match and match.ngram == " ".join(words[start:start + 13])
    assert found.match(user(" ".join(["z", *around, "z"]))) is None


def test_what_is_removed_is_reported(tmp_path: Path) -> None:
    bench = BenchmarkFile("gsm", str(write(tmp_path / "gsm.jsonl", {"turns": [LONG]}, {"turns": [SHORT]})))
    other = BenchmarkFile("code", str(write(tmp_path / "code.jsonl", {"prompt": MIDDLE})))
    path = write(tmp_path / "p.jsonl", {"id": "a", "prompt": f"Please: {LONG} My own address is 7 Elm Street."},
                 {"id": "b", "prompt": MIDDLE}, {"id": "c", "prompt": "Fine"}, {"prompt": SHORT})
    rows, totals = gather_all([source(path)], tmp_path / "out", [bench, other])
    assert [row.id for row in rows] == ["c"]
    assert totals.sources["own"].refused == {"benchmark text": 3}
    report = json.loads((tmp_path / "out" / "decontamination.json").read_text())
    assert [(item["id"], item["benchmark"]) for item in report["removed"][:2]] == [("a", "gsm"), ("b", "code")]
    assert report["removed"][0]["ngram"] == "natalia sold clips to 48 of her friends in april and then she"
    assert report["benchmarks"]["gsm"]["removed"] == 2 and report["benchmarks"]["code"]["removed"] == 1
    assert "elm" not in json.dumps(report).lower()  # the user's own words stay out of the report
    assert json.loads((tmp_path / "out" / "totals.json").read_text())["benchmarks"] == {"gsm": 2, "code": 1}


@pytest.mark.parametrize("content,problem", [("", "0 benchmark rows"), ('{"question": "x"}\n', "bench.jsonl:1")])
def test_a_bad_benchmark_file_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(content)
    with pytest.raises(InputRefused, match=problem):
        BenchmarkIndex([BenchmarkFile("bench", str(path))])


def test_another_length_of_the_run(tmp_path: Path) -> None:
    assert index(tmp_path, {"prompt": LONG}, ngram=5).match(user("she sold clips to 48 of her dogs"))
    assert index(tmp_path, {"prompt": LONG}, ngram=20).match(user(LONG[:80])) is None
