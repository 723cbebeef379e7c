"""Collecting as a whole: totals that add up, texts that come out as they went in, a split that data cannot move."""

import json
from pathlib import Path
from typing import Any

import pytest
from gathered import gather, gather_all, source, write
from hypothesis import given, settings, strategies as st
from tiny_data import chat, tiny_config

from deepspec import artifacts
from deepspec.config import paths
from deepspec.config.schema import BenchmarkConfig, Config
from deepspec.data.collect import OUTPUTS
from deepspec.data.mixture import apportion
from deepspec.data.prompts import read_prompts
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.preflight import preflight
from deepspec.planning.validate_data import check_cleaning
from deepspec.stages import prompts

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
VISIBLE = TEXT.filter(lambda text: bool(text.strip()))
ID = st.one_of(TEXT.filter(bool), st.integers(-10**20, 10**20), st.sampled_from(["007", "1e5", "true", "null", "\x00"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ID, VISIBLE), min_size=1, max_size=8,
                unique_by=(lambda pair: str(pair[0]), lambda pair: pair[1])), st.booleans())
def test_ids_and_texts_come_out_as_they_went_in(tmp_path_factory: Any, pairs: list, escaped: bool) -> None:
    folder = tmp_path_factory.mktemp("round")
    lines = [json.dumps({"id": name, "prompt": text, "domain": text[:3]}, ensure_ascii=escaped) + "\n"
             for name, text in pairs]
    (folder / "p.jsonl").write_bytes("".join(lines).encode())
    rows, _ = gather(source(folder / "p.jsonl"))
    assert {(row.id, row.messages[0]["content"], row.domain) for row in rows} == {
        (str(name), text, text[:3]) for name, text in pairs}


JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**20, 10**20) | st.floats(allow_nan=False,
                    allow_infinity=False) | TEXT, lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)


@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(TEXT, JSON, max_size=3), parameters=st.dictionaries(TEXT, JSON, max_size=3))
def test_tools_and_their_arguments_come_out_as_they_went_in(tmp_path_factory: Any, arguments: dict,
                                                            parameters: dict) -> None:
    folder = tmp_path_factory.mktemp("tools")
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls},
                {"role": "tool", "content": "7", "tool_call_id": "x"}]
    rows, _ = gather(source(write(folder / "p.jsonl", {"messages": messages, "tools": tools})))
    assert rows[0].tools == tuple(tools)
    assert rows[0].messages[1]["tool_calls"] == calls


def test_rows_with_values_no_writer_can_write_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt":"one"}\n{"prompt":"\\ud83d hi"}\n{"prompt":"x","score":NaN}\n'
                    '{"prompt":"x","prompt":"y"}\n{"prompt":"x","score":1e999}\n'
                    '{"prompt":"x","tools":"[{\\"a\\":\\"\\\\ud83d\\"}]"}\n'
                    '{"prompt":"smile \\ud83d\\ude00"}\n')
    rows, counts = gather(source(path))
    assert sorted(row.messages[0]["content"] for row in rows) == ["one", "smile \U0001f600"]
    assert counts["own"].refused == {"lone surrogate": 1, "not a JSON number": 1, "duplicate key": 1,
                                     "number too large": 1, "not writable as JSON": 1}
    assert any("p.jsonl:2: skipped, lone surrogate" in message for message in caplog.messages)
    path.write_text('{"prompt":"one"}\n{"prompt":\n')
    with pytest.raises(InputRefused, match="p.jsonl:2: not a valid JSON row"):
        gather(source(path))


def test_columns_of_arrow_gain_no_nulls(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tools = [[{"type": "function", "function": {"name": "f", "parameters": {"city": "x"}}}],
             [{"type": "function", "function": {"name": "g", "parameters": {"day": 1}}}]]
    table = pyarrow.Table.from_pylist([{"messages": [{"role": "user", "content": str(index)}], "tools": tools[index],
                                        "score": float("nan")} for index in range(2)])
    parquet.write_table(table, tmp_path / "p.parquet")
    rows, _ = gather(source(tmp_path / "p.parquet", kind="parquet"))
    assert {row.messages[0]["content"]: list(row.tools or ()) for row in rows} == {"0": tools[0], "1": tools[1]}
    text = pyarrow.table({"conversations": [json.dumps([{"from": "human", "value": "as text"}])], "id": ["007"]})
    parquet.write_table(text, tmp_path / "q.parquet")
    rows, _ = gather(source(tmp_path / "q.parquet", kind="parquet"))
    assert (rows[0].id, rows[0].messages[0]["content"]) == ("007", "as text")


def test_local_datasets_of_the_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([chat("a", "b"), chat("c")])
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "two"))
    for folder, split in (("one", "train"), ("two", "test")):
        rows, _ = gather(source(tmp_path / folder, kind="hf", split=split))
        assert sorted(row.messages[0]["content"] for row in rows) == ["a", "c"]
    with pytest.raises(InputRefused, match="split 'train'"):
        gather(source(tmp_path / "two", kind="hf"))


