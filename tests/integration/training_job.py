"""Runs under the deepspeed launcher: the tiny drafter of the unit tests, one or more jobs named on the command line.

A job is ``kind:stage:run_dir[:key=value,...]``; results are JSON files in the run directory, written by rank 0.
"""

import json
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "unit" / "training")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_training import SHAPE, TinySource, tiny_config, tiny_drafter, tiny_trainer  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.errors import UserError  # noqa: E402
from deepspec.tracking import Tracker  # noqa: E402
from deepspec.training.engine import initialize, named_trainable  # noqa: E402
from deepspec.training.module import TrainingModule  # noqa: E402
from deepspec.training.packs import Packer  # noqa: E402
from deepspec.training.step import accumulate, prime, total_weights  # noqa: E402
from deepspec.training.validate import make_validator  # noqa: E402


class DyingSource(TinySource):
    """``kill`` reads on rank 1 it kills itself; ``term`` reads on rank 1 it asks itself to stop."""

    def __init__(self, kill: int = 0, term: int = 0, **options) -> None:
        super().__init__(**options)
        self.left = {signal.SIGKILL: kill, signal.SIGTERM: term}

    def get(self, indices):
        for number in self.left:
            self.left[number] -= 1
            if self.left[number] == 0 and distributed.rank() == 1:
                os.kill(os.getpid(), number)
        return super().get(indices)


def config_of(run_dir: Path, stage: int, options: dict):
    source_keys = {"kill", "term", "count", "poison", "unsupervised"}
    config = tiny_config(run_dir, **{k: v for k, v in options.items() if k not in source_keys})
    config.engine.zero_stage = stage
    source = {k: v for k, v in options.items() if k in source_keys}
    if "poison" in source:
        source["poison"] = {source["poison"]: float("nan")}
    return config, DyingSource(**source)


def gradient(run_dir: Path, stage: int, options: dict) -> None:
    """Gradient of one window (a tail: 7 samples, two of them without anchors) before the update."""
    from deepspeed.utils import safe_get_full_grad

    config, source = config_of(run_dir, stage, options)
    packer = Packer(source, SHAPE, config.trainer, config.objective, seed=config.run.seed)
    module = TrainingModule(tiny_drafter(), config.objective)
    engine = initialize(module, config.trainer, config.optimizer, config.engine)
    prime(engine, SHAPE)
    window = packer.window([0, 1, 4, 6, 7, 2, 3], 0)
    accumulate(engine, packer.packs(window), len(window.steps), total_weights(packer, window))
    gradients = {name: safe_get_full_grad(p).detach().clone().contiguous() for name, p in named_trainable(engine)}
    if distributed.rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_file(gradients, run_dir / "gradient.safetensors")


def train(run_dir: Path, stage: int, options: dict) -> None:
    """A whole run with validation on nine held-out samples."""
    config, source = config_of(run_dir, stage, options)
    trainer = tiny_trainer(run_dir, config=config, source=source)
    trainer.validate = make_validator(TinySource(9, seed=8), SHAPE, config.trainer, config.objective, seed=5,
                                      run_dir=run_dir, tracker=Tracker())
    try:
        result = trainer.run()
        outcome = {"step": result.step, "stopped": result.stopped, "trained": result.trained}
    except UserError as error:
        outcome = {"error": str(error)}
    if distributed.rank() == 0:
        (run_dir / "outcome.json").write_text(json.dumps(outcome))


def main() -> None:
    torch.set_num_threads(1)
    for job in (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")):
        kind, stage, run_dir, *rest = job.split(":")
        options = dict(item.split("=") for item in rest[0].split(",")) if rest else {}
        parsed = {key: json.loads(value) for key, value in options.items() if key not in ("precision", "unsupervised")}
        parsed |= {key: options[key] for key in ("precision",) if key in options}
        if "unsupervised" in options:
            parsed["unsupervised"] = tuple(int(index) for index in options["unsupervised"].split("+"))
        {"gradient": gradient, "train": train}[kind](Path(run_dir), int(stage), parsed)
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main()
