"""Acceptance by context length and by reasoning: every round is counted once, where it begins."""

from typing import Any

import numpy as np
import pytest

from deepspec.decoding.types import DecodeResult, RoundRecord
from deepspec.evaluation.analytic import AnchorValues
from deepspec.evaluation.benchmarks import Conversation
from deepspec.evaluation.slices import bucket_names, described, of_anchors, of_results, reasons, together
from deepspec.evaluation.summary import Setting
from deepspec.report.inputs import settings
from deepspec.report.slices import slice_tables


def answer(name: str, prompt: int, accepted: list[int]) -> DecodeResult:
    rounds = tuple(RoundRecord(3, 3, 3, count, 1) for count in accepted)
    return DecodeResult(name, "chat", prompt, tuple(range(1 + sum(accepted) + len(accepted))), "length", rounds, 0.0)


def test_rounds_fall_into_the_range_where_they_begin() -> None:
    """Contexts of the rounds of x: 6, 8 (2 tokens on), 12; of y: 10."""
    found = of_results([answer("a/x", 6, [1, 3, 0]), answer("a/y", 10, [2])], 3, [8, 12], {})["context_length"]
    assert list(found) == ["0-7", "8-11", "12+"] == bucket_names([8, 12])
    assert {name: (int(one.rounds.sum()), int(one.accepted.sum())) for name, one in found.items()} == {
        "0-7": (1, 1), "8-11": (2, 5), "12+": (1, 0)}
    assert found["8-11"].survived.sum(axis=0).tolist() == [2, 2, 1] and len(found["8-11"]) == 2


def test_anchors_fall_into_the_range_of_their_position() -> None:
    values = AnchorValues(np.array(["x#0", "y#0", "y#0"]), np.array(["chat"] * 3), np.array([7, 8, 30]),
                          np.array([1.0, 0.5, 0.0]), np.ones((3, 2)), np.full((3, 2), 0.25), np.zeros((3, 2)))
    found = of_anchors(values, [8], {"x": True, "y": False})
    assert {name: float(one.rounds.sum()) for name, one in found["context_length"].items()} == {"0-7": 1.0, "8+": 0.5}
    assert {name: float(one.accepted.sum()) for name, one in found["thinking"].items()} == {"on": 0.5, "off": 0.25}


def test_reasoning_is_told_apart_only_where_there_are_both_kinds() -> None:
    modes = reasons([Conversation("a/x", "chat", (), thinking=True), Conversation("a/y", "chat", (), thinking=False),
                     Conversation("a/z", "chat", ())])
    assert modes == {"a/x": True, "a/y": False}
    both = [answer("a/x#0", 4, [3]), answer("a/y#0", 4, [0, 0]), answer("a/z#0", 4, [1])]
    found = of_results(both, 3, [8], modes)["thinking"]
    assert {name: int(one.rounds.sum()) for name, one in found.items()} == {"on": 1, "off": 2}
    assert "by_thinking" not in described(of_results(both[:1], 3, [8], modes), 0, 0)


def test_reasoning_is_told_apart_where_ranks_have_one_kind_each() -> None:
    modes = {"a/x": True, "a/y": False, "a/w": True}
    parts = [of_results([answer("a/x#0", 4, [3])], 3, [8], modes),
             of_results([answer("a/y#0", 4, [0, 0]), answer("a/w#0", 4, [1])], 3, [8], modes)]
    values = described(together(parts), 0, 0)["by_thinking"]
    assert {name: (one["rounds"], one["accepted"]) for name, one in values.items()} == {"on": (2, 4), "off": (2, 0)}


def test_ranks_and_benchmarks_are_pooled_and_described_in_order() -> None:
    parts = [of_results([answer("a/x", 9000, [1])], 3, [8, 512, 4096], {}),
             of_results([answer("b/y", 2, [3])], 3, [8, 512, 4096], {})]
    setting = Setting(1.0, "fixed", 1)
    for part in parts:
        setting.tell_apart(part)
    pooled = together(parts)
    assert setting.slices["context_length"].keys() == pooled["context_length"].keys()
    values = described(pooled, 0, 0)["by_context_length"]
    assert list(values) == ["0-7", "4096+"]
    assert values["0-7"]["acceptance_length"] == 4.0 and values["4096+"]["acceptance_length"] == 2.0
    assert "by_thinking" not in described(pooled, 0, 0)


@pytest.mark.parametrize("number,shown", [(1, False), (2, True)])
def test_the_report_has_a_table_where_there_is_something_to_compare(number: int, shown: bool) -> None:
    values: dict[str, Any] = {name: {"num_prompts": 2, "rounds": 9, "acceptance_length": 2.5,
                                     "acceptance_length_ci95": [2.0, 3.0], "conditional_acceptance": [0.75]}
                              for name in ("0-511", "512+")[:number]}
    [setting] = settings({"settings": {"t1": {"temperature": 1.0, "decoding": "fixed", "by_context_length": values}}})
    html = slice_tables(setting)
    assert ("By context length" in html and "512+" in html) is shown
