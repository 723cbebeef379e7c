"""How near batched decoding comes to its matrix multiplications alone, in one run.

    OMP_NUM_THREADS=1 python benchmarks/decoding_ceiling.py runs/smollm2_135m 1 8 32
    OMP_NUM_THREADS=1 python benchmarks/decoding_ceiling.py runs/tiny 32 0.0

Rounds of decoding held-out prompts are timed in steady state. Every few rounds one is recorded: which matrix
multiplications it did (projections and heads of target and drafter, with the very operands), and they are done again,
alone. A number with a point is the temperature (1.0 by default). Times are CPU seconds of the process, so that other
jobs on the machine hit both sides alike. Prints one JSON line: per batch size and way of decoding ``ratio``, the
multiplications' share of a round, with the lowest and highest of the recorded rounds; ``with_attention`` counts
attention kernels as multiplications, too; ``tokens_per_second`` are of CPU time.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspec.cli import with_stored_overrides
from deepspec.config.compose import compose_config
from deepspec.config.schema import Config
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.session import RunSession, load_run

MODES = ("none", "fixed")
WARMUP, RECORDED, BETWEEN, TOKENS = 6, 6, 2, 96
REPEATS = 3  # of the multiplications alone; the median counts
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
_ATTENTION = "scaled_dot_product"
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Recorder(TorchDispatchMode):
    """Keeps every matrix multiplication and attention kernel with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[Call] = []
        self.attention: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _MATMULS:
            self.matmuls.append((func, args, kwargs or {}))
        elif _ATTENTION in name:
            self.attention.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of ``work``."""
    start = time.process_time()
    work()
    return time.process_time() - start


def replayed(calls: list[Call]) -> float:
    """CPU seconds of ``calls`` alone, median of some repeats."""
    def once() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)

    return median(seconds(once) for _ in range(REPEATS))


@torch.no_grad()
def measure(session: RunSession, config: Config, mode: str, batch_size: int, temperature: float) -> dict[str, Any]:
    """Rounds against their own multiplications, all rows busy from the first recorded round to the last."""
    decoder = SpeculativeDecoder(
        session.target, session.drafter, Sampling(temperature=temperature, seed=config.run.seed), batch_size=batch_size,
        max_new_tokens=TOKENS, mode=mode, ignore_eos=True)
    held_out = held_out_requests(config, 4096)
    requests = [replace(held_out[place % len(held_out)], id=f"{place}") for place in range(4 * batch_size)]
    rounds: Iterator[Any] = decoder.rounds(requests)
    for _ in range(WARMUP):
        next(rounds)
    pairs, tokens, spent = [], decoder.timings.tokens, 0.0
    before: Optional[float] = None
    for turn in range(RECORDED * (BETWEEN + 1)):
        if turn % (BETWEEN + 1) == BETWEEN:
            at = decoder.timings.tokens
            with Recorder() as recorder:
                next(rounds)
            tokens += decoder.timings.tokens - at  # not timed, not counted
            assert before is not None
            alone, attention = replayed(recorder.matmuls), replayed(recorder.attention)
            whole = (before + (own := seconds(lambda: next(rounds)))) / 2
            spent += own
            pairs.append((alone, alone + attention, whole))
            before = own
        else:
            before = seconds(lambda: next(rounds))
            spent += before
    alone, with_attention, whole = (sum(column) for column in zip(*pairs))
    single = sorted(part[0] / part[2] for part in pairs)
    return {"ratio": round(alone / whole, 3), "lowest": round(single[0], 3), "highest": round(single[-1], 3),
            "with_attention": round(with_attention / whole, 3), "round_ms": round(1e3 * whole / len(pairs), 2),
            "matmul_ms": round(1e3 * alone / len(pairs), 2),
            "tokens_per_second": round((decoder.timings.tokens - tokens) / spent, 1)}


def main(arguments: list[str]) -> None:
    """Measure every batch size given after the run directory."""
    directory, *numbers = arguments
    temperature = next((float(text) for text in numbers if "." in text), 1.0)
    sizes = [int(text) for text in numbers if "." not in text] or [1, 8, 32]
    config = compose_config(with_stored_overrides([f"run.dir={directory}"]))
    session = load_run(config)
    found = {f"{mode}, batch {size}": measure(session, config, mode, size, temperature)
             for size in sizes for mode in MODES}
    sys.stdout.write(json.dumps({
        "benchmark": Path(__file__).stem, "target": config.target.name, "drafter": config.drafter.algorithm,
        "block_size": config.drafter.block_size, "temperature": temperature, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "measured": found}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
