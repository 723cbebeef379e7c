"""The main job as users start it: two ranks under the launcher from prompts to report, once more, and in pieces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.export.load import load_exported
from deepspec.stages.tracked import JOB_TYPES
from deepspec.tracking import run_id
from tests.conftest import ROOT, script

pytestmark = pytest.mark.slow
SMALL = (
    "data.max_prompts=60", "data.min_held_out=6", "responses.max_tokens=40", "trainer.epochs=2",
    "trainer.num_anchors=12", "confidence.max_new_tokens=40", "evaluate.max_new_tokens=24", "evaluate.bootstrap=200",
    "profile.seconds_limit=4", "run.seed=11", "run.threads=1",  # a profile of other threads is another profile
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """One finished run of the tiny experiment on two ranks."""
    directory = tmp_path_factory.mktemp("main") / "run"
    result = script("train_drafter", "+experiment=tiny", f"run.dir={directory}", f"run.data_root={data_root}", *SMALL,
                    ranks=2, timeout=1500, WANDB_MODE="offline")
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return directory


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_stage_is_recorded_complete(run: Path) -> None:
    stages = read(run / "manifest.json")["stages"]
    assert [name for name, record in stages.items() if record["status"] != "complete"] == []
    assert len(stages) == 10


def test_metrics_have_every_field(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    wanted = {"step", "epoch", "samples", "loss", "loss_ce", "loss_tv", "loss_confidence", "acceptance_length_proxy",
              "lr", "grad_norm", "skipped_steps", "seconds", "tokens_per_second", "peak_memory_bytes"}
    wanted |= {f"acceptance_rate@{k}" for k in range(1, 8)}
    assert all(wanted <= set(row) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_calibration_has_every_field(run: Path) -> None:
    calibration = read(run / "calibration.json")
    assert calibration["block_size"] == 7
    assert len(calibration["temperatures"]) == len(calibration["ece_after"]) == len(calibration["auc"]) == 7
    assert calibration["temperatures"] == calibration["sts_temperatures"]
    assert {"drafter_sha256", "ece_noise_floor", "brier_before", "num_samples", "num_bins", "domains", "fit_split",
            "report_split"} <= set(calibration)


def test_evaluation_has_every_field_and_finite_lengths(run: Path) -> None:
    evaluation = read(run / "evaluation.json")
    assert {"drafter", "algorithm", "block_size", "settings", "macro"} <= set(evaluation)
    setting = next(value for value in evaluation["settings"].values()
                   if value["decoding"] == "fixed" and value["mode"] == "sampled")
    for benchmark in setting["benchmarks"].values():
        assert {"domain", "num_prompts", "rounds", "drafted", "accepted", "acceptance_length", "acceptance_length_ci95",
                "accepted_per_position", "conditional_acceptance", "tokens_per_second", "target_only_tokens_per_second",
                "speedup"} <= set(benchmark)
        assert 1.0 <= benchmark["acceptance_length"] <= 8.0
        low, high = benchmark["acceptance_length_ci95"]
        assert low <= benchmark["acceptance_length"] <= high


def test_computed_acceptance_agrees_with_counted(run: Path) -> None:
    settings = read(run / "evaluation.json")["settings"].values()
    counted, computed = (next(value["macro"] for value in settings if value["decoding"] == "fixed"
                              and value["mode"] == mode and value.get("drafter") != "untrained")
                         for mode in ("sampled", "analytic"))
    low, high = counted["acceptance_length_ci95"]
    assert abs(computed["acceptance_length"] - counted["acceptance_length"]) < high - low  # four standard errors
    assert read(run / "evaluation" / "manifest.json")["status"] == "complete"


def test_profile_is_what_sglang_reads(run: Path) -> None:
    text = (run / "profile" / "sps.json").read_text()
    table = json.loads(text)
    assert "bias_seconds" not in text
    assert table["sample_batch_tokens"] == sorted(set(table["sample_batch_tokens"]))
    assert len(table["sample_batch_tokens"]) == len(table["sample_steps_per_sec"])
    assert table["max_batch_tokens"] >= table["sample_batch_tokens"][-1]
    cell = json.loads((run / "profile" / "records.jsonl").read_text().splitlines()[0])
    assert {"num_reqs", "verify_tokens", "kv_len", "n", "p10_ms", "p50_ms", "p90_ms", "draft_ms", "verify_ms",
            "host_ms"} <= set(cell)


def test_export_loads_and_report_is_one_page(run: Path) -> None:
    drafter, shared = load_exported(run / "export")
    assert drafter.shape.block_size == 7 and shared.embed.shape == shared.lm_head.shape
    config = read(run / "export" / "config.json")
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["sample_from_anchor"] is True
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page and "src=" not in page and page.count("<script") == 1


def test_one_run_directory_for_all_ranks_and_one_wandb_run_a_stage(run: Path) -> None:
    assert (run / ".hydra" / "config.yaml").is_file()
    assert [path.name for path in run.glob("*.log")] == ["train_drafter.log"]
    started = [path.name.rpartition("-")[2] for path in run.rglob("offline-run-*") if path.is_dir()]
    assert sorted(started) == sorted(run_id(run, job_type) for job_type in (*JOB_TYPES.values(), "train_drafter"))


def test_the_same_command_again_finds_everything_up_to_date(run: Path, data_root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    result = script("train_drafter", "+experiment=tiny", f"run.dir={run}", f"run.data_root={data_root}", *SMALL)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("up to date") >= 9, result.stdout
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}


def test_a_stage_script_takes_its_options_from_the_run(run: Path) -> None:
    result = script("calibrate", f"run.dir={run}", "calibration.num_bins=10")
    assert result.returncode == 0, result.stderr[-3000:]
    assert read(run / "calibration.json")["num_bins"] == 10


@pytest.mark.parametrize("starter", [
    [sys.executable], ["torchrun", "--standalone", "--nproc-per-node=1"], ["deepspeed", "--num_accelerators", "1"],
], ids=["python", "torchrun", "deepspeed"])
def test_plans_without_weights_under_every_starter(starter: list[str]) -> None:
    command = [starter[0] if starter[0] == sys.executable else str(Path(sys.executable).with_name(starter[0]))]
    command += [*starter[1:], "launch/train_drafter.py", "+experiment=qwen3_8b", "plan=true"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr[-3000:]
    assert "1,126,422,017" in result.stdout and "ZeRO" in result.stdout
