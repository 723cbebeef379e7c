"""Chunked objective against its eager twin and against the machine's own matrix product, in one run.

    PYTHONPATH=. python benchmarks/objective.py [name=value ...]

Names: vocab, width, rank, slots, tokens, megabytes, threads, repeats, ids (random or text), eager (1, 0, or 2: only
where its logits fit into the free memory), limit_gigabytes (of data the process may hold, 0 = none), grid (1: anchors
64 to 512 and vocabularies 32,000 to 151,936 instead of one case).

Prints one JSON line per case. ``floor_seconds`` is what the unavoidable products take at the matmul rate measured
here: base logits and their gradient by the hidden states for every slot, target logits for every distinct row, bias
and its two gradients for every distinct previous token. Memory is the growth of the peak resident set during the pass.
"""

import json
import os
import platform
import resource
import sys
import threading
import time
from typing import Callable

# Before torch loads OpenMP: threads that spin between operations starve each other when anything else is running.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from deepspec.config.schema import ObjectiveConfig  # noqa: E402
from deepspec.data.batch import AnchorBlocks, TrainingBatch  # noqa: E402
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights  # noqa: E402
from deepspec.objective import drafter_loss, window_weights  # noqa: E402

DEFAULTS = {
    "vocab": 49152, "width": 576, "rank": 256, "slots": 3584, "tokens": 1024, "megabytes": 512, "threads": 2,
    "eager": 1, "repeats": 3, "limit_gigabytes": 0, "grid": 0,
}
LENGTH = 7
GRID = [(anchors, vocab) for vocab in (32000, 65536, 151936) for anchors in (64, 128, 256, 512)]
EAGER_COPIES = 10  # of the fp32 logits, that the eager path has at its peak


class PeakMemory:
    """Growth of the resident set inside a with block, sampled every 5 ms."""

    def __enter__(self) -> "PeakMemory":
        self._process, self._stop = psutil.Process(), threading.Event()
        self._start = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.megabytes = (self.peak - self._start) / 2**20


def token_ids(kind: str, count: int, vocab: int) -> Tensor:
    """Uniform ids, or ids with the rank-frequency law of natural text."""
    if kind == "random":
        return torch.randint(0, vocab, (count,))
    weights = 1.0 / (torch.arange(vocab) + 2.7)
    return torch.multinomial(weights, count, replacement=True)


def case(options: dict[str, int], ids: str) -> tuple[DrafterOutput, TrainingBatch, SharedWeights, DrafterShape]:
    """One document with random anchors; the vanilla head's transitions are gathered from W_1 as in training."""
    torch.manual_seed(0)
    vocab, width, rank, tokens = (options[name] for name in ("vocab", "width", "rank", "tokens"))
    blocks = options["slots"] // LENGTH
    text = token_ids(ids, tokens, vocab)
    anchors = torch.randperm(tokens - LENGTH - 1)[:blocks].sort().values
    rows = anchors[:, None] + torch.arange(LENGTH)
    batch = TrainingBatch(
        ("benchmark",), text, torch.arange(tokens), (0, tokens), torch.empty(tokens, 0), torch.randn(tokens, width),
        AnchorBlocks(anchors, torch.zeros_like(anchors), anchors, text[anchors], text[rows + 1], text[rows], rows,
                     torch.ones_like(rows, dtype=torch.bool)),
    )
    lm_head = torch.randn(vocab, width) * width**-0.5
    shape = DrafterShape(
        "dspark", width, width, 1, 1, 1, width, vocab, 1e-6, 1e4, {}, 0, LENGTH, True, "vanilla", rank, True, True, 0,
        (0,), 2, width, "llama",
    )
    output = DrafterOutput(
        hidden=torch.randn(blocks, LENGTH, width).requires_grad_(),
        transition=(torch.randn(vocab, rank) * 0.1)[text[rows]].requires_grad_(),
        output_factor=(torch.randn(vocab, rank) * 0.1).requires_grad_(),
        confidence_logits=torch.randn(blocks, LENGTH).requires_grad_(),
    )
    return output, batch, SharedWeights(lm_head, lm_head, ""), shape


