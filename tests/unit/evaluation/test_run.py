"""Benchmarks from files, several turns, and the whole file with real tiny models."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import pytest
import torch

from deepspec.config.schema import BenchmarkConfig, EvaluateConfig
from deepspec.data.batch import Sample
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import (
    Benchmark, Conversation, load_benchmark, run_conversations, split_domains, with_thinking,
)
from deepspec.evaluation.greedy import check_greedy
from deepspec.evaluation.run import Material, Subject, evaluate, planned_answers
from deepspec.evaluation.summary import Speed
from deepspec.evaluation.values import load_values, paired_counts, save_values
from deepspec.stages.evaluate import table
from tests.unit.decoding.test_decoder import LinearCost
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target

HEADER = {"drafter": "d" * 64, "algorithm": "dspark", "block_size": 4}


@dataclass
class Letters:
    """Renders each message as its role's number and its characters; refuses what contains a question mark."""

    seen: list[list[dict[str, Any]]] = field(default_factory=list)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Optional[Sequence[Any]] = None) -> list[int]:
        self.seen.append([dict(message) for message in messages])
        return [3 + (ord(letter) % 40) for message in messages for letter in message["role"][:1] + message["content"]]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


@dataclass
class Thinker(Letters):
    """Remembers who was asked to think."""

    asked: set[Optional[bool]] = field(default_factory=set)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Optional[Sequence[Any]] = None,
                   thinking: Optional[bool] = None) -> list[int]:
        self.asked.add(thinking)
        return [50 + int(bool(thinking)), *super().prompt_ids(messages, tools)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_every_form(tmp_path: Path) -> None:
    rows = [{"turns": ["one", "two"]}, {"prompt": "three"},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]}]
    config = BenchmarkConfig("b", write(tmp_path / "b.jsonl", rows), "code")
    loaded = load_benchmark(config, tmp_path)
    assert [item.turns for item in loaded.conversations] == [2, 1, 1] and loaded.domain == "code"
    assert len({item.id for item in loaded.conversations}) == 3
    assert len(load_benchmark(BenchmarkConfig("b", config.path, "code", limit=2), tmp_path).conversations) == 2
    with pytest.raises(InputRefused, match="b.jsonl:2"):
        load_benchmark(BenchmarkConfig("b", write(tmp_path / "b.jsonl", [{"prompt": "a"}, {"text": "b"}])), tmp_path)
    with pytest.raises(InputRefused, match="cannot be read"):
        load_benchmark(BenchmarkConfig("b", str(tmp_path / "none.jsonl")), tmp_path)


def held_out_row(name: str, domain: str, split: str = "held_out") -> dict[str, Any]:
    messages = [{"role": "user", "content": name}, {"role": "assistant"}]
    return {"id": name, "domain": domain, "split": split, "messages": messages,
            "turns": [{"prompt_ids": [1, 2], "response_ids": [3], "finish_reason": "stop", "text": "x"}]}


def test_held_out_prompts_are_split_by_domain(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="generate_responses"):
        load_benchmark(BenchmarkConfig("held_out", "held_out"), tmp_path)
    write(tmp_path / "responses.jsonl", [held_out_row("a", "math"), held_out_row("b", "code"),
                                         held_out_row("c", "math"), held_out_row("d", "math", "train")])
    loaded = load_benchmark(BenchmarkConfig("held_out", "held_out"), tmp_path)
    parts = split_domains(loaded)
    assert {part.name: len(part.conversations) for part in parts} == {"held_out-code": 1, "held_out-math": 2}
    assert [part.domain for part in parts] == ["code", "math"]


