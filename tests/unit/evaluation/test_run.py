"""Benchmarks from files, several turns, and the whole file with real tiny models."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Sequence

import pytest

from deepspec.config.schema import BenchmarkConfig, EvaluateConfig
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import Benchmark, load_benchmark, run_conversations, split_domains
from deepspec.evaluation.greedy import check_greedy
from deepspec.evaluation.run import Subject, evaluate
from deepspec.evaluation.summary import Speed
from deepspec.stages.evaluate import table
from tests.unit.decoding.test_decoder import LinearCost
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target

HEADER = {"drafter": "d" * 64, "algorithm": "dspark", "block_size": 4, "thinking": False}


@dataclass
class Letters:
    """Renders each message as its role's number and its characters; refuses what contains a question mark."""

    seen: list[list[dict[str, Any]]] = field(default_factory=list)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Optional[Sequence[Any]] = None) -> list[int]:
        self.seen.append([dict(message) for message in messages])
        return [3 + (ord(letter) % 40) for message in messages for letter in message["role"][:1] + message["content"]]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


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
                   lambda: ThroughputScheduler(LinearCost(base=50.0, slope=1.0, draft=1.0), 4))


def benchmarks(tmp_path: Path) -> list[Benchmark]:
    files = {"sums": ("math", [{"prompt": f"add {i}"} for i in range(5)]),
             "talk": ("chat", [{"turns": [f"hello {i}", "and then"]} for i in range(4)]), "none": ("chat", [])}
    return [load_benchmark(BenchmarkConfig(name, write(tmp_path / f"{name}.jsonl", rows), domain), tmp_path)
            for name, (domain, rows) in files.items()]


def test_the_whole_file(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(temperatures=[1.0, 0.0], max_new_tokens=16, batch_size=4, bootstrap=200, check_greedy=2)
    report = evaluate(subject, benchmarks(tmp_path), options, seed=0, header=HEADER,
                      untrained=tiny_drafter(subject.target, seed=9))
    json.dumps(report, allow_nan=False)
    assert {key: report[key] for key in ("drafter", "algorithm", "block_size")} == {
        key: HEADER[key] for key in ("drafter", "algorithm", "block_size")}
    assert set(report["settings"]) == {
        f"t{t}-b4-{mode}" for t in (0, 1) for mode in ("none", "fixed", "scheduled", "fixed-untrained")}
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
    assert len(table(report)) == 1 + 8 * 4


def test_the_same_seed_gives_the_same_numbers(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=12, batch_size=3, bootstrap=50, modes=["fixed"], check_greedy=0)
    lengths = []
    for batch_size in (3, 7):
        options.batch_size = batch_size
        report = evaluate(subject, benchmarks(tmp_path), options, seed=1, header=HEADER)
        lengths.append(report["macro"]["acceptance_length"])
        assert report["macro"]["speedup"] is None
    assert lengths[0] == lengths[1]


def test_modes_that_cannot_run_are_named(subject: Subject, tmp_path: Path) -> None:
    options = EvaluateConfig(max_new_tokens=4, batch_size=4, bootstrap=0, check_greedy=0)
    report = evaluate(subject, benchmarks(tmp_path)[:1], options, seed=0, header=HEADER,
                      skipped={"scheduled": "no profile"})
    assert report["skipped"] == {"scheduled": "no profile"} and len(report["settings"]) == 2
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