def test_a_column_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"instruction": "do it", "response": "done", "id": 1}, {"response": "x"},
                 {"instruction": [{"role": "user", "content": "talk"}], "system": "s"})
    rows, counts = gather(source(path, prompt_column="instruction"))
    assert sorted(row.messages[-2]["content"] for row in rows) == ["do it", "talk"]
    assert counts["own"].refused == {"no prompt": 1}


def test_totals_add_up_for_every_source(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"question {index} of the first {index}") for index in range(40)),
                {"messages": []}, chat("question 1 of the first 1"), chat("third", domain="code"))
    two = write(tmp_path / "b.jsonl", *(chat(f"{index}th of the second, at {index}") for index in range(30)), {"x": 1})
    rows, totals = gather_all([source(one, name="one"), source(two, name="two", cap=12, weight=2.0)], tmp_path / "out",
                              max_prompts=30, held_out_fraction=0.2)
    stored = json.loads((tmp_path / "out" / "totals.json").read_text())
    for counts in [stored["total"], *stored["sources"].values()]:
        assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
        assert counts["kept"] == counts["train"] + counts["held_out"]
    assert stored["total"]["kept"] == len(rows) == 30
    assert stored["sources"]["two"]["kept"] == 12 and stored["sources"]["two"]["dropped"]["over cap"] == 18
    assert sum(sum(splits.values()) for splits in stored["domains"].values()) == 30
    table = totals.table().splitlines()
    assert table[0].split()[:5] == ["source", "read", "kept", "train", "held_out"]
    assert [line.split()[0] for line in table[1:]] == ["one", "two", "total"]
    assert len({len(line) for line in table}) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(OUTPUTS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.05, 10.0)), min_size=1, max_size=5), st.integers(1, 120))
def test_shares_follow_the_weights(sources: list[tuple[int, float]], total: int) -> None:
    available, weights = [count for count, _ in sources], [weight for _, weight in sources]
    shares = apportion(available, weights, total)
    assert sum(shares) == min(total, sum(available))
    assert all(0 <= share <= count for share, count in zip(shares, available))
    free = [index for index, share in enumerate(shares) if share < available[index]]
    for one in free:  # no row could go to a source that is further below its share
        for two in range(len(shares)):
            if shares[two]:
                assert (shares[one] + 1) / weights[one] >= shares[two] / weights[two] * (1 - 1e-12)


@settings(max_examples=25, deadline=None)
@given(old=st.sets(st.integers(0, 10**6), min_size=5, max_size=40), new=st.sets(st.integers(0, 10**6), max_size=40),
       first=st.booleans(), named=st.booleans())
def test_adding_data_moves_no_row_across_the_split(tmp_path_factory: Any, old: set[int], new: set[int], first: bool,
                                                   named: bool) -> None:
    """Wherever the new rows come, in a source of their own or not, with ids (also repeated ones) or without."""
    folder = tmp_path_factory.mktemp("split")

    def rows(numbers: set[int]) -> list[dict[str, Any]]:
        return [chat(f"prompt {number}", **({"id": place} if named else {})) for place, number in
                enumerate(sorted(numbers))]

    options: dict[str, Any] = {"held_out_fraction": 0.3, "min_held_out": 0}
    one, two = write(folder / "a.jsonl", *rows(old)), write(folder / "b.jsonl", *rows(new), chat("of its own"))
    before = {row.messages[0]["content"]: row.split for row in gather(source(one), **options)[0]}
    sources = [source(one), source(two, name="new")]
    after = {row.messages[0]["content"]: row.split for row in gather(*(sources[::-1] if first else sources),
                                                                     **options)[0]}
    assert before.items() <= after.items()
    together = write(folder / "c.jsonl", *rows(new), *rows(old))
    merged = {row.messages[0]["content"]: row.split for row in gather(source(together), **options)[0]}
    assert all(merged.get(text, split) == split for text, split in before.items())


def test_repeated_ids_are_settled_by_content_not_order(tmp_path: Path) -> None:
    rows = [chat("one", id="x"), chat("two", id="x"), chat("two", id="y"), chat("three", id="b/x")]
    other = write(tmp_path / "o.jsonl", chat("four", id="x"), chat("five", id="z"))
    results = []
    for name, ordered in (("p", rows), ("q", rows[::-1])):
        path = write(tmp_path / f"{name}.jsonl", *ordered)
        found, counts = gather(source(path), source(other, name="b"))
        results.append(found)
        assert counts["own"].refused.total() + counts["own"].kept == 4
    assert results[0] == results[1]
    ids = [row.id for row in results[0]]
    assert len(set(ids)) == len(ids) and "b/x" in ids and "z" in ids
    assert not any(row.id == "b/x" and row.source == "b" for row in results[0])  # that id was taken


