"""Scheduled decoding against plain decoding and fixed lengths, at several batch sizes, in one run.

    OMP_NUM_THREADS=1 python benchmarks/scheduled_decoding.py runs/tiny 1 4 16 32

The profile is measured here. The three ways decode the same prompts, a few rounds in turn, and times are CPU seconds,
so that whatever else the machine does hits all three alike. Answers have one length (end-of-turn tokens do not stop
them), or chance in their lengths would decide. Prints one JSON line: per batch size tokens per CPU second of each way
over all repeats, ``ratio``: scheduled against the better of the other two, and ``spread``: the lowest and highest of
the repeats' ratios.
"""

import json
import logging
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from deepspec.calibration import Calibration
from deepspec.cli import with_stored_overrides
from deepspec.config.compose import compose_config
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config, ProfileConfig
from deepspec.decoding.cost import CostTable
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeTimings
from deepspec.profiling.measure import Measurement, grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.profiling.scheduler import recorded_logits, scheduler_factory
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.session import RunSession, load_run

MODES = ("none", "fixed", "scheduled")
REPEATS = 4
TURN = 8  # rounds before the next way has its turn: few enough for one state of the machine
TOKENS = 48


def open_run(directory: str) -> tuple[Config, RunSession]:
    """Configuration, target and drafter of a finished run."""
    config = compose_config(with_stored_overrides([f"run.dir={directory}"]))
    return config, load_run(config)


def calibration(config: Config, session: RunSession) -> Any:
    """The run's calibration, None without one."""
    path = run_dir(config) / "calibration.json"
    if not session.drafter.shape.confidence_head or not path.is_file():
        return None
    return Calibration.load(path, drafter_sha256=session.drafter_sha256)


def profiled(config: Config, session: RunSession, sizes: list[int], clock: Any = time.process_time) -> Measurement:
    """A profile that has the batch sizes in question."""
    length = session.drafter.shape.draft_length
    options = ProfileConfig(num_reqs=sorted({1, 4, *sizes}), verify_lengths=sorted({0, 1, 2, 4, length}),
                            kv_lengths=config.profile.kv_lengths, samples_per_cell=7, warmup=1, max_batch_tokens=1024)
    return measure(DecoderRunner(session.target, session.drafter, clock=clock), grid(options, length), options)


def requests_of(config: Config, count: int) -> list[DecodeRequest]:
    """``count`` held-out prompts, repeated under other names if there are fewer."""
    found = held_out_requests(config, None)
    return [replace(found[index % len(found)], id=f"{found[index % len(found)].id}/{index // len(found)}")
            for index in range(count)]


def ratio(speeds: dict[str, float]) -> float:
    """Scheduled decoding against the better of the other two."""
    return speeds["scheduled"] / max(speeds["none"], speeds["fixed"])


def decode(session: RunSession, requests: list[DecodeRequest], size: int, scheduler: Any,
           seed: int) -> dict[str, DecodeTimings]:
    """The ways' timings of the same requests, their rounds in turn until each is done."""
    decoders = {mode: SpeculativeDecoder(
        session.target, session.drafter, Sampling(temperature=1.0, seed=seed), batch_size=size, max_new_tokens=TOKENS,
        mode=mode, scheduler=scheduler if mode == "scheduled" else None, ignore_eos=True) for mode in MODES}
    for decoder in decoders.values():
        decoder.clock = time.process_time
    running = [decoder.rounds(requests) for decoder in decoders.values()]
    while running:
        running = [rounds for rounds in running if sum(1 for _ in islice(rounds, TURN)) == TURN]
        running.reverse()  # plain and scheduled decoding find the caches as warm as each other, on average
    return {mode: decoder.timings for mode, decoder in decoders.items()}


def measured(session: RunSession, requests: list[DecodeRequest], size: int, make: Any) -> dict[str, Any]:
    """One row of the result."""
    found = [decode(session, requests, size, make("scheduled"), repeat) for repeat in range(REPEATS + 1)][1:]
    speeds = {mode: sum(one[mode].tokens for one in found) / sum(one[mode].total_seconds for one in found)
              for mode in MODES}  # the first repeat allocates and is left out
    single = [ratio({mode: timings.tokens / timings.total_seconds for mode, timings in one.items()}) for one in found]
    drafted = sum(one["scheduled"].draft_steps for one in found) / sum(one["scheduled"].steps for one in found)
    return {"batch_size": size, **{mode: round(value, 2) for mode, value in speeds.items()},
            "rounds_that_drafted": round(drafted, 3), "ratio": round(ratio(speeds), 4),
            "spread": [round(min(single), 4), round(max(single), 4)]}


def main() -> None:
    """Print the line."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    config, session = open_run(sys.argv[1])
    sizes = [int(value) for value in sys.argv[2:]] or [1, 4, 16, 32]
    cost = CostTable.from_cells(profiled(config, session, sizes).cells)
    known = recorded_logits(run_dir(config) / "confidence" / "records.npz", session.drafter_sha256)
    make = scheduler_factory(cost, session.drafter.shape.draft_length, config.scheduler, calibration(config, session),
                             logits=known)
    rows = [measured(session, requests_of(config, max(16, 2 * size)), size, make) for size in sizes]
    sys.stdout.write(json.dumps({"benchmark": "scheduled_decoding", "run": Path(sys.argv[1]).name, "rows": rows,
                                 "repeats": REPEATS, "tokens_per_answer": TOKENS, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
