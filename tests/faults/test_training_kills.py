"""Training killed at any moment continues as if nothing had happened, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any, Iterator

import pytest

from deepspec.distributed import free_port
from deepspec.training import checkpoint

JOB = Path(__file__).with_name("kill_job.py")
KILLS = 20
OPTIONS = {"max_steps": 60, "save_every": 3, "validate_every": 4, "keep_last": 2, "ema_decay": 0.9,
           "micro_batch_size": 2, "max_bad_steps": 3, "validation_samples": 3}
# Calls of one attempt up to which a function may be fatal: a few saves' worth, so that attempts get somewhere.
LIMITS = {"fsync": 24, "replace": 16, "rename": 6, "unlink": 24, "rmdir": 8, "append": 8, "half_file": 7, "validate": 4,
          "row": 8}
pytestmark = pytest.mark.slow


def environ() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return clean | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Server:
    """The process that forks the attempts."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen([sys.executable, str(JOB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=open(log, "a"), text=True, env=environ())

    def __call__(self, run_dir: Path, **job: Any) -> dict[str, Any]:
        job = {"trainer": OPTIONS, "log": str(self.log)} | job | {"run_dir": str(run_dir)}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-3000:]
        return json.loads(answer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("kills") / "log")
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(30) == 0


@pytest.fixture(scope="module")
def whole(run: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    assert run(directory) == {"killed": False, "step": 60, "stopped": False, "trained": True}
    assert checkpoint.complete_tags(directory) == ["step-28", "step-57", "step-60"]
    assert checkpoint.best(directory).name == "step-28"
    return directory


TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "wait_share", "forward_share", "backward_share",
         "optimizer_share")


def content(run_dir: Path) -> dict[str, Any]:
    """Every file under ``run_dir`` without what tells the time or names the folder."""
    found: dict[str, Any] = {}
    for path in sorted(run_dir.rglob("*")):
        name = str(path.relative_to(run_dir))
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
        elif path.name == "manifest.json":
            found[name] = json.loads(path.read_text())["files"]
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def assert_same(run_dir: Path, other: Path) -> None:
    one, two = content(run_dir), content(other)
    assert one.keys() == two.keys()
    assert not [name for name in one if one[name] != two[name]]


def assert_loadable(run_dir: Path) -> None:
    """What a reader sees right after a kill."""
    for name in ("latest", "best"):
        if (run_dir / "checkpoints" / name).is_file():
            found = getattr(checkpoint, name)(run_dir)
            assert len(checkpoint.load_tensors(found)) == 4 and checkpoint.read_state(found).step > 0
    for tag in checkpoint.complete_tags(run_dir):
        assert checkpoint.load_tensors(run_dir / "checkpoints" / tag)


def plans(seed: int) -> Iterator[dict[str, Any]]:
    """What ends each attempt: in turn a moment in time and a call of each function that saving goes through."""
    generator = random.Random(seed)
    hooks = list(LIMITS)
    while True:
        generator.shuffle(hooks)
        for hook in hooks:
            yield {"hook": hook, "count": generator.randint(1, LIMITS[hook])}
            if generator.random() < 0.5:
                yield {"seconds": generator.uniform(0.0, 0.6)}


@pytest.mark.parametrize("seed,options", [(0, {}), (1, {"async_save": False})])
def test_twenty_kills_change_nothing(run: Server, whole: Path, tmp_path: Path, seed: int, options: dict) -> None:
    kills, rounds, steps = 0, 0, set()
    trainer = OPTIONS | options
    directory = tmp_path / "0"
    for plan in islice(plans(seed), 20 * KILLS):
        outcome = run(directory, trainer=trainer, **plan)
        kills += outcome["killed"]
        if outcome["killed"]:
            assert_loadable(directory)
            found = checkpoint.find_latest(directory)
            steps.add(found.name if found is not None else "none")
        if kills == KILLS:
            break
        if outcome.get("step") == OPTIONS["max_steps"]:  # it got to the end: the rest of the kills hit another run
            assert_same(directory, whole)
            rounds += 1
            directory = tmp_path / str(rounds)
    assert kills == KILLS
    assert run(directory, trainer=trainer)["step"] == OPTIONS["max_steps"]
    assert_same(directory, whole)
    assert len(steps) > 5, steps


def test_killed_in_a_slow_save_after_sigterm(run: Server, whole: Path, tmp_path: Path) -> None:
    """The launcher gives 30 s; a save that takes longer costs its own steps and not the checkpoint before."""
    assert run(tmp_path, signal=signal.SIGTERM, signal_at=30)["stopped"]
    before = checkpoint.latest(tmp_path)
    kept = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    outcome = run(tmp_path, signal=signal.SIGTERM, signal_at=18, slow=60.0,
                  kill_when="checkpoints/.step-*/drafter/model.safetensors")
    assert outcome == {"killed": True}
    assert checkpoint.latest(tmp_path) == before and all(path.read_bytes() == data for path, data in kept.items())
    assert_loadable(tmp_path)
    assert run(tmp_path)["step"] == 60
    assert rows_and_last(tmp_path) == rows_and_last(whole)


