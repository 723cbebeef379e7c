"""One optimizer step on a GPU at the shapes of Qwen3-4B and 8B, with synthetic features, through the real engine.

    PYTHONPATH=. python benchmarks/gpu.py [name=value ...]

Names: target (4b, 8b or tiny), cases, sequences, tokens (of each), anchors (of each), length, layers, rank, head
(none, vanilla, gated or rnn), megabytes (of a chunk), checkpointing (1 or 0), compile (1 or 0), zero (stage), ids
(random or text), steps, warmup, peak_tflops (0 looks the device up, or measures a large product where it is unknown).

A case is an objective and an attention, for instance ``triton/flex``; ``cases`` is a list with commas. Each runs in a
process of its own, so that a case that does not fit costs its own line only, and prints one JSON line: seconds (the
median step), the parts of it, peak memory, FLOP by kind, and model FLOP utilisation: the FLOP nobody can avoid, not
those of recomputation or masked-out pairs, over seconds and the device's dense bf16 peak. Exits with 2 without CUDA.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Sequence

import torch
from objective import token_ids

from deepspec import distributed
from deepspec.config.schema import EngineConfig, ObjectiveConfig, OptimizerConfig, TrainerConfig
from deepspec.data.batch import FeatureSample, Sample, TrainingBatch
from deepspec.data.collate import collate
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.objective import window_weights
from deepspec.training.clock import StepClock
from deepspec.training.engine import initialize, set_learning_rate
from deepspec.training.module import TrainingModule
from deepspec.training.packs import to_device
from deepspec.training.step import accumulate

DEFAULTS: dict[str, Any] = {
    "target": "4b", "cases": "triton/flex,chunked/flex,eager/flex,triton/chunked", "sequences": 4, "tokens": 1024,
    "anchors": 512, "length": 7, "layers": 5, "rank": 256, "head": "vanilla", "megabytes": 1024, "checkpointing": 0,
    "compile": 0, "zero": 1, "ids": "text", "steps": 10, "warmup": 3, "peak_tflops": 0.0,
}
CHOICES = {"target": ("4b", "8b", "tiny"), "head": ("none", "vanilla", "gated", "rnn"), "ids": ("random", "text")}
OBJECTIVES, ATTENTIONS = ("triton", "chunked", "eager"), ("flex", "chunked")
# width, intermediate size, heads, key and value heads, width of a head, vocabulary
SIZES = {"4b": (2560, 9728, 32, 8, 128, 151936), "8b": (4096, 12288, 32, 8, 128, 151936), "tiny": (32, 48, 4, 2, 8, 99)}
FEATURES = 5  # captured layers of the target
# Dense bf16 of the data sheets, TFLOP/s.
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "RTX 4090": 165.0}


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Options from ``name=value``. Exits with a message on anything unknown."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if set(given) & {"-h", "--help", "help"}:
        sys.stdout.write(str(__doc__))
        sys.exit(0)
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        sys.exit(f"benchmarks/gpu.py: unknown {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}")
    try:
        options = {name: type(default)(given.get(name, default)) for name, default in DEFAULTS.items()}
    except ValueError as error:
        sys.exit(f"benchmarks/gpu.py: {error}")
    for name, values in CHOICES.items():
        if options[name] not in values:
            sys.exit(f"benchmarks/gpu.py: {name}={options[name]} must be one of {', '.join(values)}")
    for case in options["cases"].split(","):
        objective, _, attention = case.partition("/")
        if objective not in OBJECTIVES or attention not in ATTENTIONS:
            sys.exit(f"benchmarks/gpu.py: case {case} must be one of {', '.join(OBJECTIVES)}, a slash, and one of "
                     f"{', '.join(ATTENTIONS)}")
    return options


def make_shape(options: dict[str, Any]) -> DrafterShape:
    """A DSpark drafter for the target, with the confidence head."""
    width, intermediate, heads, kv_heads, head_dim, vocab = SIZES[options["target"]]
    with_head = options["head"] != "none"
    return DrafterShape(
        "dspark", width, intermediate, options["layers"], heads, kv_heads, head_dim, vocab, 1e-6, 1e6,
        {"rope_type": "default", "rope_theta": 1e6}, max(4096, options["tokens"]), options["length"], True,
        options["head"], options["rank"] if with_head else 0, True, with_head, vocab - 1, tuple(range(FEATURES)),
        FEATURES + 1, width, "qwen3",
    )


def make_batch(options: dict[str, Any], shape: DrafterShape, dtype: torch.dtype) -> TrainingBatch:
    """One pack of sequences, all of them supervised, with random hidden states."""
    torch.manual_seed(0)
    tokens, width = options["tokens"], shape.hidden_size
    items = []
    for index in range(options["sequences"]):
        ids = token_ids(options["ids"], tokens, shape.vocab_size - 1)
        sample = Sample(f"benchmark-{index}", "chat", ids, torch.ones(tokens, dtype=torch.bool))
        items.append(FeatureSample(sample, torch.randn(tokens, FEATURES * width, dtype=dtype),
                                   torch.randn(tokens, width, dtype=dtype)))
    return collate(items, num_anchors=options["anchors"], draft_length=options["length"], seed=0, epoch=0)


def model_flop(shape: DrafterShape, batch: TrainingBatch) -> dict[str, float]:
    """FLOP by kind of one forward and backward that nobody can avoid.

    A multiplication has two in the forward and four in the backward, two where its input needs no gradient (features)
    or its weight none (LM head); target logits have no backward at all.
    """
    width, rank, vocab = shape.hidden_size, shape.markov_rank, shape.vocab_size
    supervised, slots = float(batch.blocks.mask.sum()), float(batch.blocks.mask.numel())
    rows = len(batch.blocks.target_rows[batch.blocks.mask].unique())
    transitions = len(batch.blocks.previous_ids[batch.blocks.mask].unique()) if shape.head == "vanilla" else supervised
    context = float(len(batch.input_ids))
    queries, keys = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    linear = slots * (2 * width * queries + width * keys + 3 * width * shape.intermediate_size) + context * width * keys
    pairs = float((batch.blocks.anchor_rows - batch.blocks.context_starts).sum()) + slots
    gates = {"gated": (width + rank) * rank, "rnn": (width + 2 * rank) * 3 * rank}.get(shape.head, 0)
    return {
        "context_projection": 4.0 * context * len(shape.feature_layers) * width * width,
        "layers": 6.0 * shape.num_layers * linear,
        "attention": 6.0 * shape.num_layers * 2 * pairs * shape.draft_length * queries,
        "vocabulary": 4.0 * vocab * supervised * width,
        "target_logits": 2.0 * vocab * rows * width,
        "sequential_head": 6.0 * (vocab * transitions * rank + slots * gates),
    }


def peak_flops(options: dict[str, Any], device: torch.device) -> tuple[float, str]:
    """FLOP per second that utilisation refers to, and where the figure is from."""
    if options["peak_tflops"]:
        return options["peak_tflops"] * 1e12, "given"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = next((tflops for part, tflops in PEAKS.items() if part in name), 0.0)
    if known:
        return known * 1e12, "data sheet"
    size, times = (8192 if device.type == "cuda" else 256), []
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(8):
        start = now(device)
        torch.mm(left, right)
        times.append(now(device) - start)
    return 2.0 * size**3 / min(times), "measured"


def now(device: torch.device) -> float:
    """Seconds, after everything the device was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_engine(options: dict[str, Any], shape: DrafterShape, objective: str, attention: str) -> Any:
    """The engine of training around a fresh drafter; LM head and embedding are random, in bf16."""
    device = distributed.device()
    torch.manual_seed(0)
    lm_head = torch.empty(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    drafter = build_drafter(shape, SharedWeights(lm_head, lm_head, ""), attention=attention,
                            activation_checkpointing=bool(options["checkpointing"]), compile=bool(options["compile"]))
    module = TrainingModule(drafter, ObjectiveConfig(implementation=objective, chunk_megabytes=options["megabytes"]))
    trainer = TrainerConfig(global_batch_size=options["sequences"] * distributed.world_size(),
                            micro_batch_size=options["sequences"], num_anchors=options["anchors"])
    return initialize(module, trainer, OptimizerConfig(), EngineConfig(zero_stage=options["zero"]))


def run_case(options: dict[str, Any], case: str) -> dict[str, Any]:
    """Time one case on this process's device."""
    objective, attention = case.split("/")
    shape = make_shape(options)
    engine = make_engine(options, shape, objective, attention)
    device = distributed.device()
    batch = to_device(make_batch(options, shape, torch.bfloat16), device)
    weights = window_weights(batch.blocks, engine.module.objective, shape.draft_length)
    set_learning_rate(engine, 1e-5)
    seconds, parts, losses = [], [], []
    for step in range(options["warmup"] + options["steps"]):
        if step == options["warmup"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start, clock = now(device), StepClock()
        _, _, found = accumulate(engine, [batch], 1, weights, clock)
        engine.step()
        clock.mark("optimizer")
        if step >= options["warmup"]:
            seconds.append(now(device) - start)
            parts.append(clock.seconds())
            losses.append(float(found[0][1]))
    flop, median = model_flop(shape, batch), statistics.median(seconds)
    peak, source = peak_flops(options, device)
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0
    return {
        "seconds": round(median, 4), "seconds_min": round(min(seconds), 4),
        "parts": {name: round(statistics.median(part[name] for part in parts), 4) for name in parts[0]},
        "tflop": {name: round(value / 1e12, 3) for name, value in flop.items()},
        "peak_tflops": round(peak / 1e12, 1), "peak_from": source,
        "utilisation": round(sum(flop.values()) / median / peak, 4), "peak_megabytes": round(memory),
        "slots": int(batch.blocks.mask.sum()), "loss_first": round(losses[0], 5), "loss_last": round(losses[-1], 5),
        "parameters": sum(p.numel() for p in engine.module.drafter.parameters()),
    }


def run_here(options: dict[str, Any], case: str) -> None:
    """Run ``case`` in this process and print its line, an out-of-memory error included."""
    device = distributed.device()
    line: dict[str, Any] = {
        "benchmark": "gpu", "case": case, **{name: value for name, value in options.items() if name != "cases"},
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__,
    }
    try:
        line |= run_case(options, case)
    except torch.cuda.OutOfMemoryError as error:
        line["error"] = f"out of memory: {str(error).splitlines()[0]}"
    finally:
        distributed.shutdown()
    sys.stdout.write(json.dumps(line) + "\n")


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks/gpu.py needs a CUDA device and PyTorch sees none; benchmarks/train_step.py is its "
                         "counterpart for a CPU.\n")
        sys.exit(2)
    cases = options["cases"].split(",")
    if os.environ.get("DEEPSPEC_BENCHMARK_CASE"):
        run_here(options, cases[0])
        return
    failed = 0
    for case in cases:
        command = [sys.executable, os.path.abspath(__file__), *arguments, f"cases={case}"]
        failed += subprocess.run(command, env={**os.environ, "DEEPSPEC_BENCHMARK_CASE": "1"}).returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
