"""Training under the real launcher: two ranks have the gradients, losses and checkpoints of one, at all stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspec.distributed import free_port

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "training_job.py"
STAGES = (0, 1, 2, 3)
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "grad_norm", "wait_share", "forward_share",
         "backward_share", "optimizer_share")
pytestmark = pytest.mark.slow


def environ() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return clean | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def launch(*jobs: str, ranks: int = 2, ok: bool = True) -> str:
    """Run jobs one after the other in one launch; one rank runs without the launcher."""
    command = [sys.executable, str(SCRIPT), *jobs]
    if ranks > 1:
        launcher = Path(sys.executable).with_name("deepspeed")
        command = [sys.executable, str(launcher), "--num_accelerators", str(ranks), "--master_port", str(free_port()),
                   str(SCRIPT), *jobs]
    result = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=570)
    output = result.stdout + result.stderr
    assert (result.returncode == 0) == ok, output[-5000:]
    return output


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES}
            for line in (run_dir / name).read_text().splitlines()]


def outcome(run_dir: Path) -> dict:
    return json.loads((run_dir / "outcome.json").read_text())


def model(run_dir: Path, step: int, name: str = "drafter/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{step}" / name)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """All first launches: one rank and two ranks, every stage, in two processes trees."""
    base = tmp_path_factory.mktemp("training")
    options = "global_batch_size=8,micro_batch_size=2,unsupervised=1+4"
    launch(f"gradient:0:{base}/g1:{options}", f"train:0:{base}/t1", f"train:0:{base}/tail1:count=10,max_steps=6",
           ranks=1)
    launch(
        *(f"gradient:{stage}:{base}/g2-{stage}:{options}" for stage in STAGES),
        *(f"train:{stage}:{base}/t2-{stage}" for stage in STAGES),
        *(f"train:{stage}:{base}/bf16-{stage}:precision=bf16" for stage in (1, 2, 3)),
        *(f"train:{stage}:{base}/tail2-{stage}:count=10,max_steps=6" for stage in (0, 3)),
        *(f"train:{stage}:{base}/bad-{stage}:poison=7,max_steps=6" for stage in STAGES),
        *(f"train:{stage}:{base}/parts-{stage}:term=7" for stage in (0, 1, 3)),
        *(f"train:{stage}:{base}/parts-{stage}" for stage in (0, 1, 3)),
        f"train:2:{base}/moved:term=7",
        f"train:1:{base}/few:count=1,max_steps=3",
    )
    return base


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_two_ranks_are_those_of_one(base, stage):
    one, two = load_file(base / "g1/gradient.safetensors"), load_file(base / f"g2-{stage}/gradient.safetensors")
    for name, gradient in one.items():
        assert float((two[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_validation_of_two_ranks_are_those_of_one(base, stage):
    for name in ("metrics.jsonl", "validation.jsonl"):
        one, two = rows(base / "t1", name), rows(base / f"t2-{stage}", name)
        assert len(one) == len(two) > 0
        for left, right in zip(one, two, strict=True):
            assert left.pop("domains", {}).keys() == right.pop("domains", {}).keys()
            assert left == pytest.approx(right, rel=1e-4, abs=1e-5)
    whole = rows(base / "t1")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, rows(base / f"t2-{stage}"))) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_exported_tensors_are_whole_and_equal(base, stage):
    one, two = model(base / "t1", 10), model(base / f"t2-{stage}", 10)
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in two.items()}
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_bf16_trains_like_fp32(base, stage):
    losses = [row["loss"] for row in rows(base / f"bf16-{stage}")]
    assert losses == pytest.approx([row["loss"] for row in rows(base / "t1")], rel=0.02)


@pytest.mark.parametrize("stage", (0, 3))
def test_tail_windows_end_and_count_every_sample(base, stage):
    assert [row["samples"] for row in rows(base / f"tail2-{stage}")] == [4, 8, 10, 14, 18, 20]
    assert [row["loss"] for row in rows(base / f"tail2-{stage}")] == pytest.approx(
        [row["loss"] for row in rows(base / "tail1")], abs=1e-5)


def test_fewer_samples_than_ranks(base):
    assert outcome(base / "few") == {"step": 3, "stopped": False, "trained": True}


@pytest.mark.parametrize("stage", STAGES)
def test_bad_sample_on_one_rank_skips_the_step_on_all(base, stage):
    found = rows(base / f"bad-{stage}")
    assert found[-1]["skipped_steps"] == 2 and len(found) == 6
    assert all(bool(torch.isfinite(value).all()) for value in model(base / f"bad-{stage}", 6).values())


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_stop_on_one_rank_and_resume_equals_an_uninterrupted_run(base, stage):
    assert outcome(base / f"parts-{stage}") == {"step": 10, "stopped": False, "trained": True}
    assert rows(base / f"parts-{stage}") == rows(base / f"t2-{stage}")
    for name in ("drafter/model.safetensors", "engine/optimizer.safetensors"):
        one, two = model(base / f"parts-{stage}", 10, name), model(base / f"t2-{stage}", 10, name)
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_resume_on_another_number_of_ranks(base):
    step = outcome(base / "moved")["step"]
    assert outcome(base / "moved")["stopped"] and 0 < step < 10
    launch(f"train:0:{base}/moved", ranks=1)
    assert outcome(base / "moved")["step"] == 10
    assert [row["loss"] for row in rows(base / "moved")] == pytest.approx(
        [row["loss"] for row in rows(base / "t1")], abs=1e-5)


def test_a_killed_rank_ends_the_job_and_the_run_continues_from_its_checkpoint(base):
    launch(f"train:1:{base}/killed:kill=9,save_every=2", ok=False)
    kept = sorted(path.name for path in (base / "killed/checkpoints").glob("step-*"))
    assert kept and kept[-1] != "step-10"
    launch(f"train:1:{base}/killed:save_every=2")
    assert outcome(base / "killed")["step"] == 10
    assert rows(base / "killed") == rows(base / "t2-1")
    one, two = model(base / "killed", 10), model(base / "t2-1", 10)
    assert all(torch.equal(one[name], two[name]) for name in one)
