"""Hidden states from target ranks and from the first epoch: the losses of the online path, and what happens when a rank
is killed, hangs or is asked to stop. All ranks are real processes; some jobs run under the deepspeed launcher."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "stage_job.py"
sys.path[:0] = [str(HERE.parents[0] / "unit" / part) for part in ("training", "targets")]

from test_training_stage import make_config  # noqa: E402
from tiny_targets import random_ids, save_tiny  # noqa: E402

from deepspec.artifacts import begin, complete, is_complete  # noqa: E402
from deepspec.config.paths import features_dir, responses_dir  # noqa: E402
from deepspec.data.feature_shards import read_shard, shard_names, shard_problem  # noqa: E402
from deepspec.distributed import free_port  # noqa: E402
from deepspec.training import checkpoint  # noqa: E402

pytestmark = pytest.mark.slow
TRAIN, HELD_OUT, STEPS = 18, 6, 6
PACKED = {"pack_tokens": 80}


def job(root: Path, run: str, ranks: int, mode: str, *, targets: int = 0, **more: Any) -> str:
    trainer = {"max_steps": STEPS, "validate_every": 3, "save_every": 2, "global_batch_size": 4}
    features = {"mode": mode, "queue_timeout": 20.0, "shard_megabytes": 0.01} | more.pop("features", {})
    return json.dumps({"root": str(root), "run": run, "ranks": ranks, "targets": targets, "features": features,
                       "trainer": trainer | more.pop("trainer", {}), **more})


def environ() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return clean | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def fork(*jobs: str) -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--fork", *jobs], env=environ(), check=True, timeout=570)


def launch(one: str, ranks: int) -> tuple[int, str]:
    """Exit code and output under the deepspeed launcher."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [sys.executable, str(launcher), "--num_accelerators", str(ranks), "--master_port", str(free_port()),
               str(SCRIPT), one]
    result = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout + result.stderr


def rows(root: Path, run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / run / name).read_text().splitlines()]


def losses(root: Path, run: str) -> list[float]:
    return [row["loss"] for row in rows(root, run)]


def codes(root: Path, run: str) -> list[int]:
    return list(json.loads((root / run / "codes.json").read_text()).values())


