"""Simulated against measured throughput of the batched decoder, on loads and domain mixes that nothing was fitted on.

    OMP_NUM_THREADS=1 python benchmarks/simulation_accuracy.py runs/tiny 64 1 4 16

(run, longest answer in tokens, concurrencies)

Everything happens in this run: the profile is measured in parts, before, between and after passes of decoding, because
a machine's speed drifts; traces come from one half of the held-out conversations, the decoded prompts are the other
half, in two domain mixes. Times are CPU seconds of one thread, so that other jobs on the machine disturb little. Prints
one JSON line: per mix, way of decoding and concurrency the simulated and the measured tokens per second, their relative
error, and the lowest and highest of the passes (``spread``): what of an error chance and the machine can explain.
``same_error`` is the error with traces of the decoded conversations themselves, drawn with other random numbers: what
it is smaller by comes from the halves not being alike.
"""

import json
import logging
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from scheduled_decoding import calibration, open_run

from deepspec.config.schema import Config, ProfileConfig, SchedulerConfig
from deepspec.decoding.cost import ProfileCell
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeTimings
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
PASSES = 3  # of decoding, with other random numbers; a part of the profile lies before, between and after them
CONTEXTS = [64, 256]  # between which prices are interpolated: a batch costs what its longest context does
MODES = ("none", "fixed", "scheduled")
CLOCK = time.process_time


def profile(config: Config, session: RunSession, sizes: Sequence[int], seed: int) -> tuple[Any, dict[str, Any]]:
    """Cells and extras of one part of the profile."""
    length = session.drafter.shape.draft_length
    options = ProfileConfig(num_reqs=sorted({1, 2, 4, *sizes}), verify_lengths=sorted({0, 1, 2, 4, length}),
                            kv_lengths=CONTEXTS, prefill_tokens=[32, 128], samples_per_cell=5,
                            warmup=1, max_batch_tokens=1024)
    runner = DecoderRunner(session.target, session.drafter, seed, clock=CLOCK)
    extras = ExtrasSampler(runner, options, seed=seed)
    cells = measure(runner, grid(options, length), options, seed=seed, each_pass=extras.sample).cells
    return cells, extras.result()


def merged(parts: Sequence[tuple[Sequence[ProfileCell], dict[str, Any]]]) -> StepCosts:
    """The mean of all parts, cell by cell."""
    groups: dict[tuple[int, int, int], list[ProfileCell]] = defaultdict(list)
    for cells, _ in parts:
        for cell in cells:
            groups[cell.num_reqs, cell.verify_tokens, cell.kv_len].append(cell)
    names = ("p10_ms", "p50_ms", "p90_ms", "draft_ms", "verify_ms", "host_ms")
    means: list[dict[str, Any]] = [{name: float(np.mean([getattr(cell, name) for cell in group])) for name in names}
                                   for group in groups.values()]
    cells = [replace(group[0], **values) for group, values in zip(groups.values(), means, strict=True)]
    extras = [one for _, one in parts]
    alone = [{**group[0], "p50_ms": float(np.mean([one["p50_ms"] for one in group]))}
             for group in zip(*(one["rounds_alone"] for one in extras))]
    prefill = [PrefillCell(group[0].tokens, group[0].n, float(np.mean([one.alone_ms for one in group])),
                           float(np.mean([one.drafting_ms for one in group])))
               for group in zip(*([PrefillCell(**one) for one in part["prefill"]] for part in extras))]
    return StepCosts.from_cells(cells, {"alone": alone, "prefill": prefill, "padded": True})


def decode(session: RunSession, requests: Sequence[DecodeRequest], size: int, mode: str, scheduler: Any,
           seed: int, tokens: int) -> tuple[list[Any], DecodeTimings]:
    """Answers, and their timings in CPU seconds."""
    decoder = SpeculativeDecoder(session.target, session.drafter, Sampling(temperature=1.0, seed=seed), batch_size=size,
                                 max_new_tokens=tokens, mode=mode, scheduler=scheduler)
    decoder.clock = CLOCK
    return list(decoder.decode(requests)), decoder.timings