def test_a_later_turn_sees_the_generated_history(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", [{"turns": ["one", "two"]}, {"turns": ["three"]}])
    renderer: Any = Letters()

    def decode(requests: list[DecodeRequest]) -> list[DecodeResult]:
        return [DecodeResult(item.id, item.domain, 1, (0, 1, 2), "stop", (), 0.1) for item in reversed(requests)]

    results = run_conversations(load_benchmark(BenchmarkConfig("b", path), tmp_path).conversations, renderer, decode)
    assert [item.id for item in results] == ["b/1#0", "b/2#0", "b/1#1"]
    assert [message["content"] for message in renderer.seen[-1]] == ["one", "abc", "two"]


@pytest.fixture(scope="module")
def subject() -> Subject:
    target = tiny_target(eos=60)
    renderer: Any = Letters()
    return Subject(target, tiny_drafter(target), renderer, 4,
                   lambda mode: ThroughputScheduler(LinearCost(base=50.0, slope=1.0, draft=1.0), 4))


def benchmarks(tmp_path: Path) -> list[Benchmark]:
    files = {"sums": ("math", [{"prompt": f"add {i}"} for i in range(5)]),
             "talk": ("chat", [{"turns": [f"hello {i}", "and then"]} for i in range(4)]), "none": ("chat", [])}
    return [load_benchmark(BenchmarkConfig(name, write(tmp_path / f"{name}.jsonl", rows), domain), tmp_path)
            for name, (domain, rows) in files.items()]


def samples(count: int) -> list[Sample]:
    """Held-out responses of two domains."""
    lengths = [14 + 2 * i for i in range(count)]
    return [Sample(f"r{i}", "math" if i % 2 else "chat", 3 + torch.arange(length) * (7 + i) % 40,
                   torch.arange(length) > 4) for i, length in enumerate(lengths)]


def test_the_whole_file(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(temperatures=[1.0, 0.0], max_new_tokens=16, batch_size=4, bootstrap=200, check_greedy=2,
                             estimators=["sampled", "analytic", "drafted", "teacher_forced"], anchors=50)
    material = Material(benchmarks(tmp_path), untrained=tiny_drafter(subject.target, seed=9), samples=samples(12))
    found = evaluate(subject, material, options, seed=0, header=HEADER)
    report = found.report
    json.dumps(report, allow_nan=False)
    assert {key: report[key] for key in ("drafter", "algorithm", "block_size")} == {
        key: HEADER[key] for key in ("drafter", "algorithm", "block_size")}
    assert set(report["settings"]) == {
        f"t{t}-{kind}" for t in (0, 1) for kind in (
            "b4-none", "b4-fixed", "b4-scheduled", "b4-fixed-untrained", "analytic", "drafted", "teacher_forced")}
    setting = report["settings"]["t1-b4-fixed"]
    assert setting["mode"] == "sampled" and setting["decoding"] == "fixed" and setting["batch_size"] == 4
    values = setting["benchmarks"]["sums"]
    assert values["num_prompts"] == 5 and values["domain"] == "math"
    assert values["drafted"] == 4 * values["rounds"]
    assert values["acceptance_length"] == pytest.approx(1 + values["accepted"] / values["rounds"])
    assert values["acceptance_length_ci95"][0] <= values["acceptance_length"] <= values["acceptance_length_ci95"][1]
    assert len(values["accepted_per_position"]) == len(values["conditional_acceptance"]) == 4
    assert values["speedup"] == pytest.approx(values["tokens_per_second"] / values["target_only_tokens_per_second"])
    assert setting["benchmarks"]["talk"]["num_prompts"] == 4 and setting["benchmarks"]["talk"]["tokens"] == 8 * 16
    empty = setting["benchmarks"]["none"]
    assert empty["num_prompts"] == 0 and empty["acceptance_length"] is None and empty["tokens_per_second"] is None
    assert set(setting["domains"]) == {"math", "chat"}
    plain = report["settings"]["t1-b4-none"]["benchmarks"]["sums"]
    assert plain["acceptance_length"] == 1.0 and plain["drafted"] == 0 and plain["speedup"] == 1.0
    assert report["macro"] == setting["macro"] and report["default_setting"] == "t1-b4-fixed"
    assert report["macro"]["acceptance_length_ci95"] is not None
    assert report["untrained"]["drafter"] == "untrained" and "p_value" in report["untrained"]["trained_minus_untrained"]
    assert report["greedy_check"]["sums"] == {"prompts": 2, "identical": 2, "near_ties": 0, "mismatches": 0}
    assert values["draft_ms"] > 0 and values["verify_ms"] > 0 and plain["draft_ms"] is None
    by_prompt = values["acceptance_length_by_prompt"]
    assert by_prompt["p10"] <= by_prompt["p50"] <= by_prompt["p90"]
    assert sum(values["accepted_histogram"]) == values["rounds"] and len(values["accepted_histogram"]) == 5
    chat = [setting["benchmarks"][name]["acceptance_length"] for name in ("talk",)]  # "none" has no prompts
    assert setting["domains"]["chat"]["acceptance_length_macro"] == chat[0]
    assert len(table(report)) == 1 + 2 * (4 * 4 + 4 + 2 * 3)


def test_computed_settings(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(temperatures=[1.0], max_new_tokens=24, batch_size=4, bootstrap=200, check_greedy=0,
                             estimators=["analytic", "drafted", "teacher_forced"], anchors=50)
    material = Material(benchmarks(tmp_path), samples=samples(12))
    found = evaluate(subject, material, options, seed=0, header=HEADER)
    report, settings = found.report, found.report["settings"]
    json.dumps(report, allow_nan=False)
    assert set(settings) == {"t1-analytic", "t1-drafted", "t1-teacher_forced"}
    assert report["macro"] == settings["t1-analytic"]["macro"]
    for name, setting in settings.items():
        assert setting["mode"] == "analytic" and setting["estimator"] == name[3:] and setting["decoding"] == "fixed"
        assert set(setting["domains"]) == {"math", "chat"}
        for values in setting["domains"].values():
            assert values["acceptance_length_ci95"][0] <= values["acceptance_length"] <= 5
            assert values["drafted"] == pytest.approx(4 * values["rounds"], abs=0.01)
            assert len(values["conditional_acceptance"]) == 4 and values["tokens_per_second"] is None
            assert sum(values["accepted_histogram"]) == pytest.approx(values["rounds"], rel=0.2)
    drafted = settings["t1-drafted"]
    assert set(drafted["benchmarks"]) == {"held_out-math", "held_out-chat"}
    anchors = sum(values["anchors"] for values in drafted["benchmarks"].values())
    assert anchors >= 50 and anchors == sum(values["rounds"] for values in drafted["benchmarks"].values())
    # Rounds of decoding skip the tokens that they accept; anchors of answers are all tokens.
    talk = settings["t1-analytic"]["benchmarks"]["talk"]
    assert talk["rounds"] < talk["anchors"] <= 8 * (24 - 1) and talk["num_prompts"] == 4
    assert len(found.values["t1-drafted"].anchors["length"]) == anchors
    assert found.values["t1-drafted"].pooled.prompts.tolist() == [f"r{i}" for i in (0, 10, 2, 4, 6, 8)] + [
        f"r{i}" for i in (1, 11, 3, 5, 7, 9)]


def test_batch_sizes_change_the_speed_and_nothing_else(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=12, batch_sizes=[1, 4], bootstrap=0, modes=["none", "fixed"],
                             check_greedy=0)
    report = evaluate(subject, Material(benchmarks(tmp_path)), options, seed=0, header=HEADER).report
    assert list(report["settings"]) == ["t1-b1-none", "t1-b1-fixed", "t1-b4-none", "t1-b4-fixed", "t1-analytic"]
    first, second = (report["settings"][f"t1-b{size}-fixed"]["macro"] for size in (1, 4))
    assert first["acceptance_length"] == second["acceptance_length"] and report["default_setting"] == "t1-b1-fixed"
    assert first["speedup"] > 0 and second["tokens_per_second"] > 0


def test_reasoning_on_off_and_mixed(subject: Subject, tmp_path: Path) -> None:
    renderer: Any = Thinker()
    other = Subject(subject.target, subject.drafter, renderer, 4)
    options = EvaluateConfig(max_new_tokens=8, batch_size=4, bootstrap=0, modes=["fixed"], check_greedy=0)
    material = Material(benchmarks(tmp_path)[:1], thinking=[True, False, "mixed"], thinking_share=0.5)
    report = evaluate(other, material, options, seed=0, header=HEADER).report
    kinds = {name: setting["thinking"] for name, setting in report["settings"].items()}
    assert kinds == {f"t1-{kind}-{label}": value for label, value in (
        ("thinking", True), ("direct", False), ("mixed", "mixed")) for kind in ("b4-fixed", "analytic")}
    assert renderer.asked == {True, False}
    mixed_rounds = report["settings"]["t1-b4-fixed-mixed"]["by_thinking"]
    assert set(mixed_rounds) == {"on", "off"} and "by_thinking" not in report["settings"]["t1-b4-fixed-thinking"]
    pooled = report["settings"]["t1-b4-fixed-mixed"]["benchmarks"].values()
    assert sum(one["rounds"] for one in mixed_rounds.values()) == sum(one["rounds"] for one in pooled)
    rows = [Conversation(f"b/{i}", "math", (), thinking=thinking) for i, thinking in enumerate((True, False, None))]
    mixed = with_thinking(Benchmark("b", "math", tuple(rows)), "mixed", 1.0)
    assert [item.thinking for item in mixed.conversations] == [True, False, True]
    alone = with_thinking(Benchmark("b", "math", tuple(rows)), None, 1.0)
    assert {item.thinking for item in alone.conversations} == {None}


def test_values_come_back(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=12, batch_size=4, bootstrap=0, modes=["none", "fixed"], check_greedy=0)
    assert load_values(tmp_path) == {}
    material = Material(benchmarks(tmp_path))
    runs = [evaluate(Subject(subject.target, tiny_drafter(subject.target, seed), subject.renderer, 4), material,
                     options, seed=0, header=HEADER) for seed in (1, 2)]
    save_values(tmp_path, runs[0].values, drafter_sha256="d", target_sha256="t", seed=0)
    loaded = load_values(tmp_path)
    assert list(loaded) == list(runs[0].values)
    for name, values in loaded.items():
        assert vars(values.pooled).keys() == vars(runs[0].values[name].pooled).keys()
        assert values.pooled.accepted.tolist() == runs[0].values[name].pooled.accepted.tolist()
    pair = paired_counts(loaded["t1-analytic"], runs[1].values["t1-analytic"])
    assert pair is not None and pair[0].prompts.tolist() == pair[1].prompts.tolist() and len(pair[0]) == 9
    other_text = replace(loaded["t1-analytic"], text="another answer")
    assert paired_counts(other_text, runs[1].values["t1-analytic"]) is None
    longer = Subject(subject.target, tiny_drafter(subject.target, 3, block_size=6), subject.renderer, 6)
    other = evaluate(longer, material, options, seed=0, header=HEADER)
    pair = paired_counts(loaded["t1-b4-fixed"], other.values["t1-b4-fixed"])
    assert pair is not None and pair[0].reached.shape == pair[1].reached.shape == (9, 6)
    (tmp_path / "evaluation" / "values.npz").write_bytes(b"PK")
    with pytest.raises(InputRefused, match="values.npz"):
        load_values(tmp_path)


def test_the_same_seed_gives_the_same_numbers(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=12, batch_size=3, bootstrap=50, modes=["fixed"], check_greedy=0)
    lengths = []
    for batch_size in (3, 7):
        options.batch_size = batch_size
        report = evaluate(subject, Material(benchmarks(tmp_path)), options, seed=1, header=HEADER).report
        lengths.append(report["macro"]["acceptance_length"])
        assert report["macro"]["speedup"] is None
    assert lengths[0] == lengths[1]


def test_modes_that_cannot_run_are_named(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=4, batch_size=4, bootstrap=0, check_greedy=0)
    material = Material(benchmarks(tmp_path)[:1], skipped={"scheduled": "no profile"})
    report = evaluate(subject, material, options, seed=0, header=HEADER).report
    assert report["skipped"] == {"scheduled": "no profile"} and len(report["settings"]) == 3
    assert report["macro"]["acceptance_length_ci95"] is None


def test_a_lossy_decoder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(eos=60)
    drafter, requests = tiny_drafter(target), prompts(4)
    assert check_greedy(target, drafter, requests, batch_size=4, max_new_tokens=8)["identical"] == 4
    monkeypatch.setattr("deepspec.decoding.verification.accept_draft", lambda target_at, draft_at, lengths, u: lengths)
    assert check_greedy(target, drafter, requests, batch_size=4, max_new_tokens=8)["mismatches"] > 0


def test_speeds_add_up() -> None:
    ranks = Speed.together([Speed(10, 2.0, steps=3), Speed(30, 4.0, steps=5)])
    assert ranks.tokens_per_second == 10.0 and Speed().tokens_per_second is None
    assert Speed.pooled([ranks, Speed(20, 2.0)]).tokens_per_second == 10.0


@pytest.mark.parametrize("estimators, modes, sizes", [
    (["sampled"], ["none", "fixed"], [1, 2]), (["sampled", "analytic"], ["fixed"], []), (["analytic"], ["fixed"], []),
])
def test_progress_is_told_of_as_many_rows_as_it_expects(subject: Subject, tmp_path: Path, estimators: list[str],
                                                        modes: list[str], sizes: list[int]) -> None:
    """A bar that ends early or runs over has the time left wrong all along."""
    options = EvaluateConfig(max_new_tokens=6, batch_size=2, batch_sizes=sizes, modes=modes, temperatures=[1.0, 0.0],
                             estimators=estimators, bootstrap=20, check_greedy=0)
    material = Material(benchmarks(tmp_path), untrained=tiny_drafter(subject.target, 9))
    told: list[int] = []
    evaluate(subject, material, options, seed=0, header=HEADER,
             progress=lambda tokens, rows=1, note=None: told.append(rows))
    assert sum(told) == planned_answers(material, options) > 0
