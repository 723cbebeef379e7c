"""Runs under the deepspeed launcher: the tiny drafter of the unit tests, one or more jobs named on the command line.

A job is ``kind:stage:run_dir[:key=value,...]``; results are files in the run directory, written by rank 0. With
``--fork=N`` as the first argument the process becomes N ranks by itself, which costs one start instead of N.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
UNIT = HERE.parents[1] / "unit"
sys.path[:0] = [str(HERE.parents[2]), str(UNIT / "training"), str(UNIT / "decoding")]

import torch  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_training import SHAPE, V4_SHAPE, TinySource, tiny_config, tiny_drafter, tiny_trainer  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.errors import UserError  # noqa: E402
from deepspec.tracking import Tracker  # noqa: E402
from deepspec.training.engine import initialize, named_trainable  # noqa: E402
from deepspec.training.metrics import objective_row  # noqa: E402
from deepspec.training.module import TrainingModule  # noqa: E402
from deepspec.training.packs import Packer  # noqa: E402
from deepspec.training.step import accumulate, prime, total_weights  # noqa: E402
from deepspec.training.validate import make_validator  # noqa: E402

SOURCE = {"kill", "term", "count", "poison", "unsupervised", "sleep"}
SHAPES = {"head", "confidence_head"}
OBJECTIVE = {"confidence_weight"}
OTHER = {"offload", "window", "held_out", "spoil", "until", "v4"}
TAIL = (0, 1, 4, 6, 7, 2, 3)  # a window that no number of ranks divides


class DyingSource(TinySource):
    """After ``kill`` reads rank 1 kills itself, after ``term`` it asks itself to stop; a read takes ``sleep`` s."""

    def __init__(self, kill: int = 0, term: int = 0, sleep: float = 0.0, **options) -> None:
        super().__init__(**options)
        self.seconds = sleep
        self.left = {signal.SIGKILL: kill, signal.SIGTERM: term}

    def get(self, indices):
        time.sleep(self.seconds)
        for number in self.left:
            self.left[number] -= 1
            if self.left[number] == 0 and distributed.rank() == 1:
                os.kill(os.getpid(), number)
        return super().get(indices)


def config_of(run_dir: Path, stage: int, options: dict):
    """Configuration, source and drafter shape of a job."""
    own = SOURCE | SHAPES | OBJECTIVE | OTHER
    config = tiny_config(run_dir, **{k: v for k, v in options.items() if k not in own})
    config.engine.zero_stage = stage
    config.objective = replace(config.objective, **{k: v for k, v in options.items() if k in OBJECTIVE})
    if "offload" in options:
        config.engine.deepspeed = offload(options["offload"])
    shape = replace(V4_SHAPE if options.get("v4") else SHAPE, **{k: v for k, v in options.items() if k in SHAPES})
    if shape.head == "none":
        shape = replace(shape, markov_rank=0, confidence_with_markov=False)
    source = {k: v for k, v in options.items() if k in SOURCE}
    for name in ("poison", "unsupervised"):
        if isinstance(source.get(name), int):
            source[name] = (source[name],)
    if "poison" in source:
        source["poison"] = {index: float("nan") for index in source["poison"]}
    return config, DyingSource(**source), shape


def offload(name: str) -> dict[str, Any]:
    """What conf/engine/NAME.yaml gives DeepSpeed verbatim."""
    path = HERE.parents[2] / "conf" / "engine" / f"{name}.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["deepspeed"])


def gradient(run_dir: Path, stage: int, options: dict) -> None:
    """Gradient of one window before the update, and the row it would log."""
    from deepspeed.utils import safe_get_full_grad

    config, source, shape = config_of(run_dir, stage, options)
    packer = Packer(source, shape, config.trainer, config.objective, seed=config.run.seed)
    module = TrainingModule(tiny_drafter(shape), config.objective)
    engine = initialize(module, config.trainer, config.optimizer, config.engine)
    prime(engine, shape)
    indices = range(options["window"]) if isinstance(options.get("window"), int) else options.get("window", TAIL)
    window = packer.window(list(indices), 0)
    sums, _, _ = accumulate(engine, packer.packs(window), len(window.steps), total_weights(packer, window))
    values, _ = sums.reduce()
    gradients = {name: safe_get_full_grad(p).detach().clone().contiguous() for name, p in named_trainable(engine)}
    if distributed.rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_file(gradients, run_dir / "gradient.safetensors")
        (run_dir / "row.json").write_text(json.dumps(objective_row(values, config.objective)))


def train(run_dir: Path, stage: int, options: dict) -> None:
    """A whole run with validation on nine (``held_out``) samples."""
    config, source, shape = config_of(run_dir, stage, options)
    trainer = tiny_trainer(run_dir, config=config, source=source, shape=shape)
    trainer.validate = make_validator(TinySource(options.get("held_out", 9), seed=8), shape, config.trainer,
                                      config.objective, seed=5, run_dir=run_dir, tracker=Tracker())
    if "spoil" in options:
        spoil(trainer, options["spoil"], options.get("until", 10**9))
    try:
        result = trainer.run()
        outcome = {"step": result.step, "stopped": result.stopped, "trained": result.trained}
    except UserError as error:
        outcome = {"error": str(error)}
    if distributed.rank() == 0:
        (run_dir / "outcome.json").write_text(json.dumps(outcome))


def spoil(trainer: Any, after: int, until: int) -> None:
    """On the last rank, one parameter's gradient becomes infinite in the steps above ``after`` up to ``until``."""
    parameter = trainer._drafter.fc.weight

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        last = distributed.rank() == distributed.world_size() - 1
        return gradient * float("inf") if last and after < trainer.step + 1 <= until else gradient

    parameter.register_hook(hook)


def decode(run_dir: Path, stage: int, options: dict) -> None:
    """Real decoding of held-out prompts with an engine's weights."""
    from tiny import prompts, tiny_drafter as decoding_drafter, tiny_target

    from deepspec.training.live_decode import LiveDecoder

    config, _, _ = config_of(run_dir, stage, options)
    target = tiny_target()
    drafter = decoding_drafter(target).requires_grad_(True)
    engine = initialize(TrainingModule(drafter, config.objective), config.trainer, config.optimizer, config.engine)
    live = LiveDecoder(target, drafter.shape, drafter.shared, tuple(prompts(5)), every=1, max_new_tokens=16, seed=3)
    row = live(engine, 1)
    everyone = distributed.gather_objects(row)
    if everyone is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "decoded.json").write_text(json.dumps(everyone))


def parse(text: str) -> Any:
    """``1+4`` is a tuple of indices, a JSON value is itself, anything else is text."""
    if "+" in text:
        return tuple(int(index) for index in text.split("+"))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def fork(ranks: int) -> list[int]:
    """Become ``ranks`` processes. Rank 0 gets the ids of the others, which get nothing."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port()), "WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return []
        children.append(child)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    return children


def main() -> None:
    torch.set_num_threads(1)
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    children: list[int] = []
    if arguments[0].startswith("--fork="):
        children = fork(int(arguments.pop(0).removeprefix("--fork=")))
    for job in arguments:
        kind, stage, run_dir, *rest = job.split(":")
        options = dict(item.split("=") for item in rest[0].split(",")) if rest else {}
        parsed = {key: parse(value) for key, value in options.items()}
        {"gradient": gradient, "train": train, "decode": decode}[kind](Path(run_dir), int(stage), parsed)
    distributed.barrier()
    distributed.shutdown()
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