def log(root: Path, run: str, rank: int) -> str:
    return (root / run / f"rank-{rank}.log").read_text()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The jobs that need no launcher of their own."""
    root = tmp_path_factory.mktemp("modes")
    save_tiny(root / "target")
    directory = responses_dir(make_config(root))
    manifest = begin(directory, "responses", "fingerprint")
    with open(directory / "responses.jsonl", "w") as handle:
        for index in range(TRAIN + HELD_OUT):
            ids = random_ids(20 + 7 * (index % 5), seed=index).tolist()
            turn = {"prompt_ids": ids[:8], "response_ids": ids[8:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": ("math", "chat")[index % 2], "messages": [],
                                     "split": "held_out" if index >= TRAIN else "train", "turns": [turn]}) + "\n")
    complete(directory, manifest, ["responses.jsonl"])
    epochs = {"max_steps": None, "epochs": 2}
    fork(
        job(root, "online", 2, "online"), job(root, "online-packed", 2, "online", trainer=PACKED),
        job(root, "online-bf16", 1, "online", trainer={"precision": "bf16"}, engine={"zero_stage": 2}),
        job(root, "packed", 4, "disaggregated", targets=2, trainer=PACKED),
        job(root, "bf16", 2, "disaggregated", targets=1, trainer={"precision": "bf16"}, engine={"zero_stage": 2},
            features={"queue_depth": 1}),
        job(root, "target-killed", 3, "disaggregated", targets=1, fault=[signal.SIGKILL, 2, 1]),
        job(root, "trainer-killed", 3, "disaggregated", targets=1, fault=[signal.SIGKILL, 1, 3]),
        job(root, "hybrid", 2, "hybrid", trainer=epochs | PACKED, fault=[signal.SIGKILL, 1, 3]),
    )
    stored = shard_names(features_dir(make_config(root)))
    (root / "stored.json").write_text(json.dumps(stored))
    fork(
        job(root, "target-killed", 2, "disaggregated", targets=1),
        job(root, "hybrid", 3, "hybrid", trainer=epochs | PACKED),
        job(root, "cached", 2, "cached", trainer=epochs | PACKED),
    )
    return root


def test_losses_and_validation_are_those_of_the_online_path(root):
    """Bit for bit: the same forward, and bytes in between."""
    assert codes(root, "packed") == [0] * 4 and codes(root, "bf16") == [0, 0]
    assert losses(root, "packed") == losses(root, "online-packed")
    assert losses(root, "bf16") == losses(root, "online-bf16")
    assert rows(root, "packed", "validation.jsonl") == rows(root, "online-packed", "validation.jsonl")
    assert len(rows(root, "bf16", "validation.jsonl")) == 2
    assert all(0.0 <= row["wait_share"] <= 1.0 for row in rows(root, "packed"))


def test_target_ranks_say_what_they_served_and_end(root):
    served = [log(root, "packed", rank) for rank in (2, 3)]
    assert all("packs with" in text and "trainers are done" in text for text in served)
    assert "optimizer" not in served[0]


def test_trainers_end_with_one_paragraph_when_a_target_rank_is_killed(root):
    first = log(root, "target-killed", 0)  # of the second job in this folder
    assert "resuming from" in first and codes(root, "target-killed") == [0, 0]
    assert losses(root, "target-killed") == pytest.approx(losses(root, "online"), abs=1e-6)


def test_target_rank_ends_when_a_trainer_is_killed(root):
    assert codes(root, "trainer-killed") == [1, -signal.SIGKILL, 1]
    assert "Trainer rank 1 has ended" in log(root, "trainer-killed", 2)
    found = checkpoint.find_latest(root / "trainer-killed")
    assert checkpoint.read_state(found).step == 3
    checkpoint.require_unchanged(found)


def test_first_epoch_fills_the_store_whatever_kills_it(root):
    """Killed with two ranks, continued with three: nothing twice, nothing lost, and the losses of the cached path."""
    directory = features_dir(make_config(root))
    assert is_complete(directory) and codes(root, "hybrid") == [0] * 3
    kept = set(json.loads((root / "stored.json").read_text()))
    assert kept and kept <= set(shard_names(directory)), "finished shards outlive a kill"
    ids = [row["sample_id"] for name in shard_names(directory) for row in read_shard(directory, name)["records"]]
    assert sorted(ids) == sorted(f"p{index}" for index in range(TRAIN + HELD_OUT))
    assert not [name for name in shard_names(directory) if shard_problem(directory, name)]
    assert [row["epoch"] for row in rows(root, "hybrid")] == [0] * 5 + [1] * 5
    assert losses(root, "hybrid") == pytest.approx(losses(root, "cached"), abs=1e-6)


def test_under_the_launcher(root):
    """2+1 ranks: the whole run; then a stop asked of the target rank alone, and 1+1 ranks that go on from there."""
    code, output = launch(job(root, "launched", 3, "disaggregated", targets=1), 3)
    assert code == 0, output[-4000:]
    assert losses(root, "launched") == losses(root, "online")
    code, output = launch(job(root, "stopped", 3, "disaggregated", targets=1, fault=[signal.SIGTERM, 2, 1]), 3)
    assert code == 0 and "stopped by a signal" in output, output[-4000:]
    assert 0 < checkpoint.read_state(checkpoint.find_latest(root / "stopped")).step < STEPS
    code, output = launch(job(root, "stopped", 2, "disaggregated", targets=1), 2)
    assert code == 0, output[-4000:]
    assert losses(root, "stopped") == pytest.approx(losses(root, "online"), abs=1e-6)


def test_failures_under_the_launcher(root):
    code, output = launch(job(root, "lost", 2, "disaggregated", targets=1, fault=[signal.SIGKILL, 1, 1]), 2)
    assert code != 0 and "UserError: Target rank 1" in output and "Traceback" not in output, output[-4000:]
    checkpoint.require_unchanged(checkpoint.find_latest(root / "lost"))
    code, output = launch(job(root, "lost", 1, "disaggregated", targets=1), 1)
    assert code == 2 and "leave none to train" in output, output[-4000:]


def test_a_target_rank_that_hangs(root):
    fork(job(root, "hanging", 2, "disaggregated", targets=1, patience=40,
             features={"queue_timeout": 4.0}, fault=[signal.SIGSTOP, 1, 1]))
    assert codes(root, "hanging") == [1, None]
    assert "has not answered for 4 s (features.queue_timeout)" in log(root, "hanging", 0)
    checkpoint.require_unchanged(checkpoint.find_latest(root / "hanging"))
