"""One training step (drafter, objective, backward) against the eager objective and against the machine's matmul rate.

    PYTHONPATH=. python benchmarks/train_step.py [name=value ...]

Names: vocab, width, rank, layers, heads, kv_heads, features, tokens, anchors, length, megabytes, threads, repeats, ids
(random or text), eager_anchors (0 skips the eager path), optimizer (1 also times AdamW), profile (1 prints where the
time goes). The defaults are the published shape: one sequence of 1,024 tokens, 512 anchors of 7 slots, vocabulary
151,936, fp32.

Prints one JSON line. ``floor`` are the products nobody can avoid (``floor_flop``) at the matmul rate of the same run;
memory is the growth of the peak resident set during the step, gradients included. The eager path runs at
``eager_anchors`` anchors, where it fits, against ours at the same number.
"""

import json
import os
import platform
import sys
import time
from typing import Any, Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from objective import PeakMemory, matmul_rate, token_ids  # noqa: E402

from deepspec.config.schema import ObjectiveConfig  # noqa: E402
from deepspec.data.batch import FeatureSample, Sample, TrainingBatch  # noqa: E402
from deepspec.data.collate import collate  # noqa: E402
from deepspec.drafters.registry import build_drafter  # noqa: E402
from deepspec.drafters.types import DrafterShape, SharedWeights  # noqa: E402
from deepspec.objective import window_weights  # noqa: E402
from deepspec.training.module import TrainingModule  # noqa: E402

DEFAULTS = {
    "vocab": 151936, "width": 256, "rank": 256, "layers": 2, "heads": 4, "kv_heads": 2, "features": 5, "tokens": 1024,
    "anchors": 512, "length": 7, "megabytes": 512, "threads": 2, "repeats": 3, "eager_anchors": 32, "optimizer": 1,
    "profile": 0,
}


def make_shape(options: dict[str, int]) -> DrafterShape:
    """A DSpark drafter with the vanilla head and the confidence head."""
    width = options["width"]
    return DrafterShape(
        "dspark", width, 3 * width, options["layers"], options["heads"], options["kv_heads"], width // options["heads"],
        options["vocab"], 1e-6, 1e6, {"rope_type": "default", "rope_theta": 1e6}, options["tokens"], options["length"],
        True, "vanilla", options["rank"], True, True, options["vocab"] - 1, tuple(range(options["features"])),
        options["features"] + 1, width, "qwen3",
    )


def make_batch(options: dict[str, int], ids: str, anchors: int) -> TrainingBatch:
    """One sequence, all of it supervised, with random features."""
    torch.manual_seed(0)
    tokens, width = options["tokens"], options["width"]
    sample = Sample("benchmark", "chat", token_ids(ids, tokens, options["vocab"]), torch.ones(tokens, dtype=torch.bool))
    features = torch.randn(tokens, options["features"] * width)
    item = FeatureSample(sample, features, torch.randn(tokens, width))
    return collate([item], num_anchors=anchors, draft_length=options["length"], seed=0, epoch=0)


def floor_flop(options: dict[str, int], batch: TrainingBatch) -> dict[str, float]:
    """FLOP by kind: two full vocabulary products, the de-duplicated rows, and the drafter's own layers."""
    width, rank, vocab = options["width"], options["rank"], options["vocab"]
    slots = float(batch.blocks.mask.sum())
    rows, previous = len(batch.blocks.target_rows.unique()), len(batch.blocks.previous_ids.unique())
    kv_width = options["kv_heads"] * (width // options["heads"])
    context = len(batch.input_ids)
    shared = 2 * width * kv_width  # keys and values
    layer = (slots + context) * shared + slots * (2 * width * width + 3 * width * 3 * width)
    pairs = float((batch.blocks.anchor_rows - batch.blocks.context_starts).sum()) * options["length"]
    attention = 2 * width * (pairs + slots * options["length"])
    backbone = options["layers"] * (layer + attention) + context * options["features"] * width * width
    return {
        "vocabulary": 2.0 * vocab * 2 * slots * width,
        "distinct_rows": 2.0 * vocab * (rows * width + 3 * previous * rank),
        "backbone": 3 * 2.0 * backbone,  # forward and two products of the backward
    }


def stepper(module: TrainingModule, batch: TrainingBatch, shape: DrafterShape) -> Callable[[], None]:
    """Forward and backward with gradients from scratch."""
    denominators = window_weights(batch.blocks, module.objective, shape.draft_length)

    def action() -> None:
        module.zero_grad(set_to_none=True)
        loss, _ = module(batch, denominators)
        loss.backward()
    return action


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds and growth of the resident set in MiB of one call."""
    with PeakMemory() as peak:
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
    return seconds, peak.megabytes


def where_time_goes(action: Callable[[], None]) -> dict[str, float]:
    """Share of the step's CPU time by operator, the largest ten."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        action()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:10]
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in largest}