def stage_config(folder: Path, **options: Any) -> Config:
    config = tiny_config(folder / "data", folder / "target", folder / "p.jsonl")
    for name, value in options.items():
        setattr(config.data, name, value)
    return config


def test_the_stage_looks_again_when_inputs_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = "the quick brown fox jumps over the lazy dog and runs away from the hunter"
    write(tmp_path / "p.jsonl", chat(text), *(chat(f"prompt number {index}") for index in range(8)))
    config = stage_config(tmp_path)
    directory = paths.prompts_dir(config)
    prompts.run(config)
    assert "source" in caplog.text and "total" in caplog.text  # the table
    manifest = artifacts.read_manifest(directory)
    assert manifest and set(manifest.files) == set(OUTPUTS)
    # Another evaluation whose texts are not among the prompts leaves everything as it is.
    harmless = write(tmp_path / "harmless.jsonl", {"prompt": "something else that nobody asked in this file at all"})
    config.evaluate.benchmarks = [BenchmarkConfig("harmless", str(harmless)), BenchmarkConfig("held_out", "held_out")]
    prompts.run(config)
    assert artifacts.read_manifest(directory) == manifest
    # One whose texts are there removes them.
    bench = write(tmp_path / "bench.jsonl", {"prompt": text})
    config.evaluate.benchmarks = [BenchmarkConfig("bench", str(bench))]
    prompts.run(config)
    assert len(list(read_prompts(directory))) == 8 and "hold text of bench" in caplog.text
    manifest = artifacts.read_manifest(directory)
    prompts.run(config)
    assert artifacts.read_manifest(directory) == manifest
    config.data.decontaminate_benchmarks = False
    prompts.run(config)
    assert artifacts.read_manifest(directory) == manifest  # what was removed stays removed
    # An edited list of files is another input.
    config.data.decontaminate = [str(bench)]
    directory = paths.prompts_dir(config)
    prompts.run(config)
    assert len(list(read_prompts(directory))) == 8
    write(bench, {"prompt": "nothing of this is in any of the prompts that are collected here"})
    prompts.run(config)
    assert len(list(read_prompts(directory))) == 9


def test_an_edited_redaction_is_another_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "redact_stage.py").write_text("def f(text):\n    return text\n")
    write(tmp_path / "p.jsonl", chat("one"), chat("two"))
    config = stage_config(tmp_path, redaction="redact_stage:f")
    before = prompts.source_files(config)
    (tmp_path / "redact_stage.py").write_text("def f(text):\n    return text.upper()\n")
    assert prompts.source_files(config)["redaction"] != before["redaction"]


def test_what_is_off_keeps_the_place_of_the_data(tmp_path: Path) -> None:
    config = stage_config(tmp_path, near_duplicate_threshold=None)
    assert set(paths.prompts_key(config)["data"]) == {"sources", "max_prompts", "held_out_fraction", "min_held_out"}
    places = {paths.prompts_dir(config)}
    for name, value in (("redaction", "builtin"), ("near_duplicate_threshold", 0.9), ("decontaminate", ["x.jsonl"])):
        places.add(paths.prompts_dir(stage_config(tmp_path, **({"near_duplicate_threshold": None} | {name: value}))))
    assert len(places) == 4


@pytest.mark.parametrize("options,problem", [
    ({"redaction": "builtinn"}, "data.redaction='builtinn'"), ({"redaction": "a b:c"}, "data.redaction"),
    ({"near_duplicate_threshold": 0.0}, "data.near_duplicate_threshold=0.0"),
    ({"near_duplicate_threshold": 1.2}, "data.near_duplicate_threshold=1.2"),
    ({"near_duplicate_num_perm": 8}, "data.near_duplicate_num_perm=8"), ({"decontaminate_ngram": 2}, "_ngram=2"),
    ({"decontaminate": ["a", "a"]}, "data.decontaminate"),
])
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_cleaning(stage_config(tmp_path, **options).data)
    assert problem in str(refusal.value)
    check_cleaning(stage_config(tmp_path).data)


def test_a_missing_benchmark_is_refused_before_the_start(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", chat("one"))
    (tmp_path / "target").mkdir()
    write(tmp_path / "target" / "config.json")
    config = stage_config(tmp_path)
    config.evaluate.benchmarks = [BenchmarkConfig("gsm8k", str(tmp_path / "gsm8k.jsonl"))]
    with pytest.raises(InputRefused, match="gsm8k.*decontaminate_benchmarks=false"):
        preflight(config, ["prompts"])
    config.data.decontaminate_benchmarks = False
    config.data.redaction = "no_module_of_this_name:f"
    with pytest.raises(ConfigError, match="no_module_of_this_name"):
        preflight(config, ["prompts"])
