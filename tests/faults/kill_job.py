"""Tiny training runs that are killed: a server that has imported everything once and forks a child for each attempt.

Reads one JSON object a line: ``run_dir``, ``trainer`` (options), and what is to happen to the child: ``seconds`` after
its first step, or ``hook`` and ``count`` (at that call of a function), or ``signal`` and ``step``. Answers with one
line: how the child ended. Nothing here starts a thread or a process group before the fork.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "unit" / "training")]

import deepspeed  # noqa: E402, F401
import torch  # noqa: E402
from tiny_training import SHAPE, TinySource, tiny_config, tiny_trainer  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.errors import UserError  # noqa: E402
from deepspec.tracking import Tracker  # noqa: E402
from deepspec.training import saving, signals, trainer, validate  # noqa: E402
from deepspec.training.validate import make_validator  # noqa: E402


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(count: int, real: Callable, act: Callable = die) -> Callable:
    """``real``, whose ``count``-th call (after the work of an odd one, before that of an even one) is the last."""
    left = [count]

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and count % 2 == 0:
            act(*arguments)
        result = real(*arguments, **keywords)
        if left[0] == 0:
            act(*arguments)
        return result

    return wrapped


def half_file(tensors: Any, path: Path, *_: object) -> None:
    """What a crash in the middle of a write leaves, then the crash."""
    whole = path.read_bytes() if path.exists() else bytes(2000)
    path.write_bytes(whole[:len(whole) // 2])
    die()


def install(hook: str, count: int) -> None:
    """Make one function fatal at its ``count``-th call."""
    if hook == "half_file":
        saving.save_file = dies_at(count, saving.save_file, half_file)
    elif hook == "validate":
        validate.Validator._measure = dies_at(count, validate.Validator._measure)
    elif hook == "row":
        trainer.DrafterTrainer._log = dies_at(count, trainer.DrafterTrainer._log)
    elif hook == "append":
        trainer.MetricsFile.append = dies_at(count, trainer.MetricsFile.append)
    else:
        setattr(os, hook, dies_at(count, getattr(os, hook)))


def slow_saves(seconds: float) -> None:
    """Half of each file, then a long wait before the rest."""
    real = saving.save_file

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        time.sleep(seconds)
        real(tensors, path, metadata=metadata)

    saving.save_file = save_file


class Eventful(TinySource):
    """Tells when the first training sample is read; sends signals to this process, or limits files, at later reads."""

    def __init__(self, job: dict[str, Any], started: Callable[[], None]) -> None:
        super().__init__(poison={7: float("nan")})
        self.job, self.started, self.reads = job, started, 0

    def get(self, indices):
        self.reads += 1
        if self.reads == 1:
            self.started()
        if self.reads == self.job.get("signal_at"):
            os.kill(os.getpid(), self.job["signal"])
        if self.reads == self.job.get("full_at"):  # every file larger than this fails, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.job["bytes"], resource.RLIM_INFINITY))
        return super().get(indices)


def train(job: dict[str, Any], started: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One attempt of the run; the outcome as a plain dictionary."""
    run_dir = Path(job["run_dir"])
    config = tiny_config(run_dir, **job.get("trainer", {}))
    config.engine.zero_stage = job.get("stage", 0)
    if "hook" in job:
        install(job["hook"], job["count"])
    if "slow" in job:
        slow_saves(job["slow"])
    runner = tiny_trainer(run_dir, config=config, source=Eventful(job, started))
    measure = make_validator(TinySource(6, seed=8), SHAPE, config.trainer, config.objective, seed=5, run_dir=run_dir,
                             tracker=Tracker())
    # Up and down, so that there are several bests and the last one is neither the first nor the last checkpoint.
    runner.validate = lambda engine, step, *averaged: measure(engine, step, *averaged) - abs(step - 29)
    try:
        result = runner.run()
    except UserError as error:
        return {"error": str(error)}
    return {"step": result.step, "stopped": result.stopped, "trained": result.trained}


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for ``job``, kill it if that is asked for, and say how it ended."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        os.setpgid(0, 0)
        try:
            with open(job["log"], "a") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
                outcome = train(job, lambda: os.write(told, b"\n"))
                os.write(told, json.dumps(outcome).encode())
        finally:
            os._exit(0)
    os.close(told)
    with open(heard, "rb") as pipe:
        text = pipe.readline().strip().decode()  # empty: the first sample is being read; else nothing was to be done
        if "seconds" in job:
            time.sleep(job["seconds"])
            os.kill(child, signal.SIGKILL)
        elif "kill_when" in job:
            while not list(Path(job["run_dir"]).glob(job["kill_when"])):
                time.sleep(0.01)
            os.kill(child, signal.SIGKILL)
        text += pipe.read().decode()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed} | (json.loads(text) if text.startswith("{") else {})


def serve() -> None:
    """Answer jobs until the input ends."""
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        out.write(json.dumps(attempt(json.loads(line))) + "\n")
        out.flush()


def launched(jobs: list[dict[str, Any]]) -> None:
    """Under the deepspeed launcher: one run after the other; each rank leaves its process id and its outcome."""
    torch.set_num_threads(1)
    signals.watch_launcher(0.2)
    for job in jobs:
        run_dir = Path(job["run_dir"])
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / f"pid-{distributed.rank()}").write_text(str(os.getpid()))
        outcome = train(job)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (run_dir / f"outcome-{distributed.rank()}.json").write_text(json.dumps(outcome))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    arguments = [item for item in sys.argv[1:] if not item.startswith("--local_rank")]
    launched(json.loads(arguments[0])) if arguments else serve()
