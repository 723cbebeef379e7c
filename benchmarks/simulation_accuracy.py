"""Simulated against measured throughput of the batched decoder, on loads and domain mixes that nothing was fitted on.

    OMP_NUM_THREADS=1 python benchmarks/simulation_accuracy.py runs/tiny 64 1 4 16

(run, longest answer in tokens, concurrencies)

Everything happens in this run: the profile is measured in two halves, before and after decoding; traces come from one
half of the held-out conversations, the decoded prompts are the other half, in two domain mixes. Times are CPU seconds
of one thread, so that other jobs on the machine disturb little. Prints one JSON line: per mix, way of decoding and
concurrency the simulated and the measured tokens per second and their relative error.
"""

import json
import logging
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from scheduled_decoding import calibration, open_run

from deepspec.config.schema import Config, ProfileConfig, SchedulerConfig
from deepspec.decoding.cost import ProfileCell
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.profiling.extras import ExtrasSampler, PrefillCell
from deepspec.profiling.measure import grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.simulation.costs import StepCosts
from deepspec.simulation.engine import Limits, simulate
from deepspec.simulation.subjects import Subject
from deepspec.simulation.traces import Traces, traces_of
from deepspec.simulation.workload import Workload, draw
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.session import RunSession

SIMULATIONS = 8  # of each pair, with other seeds; their mean is the prediction
MODES = ("none", "fixed", "scheduled")
CLOCK = time.process_time


def profile(config: Config, session: RunSession, sizes: Sequence[int], seed: int) -> tuple[Any, dict[str, Any]]:
    """Cells and extras of one half of the profile."""
    length = session.drafter.shape.draft_length
    options = ProfileConfig(num_reqs=sorted({1, 2, 4, *sizes}), verify_lengths=sorted({0, 1, 2, 4, length}),
                            kv_lengths=config.profile.kv_lengths, prefill_tokens=[32, 128], samples_per_cell=5,
                            warmup=1, max_batch_tokens=1024)
    runner = DecoderRunner(session.target, session.drafter, seed, clock=CLOCK)
    extras = ExtrasSampler(runner, options, seed=seed)
    cells = measure(runner, grid(options, length), options, seed=seed, each_pass=extras.sample).cells
    return cells, extras.result()


def merged(halves: Sequence[tuple[Sequence[ProfileCell], dict[str, Any]]]) -> StepCosts:
    """The mean of both halves, cell by cell."""
    groups: dict[tuple[int, int, int], list[ProfileCell]] = defaultdict(list)
    for cells, _ in halves:
        for cell in cells:
            groups[cell.num_reqs, cell.verify_tokens, cell.kv_len].append(cell)
    names = ("p10_ms", "p50_ms", "p90_ms", "draft_ms", "verify_ms", "host_ms")
    means: list[dict[str, Any]] = [{name: float(np.mean([getattr(cell, name) for cell in group])) for name in names}
                                   for group in groups.values()]
    cells = [replace(group[0], **values) for group, values in zip(groups.values(), means, strict=True)]
    first, second = (extras for _, extras in halves)
    alone = [{**one, "p50_ms": (one["p50_ms"] + other["p50_ms"]) / 2}
             for one, other in zip(first["rounds_alone"], second["rounds_alone"])]
    prefill = [PrefillCell(one["tokens"], one["n"], (one["alone_ms"] + other["alone_ms"]) / 2,
                           (one["drafting_ms"] + other["drafting_ms"]) / 2)
               for one, other in zip(first["prefill"], second["prefill"])]
    return StepCosts.from_cells(cells, {"alone": alone, "prefill": prefill})


def decode(session: RunSession, requests: Sequence[DecodeRequest], size: int, mode: str, scheduler: Any,
           seed: int, tokens: int) -> tuple[list[Any], float]:
    """Answers and tokens per CPU second."""
    decoder = SpeculativeDecoder(session.target, session.drafter, Sampling(temperature=1.0, seed=seed), batch_size=size,
                                 max_new_tokens=tokens, mode=mode, scheduler=scheduler)
    decoder.clock = CLOCK
    results = list(decoder.decode(requests))
    return results, decoder.timings.tokens / decoder.timings.total_seconds


def halves_of(config: Config) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
    """Held-out prompts for the traces and, other conversations, for decoding; even over domains."""
    found = held_out_requests(config, None)
    return found[::2], found[1::2]


def mixed(requests: Sequence[DecodeRequest], mix: dict[str, float], count: int) -> list[DecodeRequest]:
    """``count`` requests of these shares, prompts repeated under other names where there are too few."""
    chosen = []
    for domain, share in mix.items():
        pool = [item for item in requests if item.domain == domain]
        for index in range(round(share * count)):
            item = pool[index % len(pool)]
            chosen.append(replace(item, id=f"{item.id}/{index // len(pool)}"))
    return [chosen[index] for index in np.random.default_rng(0).permutation(len(chosen))]


def mixes_of(domains: Sequence[str]) -> list[dict[str, float]]:
    """Two mixes, both far from the even one the traces have."""
    first, last = domains[0], domains[-1]
    return [{first: 0.75, last: 0.25}, {last: 1.0}]


def predict(traces: Traces, subject: Subject, mode: str, mix: dict[str, float], size: int, count: int) -> float:
    """Mean of simulations that differ in who is drawn."""
    found = []
    for seed in range(SIMULATIONS):
        requests = draw(traces, Workload(count, size, None, mix), np.random.default_rng(seed))
        policy = subject.policy(mode, SchedulerConfig())
        found.append(simulate(traces, subject.costs, policy, Limits(size), requests).tokens_per_second)
    return float(np.mean(found))


def main() -> None:
    """Print the line."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    config, session = open_run(sys.argv[1])
    tokens, *sizes = [int(value) for value in sys.argv[2:]] or [64, 1, 4, 16]
    fit, test = halves_of(config)
    first = profile(config, session, sizes, 0)
    length = session.drafter.shape.draft_length
    recorded = [result for seed in (11, 12)
                for result in decode(session, fit, max(sizes), "fixed", None, seed, tokens)[0]]
    traces = traces_of(recorded, length, drafter_sha256=session.drafter_sha256)
    schedules = Subject("run", traces, merged([first, first]), calibration=calibration(config, session))
    mixes = mixes_of(sorted({item.domain for item in test}))
    measured: dict[tuple[int, str, int], float] = {}
    for place, mix in enumerate(mixes):
        for size in sizes:
            requests = mixed(test, mix, max(8, 2 * size))
            for mode in MODES:
                policy = schedules.policy(mode, SchedulerConfig())
                scheduler = policy.scheduler() if policy.scheduler is not None else None
                measured[place, mode, size] = decode(session, requests, size, mode, scheduler, 5, tokens)[1]
    subject = replace(schedules, costs=merged([first, profile(config, session, sizes, 1)]))
    pairs: list[dict[str, Any]] = []
    for (place, mode, size), actual in measured.items():
        count = len(mixed(test, mixes[place], max(8, 2 * size)))
        expected = predict(traces, subject, mode, mixes[place], size, count)
        pairs.append({"mix": mixes[place], "mode": mode, "concurrency": size, "simulated": round(expected, 2),
                      "measured": round(actual, 2), "error": round(expected / actual - 1.0, 4)})
    sys.stdout.write(json.dumps({
        "benchmark": "simulation_accuracy", "run": Path(sys.argv[1]).name, "pairs": pairs,
        "worst_error": max(abs(pair["error"]) for pair in pairs), "conversations": [len(fit), len(test)],
        "answer_tokens_at_most": tokens, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