def rows_and_last(run_dir: Path) -> dict[str, Any]:
    """Without which checkpoints there are: a stop makes one where no save was due."""
    return {name: data for name, data in content(run_dir).items()
            if name.endswith(".jsonl") or name.startswith("checkpoints/step-60/")}


@pytest.mark.parametrize("flag", [True, False])
def test_a_full_disk_costs_the_steps_since_the_last_checkpoint(run: Server, whole: Path, tmp_path: Path,
                                                               flag: bool) -> None:
    trainer = OPTIONS | {"async_save": flag}
    outcome = run(tmp_path, trainer=trainer, full_at=50, bytes=40960)
    assert "Could not save" in outcome["error"] and "previous checkpoint is intact" in outcome["error"]
    assert "trying once more" in run.log.read_text()
    assert checkpoint.latest(tmp_path).name not in outcome["error"]
    assert_loadable(tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert run(tmp_path, trainer=trainer)["step"] == 60
    assert_same(tmp_path, whole)


def test_a_full_disk_where_metrics_go(run: Server, whole: Path, tmp_path: Path) -> None:
    outcome = run(tmp_path, full_at=50, bytes=256)
    assert "Could not write to" in outcome["error"] and "metrics.jsonl" in outcome["error"]
    assert run(tmp_path)["step"] == 60
    assert_same(tmp_path, whole)


def test_sigusr1_saves_and_goes_on(run: Server, whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path, signal=signal.SIGUSR1, signal_at=34)["step"] == 60
    assert_same(tmp_path, whole)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Any, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def launch(log: Path, *jobs: dict[str, Any]) -> subprocess.Popen:
    """Two ranks under the real launcher."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", str(free_port()), str(JOB),
               json.dumps(jobs)]
    return subprocess.Popen(command, env=environ(), stdout=open(log, "a"), stderr=subprocess.STDOUT)


def outcomes(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((run_dir / f"outcome-{rank}.json").read_text()) for rank in (0, 1)]


def test_sigterm_to_the_launcher_alone_saves_and_ends_the_ranks(tmp_path: Path) -> None:
    """The outer process dies at once and tells nobody; the ranks notice, save and go."""
    options = OPTIONS | {"max_steps": 100000, "log_every": 1, "validate_every": 0, "save_every": 0}
    directory = tmp_path / "run"
    outer = launch(tmp_path / "log", {"run_dir": str(directory), "stage": 1, "trainer": options})
    try:
        until(lambda: (directory / "metrics.jsonl").is_file() and len(
            (directory / "metrics.jsonl").read_text().splitlines()) > 3)
        pids = [int((directory / f"pid-{rank}").read_text()) for rank in (0, 1)]
        assert all(map(alive, pids)) and not (directory / "checkpoints").exists()
        outer.send_signal(signal.SIGTERM)
        outer.wait(10)
        until(lambda: not any(map(alive, pids)))
    finally:
        outer.kill()
    one, two = outcomes(directory)
    assert one == two and one["stopped"] and checkpoint.latest(directory).name == f"step-{one['step']}"
    assert "launcher is gone" in (tmp_path / "log").read_text()


def test_two_ranks_average_keep_the_best_and_fail_together(run: Server, tmp_path: Path) -> None:
    options = OPTIONS | {"max_steps": 12, "validation_samples": 4}
    assert run(tmp_path / "one", trainer=options)["step"] == 12
    jobs: list[dict[str, Any]] = [
        {"run_dir": str(tmp_path / f"two-{stage}"), "stage": stage, "trainer": options} for stage in (0, 1, 2, 3)]
    # A stop on every rank, and the rest of the run at another stage.
    jobs += [{"run_dir": str(tmp_path / "parts"), "stage": stage, "trainer": options} | more
             for stage, more in ((1, {"signal": signal.SIGTERM, "signal_at": 12}), (3, {}))]
    jobs += [{"run_dir": str(tmp_path / "full"), "stage": 2, "trainer": options, "full_at": 20, "bytes": 40960}]
    process = launch(tmp_path / "log", *jobs)
    try:
        assert process.wait(150) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
    one = checkpoint.load_tensors(checkpoint.latest(tmp_path / "one"))
    for name in ("two-0", "two-1", "two-2", "two-3", "parts"):
        found = checkpoint.load_tensors(checkpoint.latest(tmp_path / name))
        for key, tensor in one["ema"].items():
            assert tensor.allclose(found["ema"][key], atol=2e-4), (name, key)
        assert checkpoint.best(tmp_path / name).name == checkpoint.best(tmp_path / "one").name
        assert checkpoint.complete_tags(tmp_path / name)[-1] == "step-12"
        assert outcomes(tmp_path / name) == [{"step": 12, "stopped": False, "trained": True}] * 2
    left, right = outcomes(tmp_path / "full")
    assert left == right and "Could not save" in left["error"]
    assert_loadable(tmp_path / "full")
