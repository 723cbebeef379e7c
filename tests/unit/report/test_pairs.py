"""Pairs of runs, computed acceptance and the learning curve in the report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec.evaluation.metrics import AcceptanceCounts
from deepspec.evaluation.values import SettingValues, save_values
from deepspec.report.build import build_report
from deepspec.report.inputs import main_setting, read_run_files, speeds
from deepspec.report.learning import learning_lines
from deepspec.report.pairs import pair_lines, pairs
from tests.unit.report.make_run import LENGTH, make_run, setting
from tests.unit.report.test_report import check

PROMPTS = 60


def counts(rate: float, noise: float, seed: int) -> AcceptanceCounts:
    """Prompts of common difficulty; ``noise`` in what each accepted."""
    difficulty = np.random.default_rng(0).normal(0, 0.1, PROMPTS)
    random = np.random.default_rng(seed)
    rounds = np.full(PROMPTS, 40.0)
    accepted = 40 * LENGTH * (rate + difficulty) + random.normal(0, noise, PROMPTS)
    wide = np.zeros((PROMPTS, LENGTH))
    return AcceptanceCounts(rounds, rounds, rounds, accepted, rounds, wide, wide, rounds,
                            np.array([f"p{i:02d}" for i in range(PROMPTS)]))


def computed_run(directory: Path, rate: float, seed: int, text: str = "same") -> Path:
    """A run with counted and computed settings; the computed ones are ten times less noisy."""
    make_run(directory, directory.name)
    evaluation = json.loads((directory / "evaluation.json").read_text())
    histogram: dict[str, Any] = {"accepted_histogram": [100, 80, 60, 40, 120], "draft_ms": 2.5, "verify_ms": 9.5,
                                 "acceptance_length_by_prompt": {"mean": 2.4, "p10": 1.5, "p50": 2.4, "p90": 3.3}}
    for name in ("t1_fixed_b1", "t1_fixed_b8"):
        for values in evaluation["settings"][name]["benchmarks"].values():
            values |= histogram
    analytic = setting("fixed", 0.8, 0.0, mode="analytic", estimator="analytic")
    for values in analytic["benchmarks"].values():
        values |= {"anchors": 1234, "tokens_per_second": None}
    analytic["macro"]["tokens_per_second"] = None
    evaluation["settings"] = {"t1-analytic": analytic, **evaluation["settings"]}
    (directory / "evaluation.json").write_text(json.dumps(evaluation))
    save_values(directory, {
        "t1_fixed_b1": SettingValues({"math_set": counts(rate, 20.0, seed)}),
        "t1-analytic": SettingValues({"math_set": counts(rate, 2.0, seed + 1)}, text=text)},
        drafter_sha256="d", target_sha256="t", seed=0)
    return directory


def test_pairs_and_how_much_sharper_they_are(tmp_path: Path) -> None:
    runs = [read_run_files(computed_run(tmp_path / name, rate, seed)) for name, rate, seed in (
        ("first", 0.5, 1), ("second", 0.48, 5))]
    found = pairs(runs)
    assert [one.estimator for one in found] == ["analytic", "sampled"]
    assert [one.result.effect for one in found] == pytest.approx([0.08, 0.08], abs=0.1)
    assert found[0].result.interval[0] > 0 and found[0].result.p_value < 0.01
    assert 5 < found[1].width / found[0].width < 20
    assert found[0].macro_gain == 0.0, "both files have the same macro means"
    lines = pair_lines(found)
    assert "first minus second" in lines[0] and "times narrower" in lines[-1]
    text = " ".join(check(build_report(runs[0], runs[1:])).text)
    assert "Differences on the same prompts" in text and "times narrower" in text
    assert "p from flipping" in text


def test_runs_of_one_name_are_told_by_their_folders(tmp_path: Path) -> None:
    runs = [read_run_files(computed_run(tmp_path / name, 0.5, 1)) for name in ("first", "second")]
    same = [replace(one, name="tiny") for one in runs]
    assert {(one.first, one.second) for one in pairs(same)} == {("first", "second")}


def test_other_texts_make_no_pair_of_computed_ones(tmp_path: Path) -> None:
    runs = [read_run_files(computed_run(tmp_path / name, 0.5, 1, text=name)) for name in ("first", "second")]
    assert [one.estimator for one in pairs(runs)] == ["sampled"]


def test_counted_and_computed_side_by_side(tmp_path: Path) -> None:
    files = read_run_files(computed_run(tmp_path / "run", 0.5, 1))
    setting_ = main_setting(files.evaluation)
    assert setting_ is not None and setting_.name == "t1_fixed_b1", "counted acceptance is quoted first"
    assert len(speeds(files.evaluation)) == 2, "a computed setting has no speed"
    text = " ".join(check(build_report(files)).text)
    for wanted in ("Counted and computed", "computed along the target's answers", "3,702", "draft ms / round",
                   "Draft tokens that a round accepted"):
        assert wanted in text, wanted
    plain = " ".join(check(build_report(read_run_files(make_run(tmp_path / "plain")))).text)
    assert "Counted and computed" not in plain


def test_damaged_values_are_told(tmp_path: Path) -> None:
    directory = computed_run(tmp_path / "run", 0.5, 1)
    (directory / "evaluation" / "values.npz").write_bytes(b"PK\x03\x04 torn")
    files = read_run_files(directory)
    assert files.values == {} and any("values.npz" in problem for problem in files.problems)


def validations(directory: Path, steps: list[int]) -> None:
    rows = []
    for step in steps:
        length = 3.0 - 2.0 * (8 * step) ** -0.25
        rows.append({"step": step, "num_samples": 32, "acceptance_length_proxy": length}
                    | {f"acceptance_rate@{k}": 0.5 for k in range(1, LENGTH + 1)})
    (directory / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_learning_curve_with_its_prediction(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    validations(directory, [10, 20, 40, 80, 120])
    files = read_run_files(directory)
    lines = learning_lines(files)
    assert len(lines) == 3 and "960 samples" in lines[0] and "9600 samples" in lines[2]
    assert f"would give {3.0 - 2.0 * 9600 ** -0.25:.2f} tokens" in lines[2] and "speed-up" in lines[2]
    text = " ".join(check(build_report(files)).text)
    assert "Power law through 5 validations" in text
    validations(directory, [10, 20, 40])
    few = read_run_files(directory)
    assert learning_lines(few) == []
    assert "at least 4 validations" in " ".join(check(build_report(few)).text)