def compare_eager(options: dict[str, int], ids: str, shape: DrafterShape, shared: SharedWeights) -> dict[str, Any]:
    """Ours against the eager objective at a number of anchors that fits, in turns."""
    batch = make_batch(options, ids, options["eager_anchors"])
    actions = {}
    for name in ("chunked", "eager"):
        objective = ObjectiveConfig(implementation=name, chunk_megabytes=options["megabytes"])
        actions[name] = stepper(TrainingModule(build_drafter(shape, shared), objective), batch, shape)
    best = {name: (float("inf"), 0.0) for name in actions}
    for _ in range(2):
        for name, action in actions.items():
            seconds, memory = timed(action)
            best[name] = (min(best[name][0], seconds), max(best[name][1], memory))
    return {
        "eager_anchors": options["eager_anchors"], "eager_seconds": round(best["eager"][0], 3),
        "ours_seconds_there": round(best["chunked"][0], 3),
        "eager_over_ours": round(best["eager"][0] / best["chunked"][0], 2),
        "eager_extra_megabytes": round(best["eager"][1]), "ours_extra_megabytes_there": round(best["chunked"][1]),
    }


def time_optimizer(module: TrainingModule) -> float:
    """Seconds of one AdamW update of everything the drafter trains; the first, which makes the moments, left out."""
    optimizer = torch.optim.AdamW(module.drafter.parameters(), lr=0.0)
    optimizer.step()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    ids = given.pop("ids", "random")
    unknown = set(given) - set(DEFAULTS)
    if unknown or ids not in ("random", "text"):
        sys.exit(f"benchmarks/train_step.py: unknown {', '.join(sorted(unknown)) or ids}; there are ids=random|text, "
                 f"{', '.join(DEFAULTS)}")
    options = {**DEFAULTS, **{name: int(value) for name, value in given.items()}}
    torch.set_num_threads(options["threads"])
    shape = make_shape(options)
    torch.manual_seed(0)
    shared = SharedWeights(torch.randn(options["vocab"], options["width"]) * 0.02,
                           torch.randn(options["vocab"], options["width"]) * options["width"] ** -0.5, "")
    result: dict[str, Any] = {
        "benchmark": "train_step", **options, "ids": ids, "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "load": round(os.getloadavg()[0], 1),
    }
    if options["eager_anchors"]:
        result |= compare_eager(options, ids, shape, shared)
    batch = make_batch(options, ids, options["anchors"])
    module = TrainingModule(build_drafter(shape, shared), ObjectiveConfig(chunk_megabytes=options["megabytes"]))
    action, flop = stepper(module, batch, shape), floor_flop(options, batch)
    rate, seconds, memory = 0.0, float("inf"), 0.0
    for _ in range(options["repeats"]):  # in turns, so that a slow minute of a shared machine slows both
        rate = max(rate, matmul_rate(options["width"], options["vocab"], 256))
        once, grown = timed(action)
        seconds, memory = min(seconds, once), max(memory, grown)
    vocabulary = flop["vocabulary"] + flop["distinct_rows"]
    result |= {
        "gflop": {name: round(value / 1e9, 1) for name, value in flop.items()}, "matmul_gflops": round(rate / 1e9, 1),
        "floor_seconds": round(vocabulary / rate, 2), "seconds": round(seconds, 2),
        "over_floor": round(seconds * rate / vocabulary, 3),
        "over_floor_with_backbone": round(seconds * rate / sum(flop.values()), 3),
        "extra_megabytes": round(memory),
    }
    if options["optimizer"]:
        result["optimizer_seconds"] = round(time_optimizer(module), 2)
    if options["profile"]:
        result["profile"] = where_time_goes(action)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
