"""The train stage on the tiny target of the unit tests, as the main job runs it, on as many ranks as asked for.

Every argument is a job in JSON; under the deepspeed launcher this process is one rank of it. ``--fork`` as the first
argument makes the ranks of each job here, one job after the other, which costs one start instead of many: the output
of rank R is in ``RUN/rank-R.log`` and the exit codes are in ``RUN/codes.json``.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
UNIT = HERE.parents[1] / "unit"
sys.path[:0] = [str(HERE.parents[2]), str(UNIT / "training"), str(UNIT / "targets")]

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch  # noqa: E402
from test_training_stage import make_config  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.cli.job import _run  # noqa: E402
from deepspec.cli.scripts import Script  # noqa: E402
from deepspec.config.schema import Config  # noqa: E402
from deepspec.data.stream_server import FeatureServer  # noqa: E402
from deepspec.training.trainer import DrafterTrainer  # noqa: E402

PATIENCE = 90.0


def config_of(job: dict[str, Any]) -> Config:
    """``root`` and ``run`` are folders; ``features``, ``trainer`` and ``engine`` override options."""
    config = make_config(Path(job["root"]), job["run"], **job.get("trainer", {}))
    config.target.ranks = job.get("targets", 0)
    for part in ("features", "engine"):
        for key, value in job.get(part, {}).items():
            setattr(getattr(config, part), key, value)
    return config


def fault(signal_number: int, rank: int, after: int, run: Path) -> None:
    """Send this process a signal once ``after`` steps are done, or on a target rank once ``after`` packs are answered
    and there is a checkpoint: how far ahead of the trainers it answers depends on the machine."""
    sent = []

    def due(ready: bool, mine: int) -> None:
        if ready and mine == rank and not sent:
            sent.append(signal_number)
            os.kill(os.getpid(), signal_number)

    step, answer = DrafterTrainer._optimizer_step, FeatureServer._answer

    def stepping(self, loaded, requests):
        due(self.step == after, distributed.rank())
        return step(self, loaded, requests)

    def answering(self, request):
        due(self.packs >= after and (run / "checkpoints" / "latest").is_file(), distributed.rank())
        return answer(self, request)

    DrafterTrainer._optimizer_step = stepping  # type: ignore[method-assign]
    FeatureServer._answer = answering  # type: ignore[method-assign]


def run(job: dict[str, Any]) -> None:
    """One rank of a job; ends as the main job does."""
    if "fault" in job:
        fault(*job["fault"], Path(job["root"]) / job["run"])
    _run(config_of(job), [], Script("Trains.", "", (), ("train",)))


def forked(job: dict[str, Any]) -> None:
    """All ranks of a job, each a child of this process. Codes of the ranks that ended in time, else null."""
    folder = Path(job["root"]) / job["run"]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port()),
                   "WORLD_SIZE": str(job["ranks"])}
    children = {}
    for rank in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run(job)
            except SystemExit as ended:
                sys.stderr.flush()
                os._exit(ended.code or 0)
            os._exit(0)
        children[rank] = child
    codes: dict[int, Any] = dict.fromkeys(children)
    end = time.monotonic() + job.get("patience", PATIENCE)
    while None in codes.values() and time.monotonic() < end:
        for rank, child in children.items():
            ended, status = os.waitpid(child, os.WNOHANG) if codes[rank] is None else (0, 0)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for rank in (rank for rank, code in codes.items() if code is None):
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    (folder / "codes.json").write_text(json.dumps(codes))


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    jobs = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    if jobs[0] == "--fork":
        for job in jobs[1:]:
            forked(json.loads(job))
    else:
        run(json.loads(jobs[0]))


if __name__ == "__main__":
    main()
