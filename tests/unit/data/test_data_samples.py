"""Token sequences and masks from stored answers."""

from pathlib import Path
from typing import Optional

import numpy as np
import pytest

from deepspec.data.jsonl import DurableWriter
from deepspec.data.responses import ResponseRow, Turn, read_responses, response_from_json, truncate_at_length
from deepspec.data.samples import load_samples, sample_runs
from deepspec.errors import InputRefused


def turn(prompt: list[int], response: list[int], reason: str = "stop") -> Turn:
    return Turn(tuple(prompt), tuple(response), reason, "text")


def row(name: str, *turns: Turn, split: str = "train") -> ResponseRow:
    return ResponseRow(name, "chat", split, ({"role": "user", "content": "x"}, {"role": "assistant"}), turns)


def write(folder: Path, *rows: ResponseRow) -> Path:
    with DurableWriter(folder / "responses.jsonl") as writer:
        for item in rows:
            writer.write(item.to_json())
    return folder


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    messages = ({"role": "user", "content": "\u2028"},)
    item = ResponseRow("a", "code", "held_out", messages, (turn([1], [2, 3]),), ({"t": 1},))
    write(tmp_path, item, row("b", turn([1], [2])))
    assert list(read_responses(tmp_path, "held_out")) == [item]
    assert [found.id for found in read_responses(tmp_path)] == ["a", "b"]


def test_the_mask_covers_what_the_target_wrote() -> None:
    (run,) = sample_runs(row("a", turn([5, 6, 7], [8, 9])))
    assert run.ids.tolist() == [5, 6, 7, 8, 9]
    assert run.mask.tolist() == [False] * 3 + [True] * 2


def test_turns_share_a_sample_while_the_prompt_continues_it() -> None:
    (run,) = sample_runs(row("a", turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])))
    assert run.sample_id == "a"
    assert run.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.mask.tolist() == [False, False, True, True, False, True]


def test_a_rewritten_history_starts_a_sample_of_its_own() -> None:
    # The template dropped token 3 (reasoning) from the history.
    first, second = sample_runs(row("a", turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6, 7])))
    assert (first.sample_id, second.sample_id) == ("a#0", "a#1")
    assert second.ids.tolist() == [1, 2, 4, 5, 6, 7]
    assert second.mask.tolist() == [False] * 4 + [True] * 2


def test_a_truncated_answer_is_taught_no_stop() -> None:
    end = 2
    (run,) = sample_runs(row("a", turn([5], [6, 7], "length"), turn([5, 6, 7, end, 8], [9, end])))
    assert run.ids[run.mask].tolist() == [6, 7, 9, end]
    assert not run.mask[3]  # the end-of-turn token that the template put after the cut answer


@pytest.mark.parametrize("max_length,supervised", [(8, None), (20, None), (21, None), (22, 2), (40, 20), (100, 50)])
def test_cutting_never_leaves_a_sample_without_anchors(tmp_path: Path, max_length: int,
                                                       supervised: Optional[int]) -> None:
    write(tmp_path, row("long", turn(list(range(20)), list(range(20, 70)))), row("short", turn([1], [2, 3])))
    samples = load_samples(tmp_path, "train", max_length)
    kept = {item.sample_id: int(item.loss_mask.sum()) for item in samples}
    assert kept == {"short": 2} | ({} if supervised is None else {"long": supervised})
    assert samples.dropped == ({"no anchors: cut by max_length": 1} if supervised is None else {})


def test_an_answer_of_one_token_has_no_anchor(tmp_path: Path) -> None:
    write(tmp_path, row("empty", turn([1], [2])), row("fine", turn([1], [5, 2])))
    samples = load_samples(tmp_path, "train", 64)
    assert [item.sample_id for item in samples] == ["fine"]
    assert samples.dropped == {"no anchors": 1}


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    write(tmp_path, row("empty", turn([1], [2])))
    with pytest.raises(InputRefused, match="no usable train sample .1 no anchors."):
        load_samples(tmp_path, "train", 64)
    assert len(load_samples(tmp_path, "held_out", 64)) == 0
    with pytest.raises(InputRefused, match="max_length=1"):
        load_samples(tmp_path, "train", 1)


def test_an_id_without_a_row_names_it(tmp_path: Path) -> None:
    write(tmp_path, row("a", turn([1], [5, 6])), row("bad", turn([1, 600], [5, 6])))
    with pytest.raises(InputRefused, match="row 'bad' has token id 600, .* only 576 rows"):
        load_samples(tmp_path, "train", 64, vocab_size=576)
    assert len(load_samples(tmp_path, "train", 64, vocab_size=601)) == 2


def test_the_mask_token_is_refused_naming_the_row(tmp_path: Path) -> None:
    write(tmp_path, row("a", turn([1], [5, 6])), row("bad", turn([1, 2], [5, 3, 6])))
    with pytest.raises(InputRefused, match="row 'bad' contains token id 3 at position 3"):
        load_samples(tmp_path, "train", 64, mask_token_id=3)
    assert len(load_samples(tmp_path, "train", 64, mask_token_id=4)) == 2


def test_samples_are_tensors_on_demand(tmp_path: Path) -> None:
    write(tmp_path, row("a", turn([1], [5, 6])), row("b", turn([1, 2], [5, 6, 7]), split="held_out"))
    samples = load_samples(tmp_path, "train", 64)
    assert samples.lengths == [3]
    assert samples[-1].input_ids.tolist() == [1, 5, 6]
    assert samples[0].loss_mask.dtype.is_floating_point is False
    assert samples._ids.dtype == np.int32
    with pytest.raises(IndexError):
        samples[1]


@pytest.mark.parametrize("change,problem", [
    ({"turns": []}, "at least one turn"),
    ({"turns": [{"prompt_ids": [1], "response_ids": [], "finish_reason": "stop"}]}, "response_ids is empty"),
    ({"turns": [{"prompt_ids": [1.5], "response_ids": [1], "finish_reason": "stop"}]}, "list of token ids"),
    ({"turns": [{"prompt_ids": [True], "response_ids": [1], "finish_reason": "stop"}]}, "list of token ids"),
    ({"turns": [{"prompt_ids": [1], "response_ids": [-1], "finish_reason": "stop"}]}, "list of token ids"),
    ({"turns": [{"prompt_ids": [1], "response_ids": [1], "finish_reason": None}]}, "finish_reason None"),
    ({"split": ...}, "missing field 'split'"),
])
def test_a_row_of_another_kind_is_refused(change: dict, problem: str) -> None:
    values = row("a", turn([1], [2])).to_json() | {"turns": [{"prompt_ids": [1], "response_ids": [2],
                                                             "finish_reason": "stop", "text": ""}]} | change
    values = {key: value for key, value in values.items() if value is not ...}
    with pytest.raises(InputRefused, match="here:1") as refusal:
        response_from_json(values, "here:1")
    assert problem in str(refusal.value)


def test_dropping_truncated_answers_keeps_the_turns_before() -> None:
    whole, cut = turn([1], [2]), turn([1, 2, 3], [4], "length")
    assert truncate_at_length(row("a", whole)) == row("a", whole)
    assert truncate_at_length(row("a", whole, cut)) == row("a", whole)
    assert truncate_at_length(row("a", cut)) is None