def recorded(session: RunSession, requests: Sequence[DecodeRequest], size: int, tokens: int) -> Traces:
    """Traces of two decodes with whole blocks."""
    found = [result for seed in (11, 12)
             for result in decode(session, requests, size, "fixed", None, seed, tokens)[0]]
    return traces_of(found, session.drafter.shape.draft_length, drafter_sha256=session.drafter_sha256)


def halves_of(config: Config) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
    """Held-out prompts for the traces and, other conversations, for decoding; even over domains and prompt lengths, or
    the error would be chance in who came into which half."""
    found = sorted(held_out_requests(config, None), key=lambda item: (item.domain, len(item.prompt_ids), item.id))
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


def measure_pairs(session: RunSession, subject: Subject, test: Sequence[DecodeRequest],
                  mixes: Sequence[dict[str, float]], sizes: Sequence[int], tokens: int,
                  seed: int) -> dict[tuple[int, str, int], DecodeTimings]:
    """One pass of decoding: every mix, way and concurrency."""
    found = {}
    for place, size in product(range(len(mixes)), sizes):
        requests = mixed(test, mixes[place], requests_at(size))
        for mode in MODES:
            policy = subject.policy(mode, SchedulerConfig())
            scheduler = policy.scheduler() if policy.scheduler is not None else None
            found[place, mode, size] = decode(session, requests, size, mode, scheduler, seed, tokens)[1]
    return found


def requests_at(size: int) -> int:
    """Requests of one pass: many for one at a time, and enough to keep every slot busy most of the time."""
    return max(16, 4 * size)


def main() -> None:
    """Print the line."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    config, session = open_run(sys.argv[1])
    tokens, *sizes = [int(value) for value in sys.argv[2:]] or [64, 1, 4, 16]
    fit, test = halves_of(config)
    parts = [profile(config, session, sizes, 0)]
    traces, same = (recorded(session, half, max(sizes), tokens) for half in (fit, test))
    known = Subject("run", traces, merged(parts), calibration=calibration(config, session))
    mixes = mixes_of(sorted({item.domain for item in test}))
    passes = []
    for turn in range(PASSES):
        passes.append(measure_pairs(session, known, test, mixes, sizes, tokens, 5 + turn))
        parts.append(profile(config, session, sizes, 1 + turn))
    subject = replace(known, costs=merged(parts))
    pairs: list[dict[str, Any]] = []
    for place, mode, size in passes[0]:
        timings = [one[place, mode, size] for one in passes]
        actual = sum(one.tokens for one in timings) / sum(one.total_seconds for one in timings)
        single = [one.tokens / one.total_seconds for one in timings]
        expected = predict(traces, subject, mode, mixes[place], size, requests_at(size))
        own = predict(same, replace(subject, traces=same), mode, mixes[place], size, requests_at(size))
        pairs.append({"mix": mixes[place], "mode": mode, "concurrency": size, "simulated": round(expected, 2),
                      "measured": round(actual, 2), "error": round(expected / actual - 1.0, 4),
                      "same_error": round(own / actual - 1.0, 4),
                      "spread": [round(min(single), 2), round(max(single), 2)]})
    errors, same_errors = ([abs(pair[kind]) for pair in pairs] for kind in ("error", "same_error"))
    sys.stdout.write(json.dumps({
        "benchmark": "simulation_accuracy", "run": Path(sys.argv[1]).name, "pairs": pairs,
        "worst_error": max(errors), "within_15_percent": sum(error <= 0.15 for error in errors),
        "worst_same_error": max(same_errors), "same_within_15_percent": sum(error <= 0.15 for error in same_errors),
        "conversations": [len(fit), len(test)], "answer_tokens_at_most": tokens, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
