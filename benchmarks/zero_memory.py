"""Bytes that one rank holds of parameters, gradients and optimizer state, for ZeRO 0-3 on 1, 2 and 4 ranks.

    PYTHONPATH=. python benchmarks/zero_memory.py [name=value ...]

Names: width, layers, vocab, rank, ranks (for instance 1,2,4), precision (fp32 or bf16). Starts the deepspeed launcher
once per number of ranks. Every figure is the size of the storages that the engine really holds, each counted once, the
largest rank's: gradients between two micro-steps and before the step, whichever is more; masters belong to the
optimizer. Communication buffers have a fixed size and are listed apart.

Prints one JSON line; exits with 1 when a ratio is not 1/N where it should be, or when the frozen embedding or LM head
is found in the engine or in a checkpoint.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.config.schema import Config, DrafterConfig, RunConfig, TargetConfig  # noqa: E402
from deepspec.data.batch import FeatureSample, Sample  # noqa: E402
from deepspec.data.sources import SampleInfo  # noqa: E402
from deepspec.drafters.registry import build_drafter  # noqa: E402
from deepspec.drafters.types import DrafterShape, SharedWeights  # noqa: E402
from deepspec.training.checkpoint import latest  # noqa: E402
from deepspec.training.engine import masters  # noqa: E402
from deepspec.training.identity import run_identity  # noqa: E402
from deepspec.training.packs import Packer  # noqa: E402
from deepspec.training.step import accumulate, total_weights  # noqa: E402
from deepspec.training.trainer import DrafterTrainer  # noqa: E402

DEFAULTS: dict[str, Any] = {"width": 512, "layers": 2, "vocab": 16000, "rank": 64, "ranks": "1,2,4",
                            "precision": "fp32"}
KINDS = ("parameters", "gradients", "optimizer", "buffers")
STAGES = (0, 1, 2, 3)
SHARED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # ZeRO stage that divides it by the number of ranks
SLACK = 1.02  # partitions are padded, and ZeRO-3 keeps norms whole
MICRO_STEPS = 2
GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer",
             "fp32_groups_gradients_flat", "fp32_groups_gradient_flat_partition")  # where ZeRO's optimizers keep them
HEADS, TAPS, TOKENS = 4, 2, 48


class RandomSource:
    """Samples of random hidden states, in memory."""

    def __init__(self, count: int, width: int, vocab: int) -> None:
        torch.manual_seed(0)
        self.rows = [
            FeatureSample(Sample(f"sample-{index}", "chat", torch.randint(0, vocab - 1, (TOKENS,)),
                                 torch.ones(TOKENS, dtype=torch.bool)),
                          torch.randn(TOKENS, TAPS * width), torch.randn(TOKENS, width))
            for index in range(count)
        ]
        self.samples = [SampleInfo(row.sample.sample_id, row.sample.domain, TOKENS) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices``."""
        return [self.rows[index] for index in indices]


def make_trainer(options: dict[str, Any], stage: int, run_dir: Path) -> DrafterTrainer:
    """A run of one step with ``MICRO_STEPS`` micro-steps per rank."""
    width, vocab, world = options["width"], options["vocab"], distributed.world_size()
    shape = DrafterShape(
        "dspark", width, 3 * width, options["layers"], HEADS, HEADS // 2, width // HEADS, vocab, 1e-6, 1e6,
        {"rope_type": "default", "rope_theta": 1e6}, 4096, 7, True, "vanilla", options["rank"], True, True, vocab - 1,
        tuple(range(TAPS)), TAPS + 1, width, "qwen3",
    )
    config = Config(run=RunConfig(name="zero", dir=str(run_dir)), drafter=DrafterConfig(num_layers=options["layers"]),
                    target=TargetConfig(name="random", feature_layers=list(range(TAPS)), mask_token_id=vocab - 1))
    config.trainer.global_batch_size, config.trainer.num_anchors = MICRO_STEPS * world, 4
    config.trainer.max_steps, config.trainer.precision = 1, options["precision"]
    config.engine.zero_stage, config.tracking.mode = stage, "disabled"
    source = RandomSource(MICRO_STEPS * world, width, vocab)
    torch.manual_seed(1)
    shared = SharedWeights(torch.randn(vocab, width), torch.randn(vocab, width), "random")
    packer = Packer(source, shape, config.trainer, config.objective, seed=0)
    identity = run_identity(config, shape, target="random", data="random")
    return DrafterTrainer(build_drafter(shape, shared), packer, config, identity=identity)


def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor reachable through attributes, lists and dictionaries of DeepSpeed's optimizer."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        if value.grad is not None:
            yield value.grad
        for name in ("ds_tensor", "grad_accum"):
            yield from tensors_in(getattr(value, name, None), seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, seen)
    elif type(value).__module__.startswith("deepspeed.runtime.zero") and not isinstance(value, torch.nn.Module):
        yield from tensors_in(vars(value), seen)