def matmul_rate(width: int, vocab: int, rows: int) -> float:
    """FLOP per second of the base-logits product on this machine: the best of five."""
    left, right = torch.randn(rows, width), torch.randn(vocab, width)
    out = torch.empty(rows, vocab)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(left, right.t(), out=out)
        times.append(time.perf_counter() - start)
    return 2.0 * rows * width * vocab / min(times)


def floor_flop(options: dict[str, int], batch: TrainingBatch) -> float:
    """Products nobody can avoid."""
    rows, tokens = len(batch.blocks.target_rows.unique()), len(batch.blocks.previous_ids.unique())
    per_row = 2.0 * options["vocab"]
    slots = batch.blocks.mask.sum().item()
    return per_row * (2 * slots * options["width"] + rows * options["width"] + 3 * tokens * options["rank"])


def timed(action: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Best seconds and the largest memory growth in MiB."""
    best, memory = float("inf"), 0.0
    for _ in range(repeats):
        with PeakMemory() as peak:
            start = time.perf_counter()
            action()
            best = min(best, time.perf_counter() - start)
        memory = max(memory, peak.megabytes)
    return best, memory


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    ids = given.pop("ids", "random")
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        sys.exit(f"benchmarks/objective.py: unknown {', '.join(sorted(unknown))}; there are ids, {', '.join(DEFAULTS)}")
    options = {**DEFAULTS, **{name: int(value) for name, value in given.items()}}
    torch.set_num_threads(options["threads"])
    if options["limit_gigabytes"]:
        limit = options["limit_gigabytes"] << 30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    cases = [{"slots": anchors * LENGTH, "vocab": vocab} for anchors, vocab in GRID] if options["grid"] else [{}]
    for changes in cases:
        sys.stdout.write(json.dumps(measure(options | changes, ids)) + "\n")
        sys.stdout.flush()


def eager_fits(options: dict[str, int]) -> bool:
    """Whether the eager path is asked for and, for eager=2, fits into the free memory."""
    if options["eager"] < 2:
        return bool(options["eager"])
    return EAGER_COPIES * 4 * options["slots"] * options["vocab"] < psutil.virtual_memory().available


def measure(options: dict[str, int], ids: str) -> dict[str, object]:
    """One case: times, memory and the matmul rate, in turns."""
    output, batch, shared, shape = case(options, ids)

    def step(implementation: str) -> Callable[[], None]:
        objective = ObjectiveConfig(implementation=implementation, chunk_megabytes=options["megabytes"])
        weights = window_weights(batch.blocks, objective, LENGTH)

        def action() -> None:
            for leaf in (output.hidden, output.transition, output.output_factor, output.confidence_logits):
                if leaf is not None:
                    leaf.grad = None
            drafter_loss(output, batch, shared, objective, weights, shape).loss.backward()
        return action

    flop = floor_flop(options, batch)
    rate, chunked, chunked_memory = 0.0, float("inf"), 0.0
    for _ in range(options["repeats"]):  # in turns, so that a slow minute of a shared machine slows both
        rate = max(rate, matmul_rate(options["width"], options["vocab"], 256))
        seconds, memory = timed(step("chunked"), 1)
        chunked, chunked_memory = min(chunked, seconds), max(chunked_memory, memory)
    result = {
        "benchmark": "objective", **options, "ids": ids, "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "load": round(os.getloadavg()[0], 1),
        "matmul_gflops": round(rate / 1e9, 1), "floor_seconds": round(flop / rate, 3),
        "chunked_seconds": round(chunked, 3), "chunked_over_floor": round(chunked * rate / flop, 3),
        "chunked_gflops": round(flop / chunked / 1e9, 1), "chunked_extra_megabytes": round(chunked_memory),
    }
    if eager_fits(options):
        eager, eager_memory = timed(step("eager"), 2)
        result.update(
            eager_seconds=round(eager, 3), eager_extra_megabytes=round(eager_memory),
            eager_over_chunked=round(eager / chunked, 3),
        )
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
