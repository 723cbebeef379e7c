"""Scheduled decoding against plain decoding and fixed lengths, at several batch sizes, in one run.

    OMP_NUM_THREADS=1 python benchmarks/scheduled_decoding.py runs/tiny 1 4 16 32

The profile is measured here, the three ways take turns on the same prompts, and times are CPU seconds of this process,
so that other jobs on the machine disturb little; what they still do only slows, so the best repeat counts and the
median stands beside it. Answers have one length (end-of-turn tokens do not stop them), or chance in their lengths would
decide. Prints one JSON line: per batch size tokens per CPU second of each way (best repeat), ``ratio``: scheduled
against the better of the other two, and ``ratio_of_medians``.
"""

import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspec.calibration import Calibration
from deepspec.cli import with_stored_overrides
from deepspec.config.compose import compose_config
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config, ProfileConfig
from deepspec.decoding.cost import CostTable
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.profiling.measure import Measurement, grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.profiling.scheduler import recorded_logits, scheduler_factory
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.session import RunSession, load_run

REPEATS = 4
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
    rows = []
    for size in sizes:
        speeds: dict[str, list[float]] = {"none": [], "fixed": [], "scheduled": []}
        drafted = []
        for repeat in range(REPEATS + 1):
            requests = requests_of(config, max(4, 2 * size))
            for mode, found in speeds.items():
                decoder = SpeculativeDecoder(
                    session.target, session.drafter, Sampling(temperature=1.0, seed=repeat), batch_size=size,
                    max_new_tokens=TOKENS, mode=mode, scheduler=make(mode) if mode == "scheduled" else None)
                decoder.clock = time.process_time
                decoder._stop_ids = frozenset()
                for _ in decoder.decode(requests):
                    continue
                if repeat:  # the first pass allocates
                    found.append(decoder.timings.tokens / decoder.timings.total_seconds)
                    if mode == "scheduled":
                        drafted.append(decoder.timings.draft_steps / decoder.timings.steps)
        best = {mode: max(values) for mode, values in speeds.items()}
        medians = {mode: float(np.median(values)) for mode, values in speeds.items()}
        rows.append({"batch_size": size, **{mode: round(value, 2) for mode, value in best.items()},
                     "rounds_that_drafted": round(float(np.mean(drafted)), 3),
                     "ratio": round(ratio(best), 4), "ratio_of_medians": round(ratio(medians), 4)})
    sys.stdout.write(json.dumps({"benchmark": "scheduled_decoding", "run": Path(sys.argv[1]).name, "rows": rows,
                                 "repeats": REPEATS, "tokens_per_answer": TOKENS, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