def _updated(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def held(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Tensors of this rank by kind; where two kinds share a storage, the first one has it."""
    parameters, inner = list(engine.module.parameters()), engine.basic_optimizer
    fp32 = masters(engine)
    moments = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    gradients = [p.grad for p in (*parameters, *_updated(inner)) if p.grad is not None]
    gradients += [p.grad_accum for p in parameters if getattr(p, "grad_accum", None) is not None]
    for name in GRADIENTS:
        gradients += tensors_in(getattr(engine.optimizer, name, None), set())
    return {
        "parameters": [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")],
        "optimizer": fp32 + moments, "gradients": gradients,
        "buffers": [] if engine.optimizer is inner else list(tensors_in(engine.optimizer, set())),
    }


def count(engine: Any) -> dict[str, int]:
    """Bytes of ``held``, every storage once; raises RuntimeError when the frozen weights are among them."""
    shared = engine.module.shared
    frozen = {weight.untyped_storage().data_ptr() for weight in (shared.embed, shared.lm_head)}
    known: set[int] = set()
    totals = dict.fromkeys(KINDS, 0)
    for kind, tensors in held(engine).items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in frozen:
                raise RuntimeError(f"the frozen embedding or LM head is among the {kind}")
            if storage.nbytes() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                totals[kind] += storage.nbytes()
    return totals


def measure(options: dict[str, Any], stage: int, run_dir: Path) -> dict[str, Any]:
    """Largest rank's bytes by kind, after one whole step and two micro-steps of the next."""
    trainer = make_trainer(options, stage, run_dir)
    trainer.run()
    engine, packer = trainer.engine, trainer.packer
    window = packer.window(range(len(packer.source)), 1)
    seen = []

    def packs() -> Iterator[Any]:
        for batch in packer.packs(window):
            seen.append(count(engine))  # what is kept from one micro-step to the next
            yield batch

    accumulate(engine, packs(), len(window.steps), total_weights(packer, window))
    seen.append(count(engine))
    totals = {kind: int(distributed.all_reduce_max(max(item[kind] for item in seen[1:]))) for kind in KINDS}
    distributed.barrier()
    stored = latest(run_dir)
    names: list[str] = []
    largest = 0
    for path in sorted(stored.rglob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            names += handle.keys()
            sizes = [math.prod(handle.get_slice(name).get_shape()) for name in handle.keys()]
            largest = max([largest, *(4 * size for size in sizes)])
    wanted = {name for name, _ in trainer.engine.module.drafter.named_parameters()}
    strange = {name.removeprefix("exp_avg_sq.").removeprefix("exp_avg.") for name in names} - wanted
    if strange or any("embed_tokens" in name or "lm_head" in name for name in names):
        raise RuntimeError(f"{stored} holds more than the trained drafter: {sorted(strange)}")
    size = sum(path.stat().st_size for path in stored.rglob("*.safetensors"))
    return totals | {"largest_parameter": largest, "checkpoint": size}


def child(options: dict[str, Any], folder: Path) -> None:
    """One rank: all stages one after the other; rank 0 writes the result."""
    torch.set_num_threads(1)
    distributed.init()
    found = {stage: measure(options, stage, folder / f"stage-{stage}-{distributed.world_size()}") for stage in STAGES}
    if distributed.is_main():
        (folder / f"{distributed.world_size()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.shutdown()


def launch(options: dict[str, Any], ranks: int, folder: Path) -> dict[int, dict[str, int]]:
    """Start ``ranks`` processes with the deepspeed launcher and read what they found."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    arguments = [f"{name}={value}" for name, value in options.items()] + [f"folder={folder}"]
    command = [sys.executable, launcher, "--num_accelerators", str(ranks), "--master_port",
               str(distributed.free_port()), str(Path(__file__).resolve()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{ranks} ranks failed:\n{(result.stdout + result.stderr)[-4000:]}")
    return {int(stage): row for stage, row in json.loads((folder / f"{ranks}.json").read_text()).items()}


def wrong(found: dict[int, dict[int, dict[str, int]]]) -> list[str]:
    """Kinds that are not 1/N of one rank's from the stage on that divides them, or not the same below it.

    ZeRO-2 keeps a gradient whole on both ranks whose partitions meet inside it: at most two more parameters.
    """
    problems = []
    for ranks, stages in found.items():
        for stage, row in stages.items():
            for kind, first in SHARED_FROM.items():
                expected = found[1][stage][kind] / (ranks if stage >= first else 1)
                most = expected * SLACK + (2 * row["largest_parameter"] if (stage, kind) == (2, "gradients") else 0)
                if not expected / SLACK <= row[kind] <= most:
                    problems.append(f"{kind} at stage {stage} on {ranks} ranks: {row[kind]} bytes, expected {expected}")
    return problems


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    texts = dict(item.split("=", 1) for item in sys.argv[1:] if not item.startswith("--"))
    folder = texts.pop("folder", None)
    unknown = texts.keys() - DEFAULTS.keys()
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}")
    options = {name: type(value)(texts.get(name, value)) for name, value in DEFAULTS.items()}
    if folder is not None:
        child(options, Path(folder))
        return
    ranks = [int(part) for part in options["ranks"].split(",")]
    with tempfile.TemporaryDirectory() as work:
        found = {number: launch(options, number, Path(work)) for number in ranks}
    base = found[ranks[0]]
    ratios = {number: {stage: {kind: round(row[kind] / base[stage][kind], 4) for kind in SHARED_FROM}
                       for stage, row in stages.items()} for number, stages in found.items()}
    problems = wrong(found) if 1 in found else []
    print(json.dumps({"options": options, "bytes": found, "ratio_to_one_rank": ratios, "wrong": problems}))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
