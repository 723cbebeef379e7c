"""What a schedule costs the host: both forms, vectorised as used, against one loop over the candidates.

    OMP_NUM_THREADS=1 python benchmarks/scheduler_time.py [requests draft_tokens]

512 requests with 16 draft tokens each unless told otherwise, confidences at random, costs of a convex and of a stair
curve priced once per request count, as the decoder does. Prints one JSON line: per form and curve the median and the
lowest CPU milliseconds of a decision, those of the loop, their ratio, and whether both decided alike. The capacity of
the asynchronous form is made of settled rounds, so a server may search it while the target runs: ``ranking_ms`` is what
is left in front of the verification then.
"""

import json
import platform
import sys
import time
from functools import partial
from typing import Any, Callable

import numpy as np

from deepspec.scheduling import Floats, Ints, schedule_budget, schedule_prefixes

REPEATS, LOOP_REPEATS = 200, 5
Rates = Callable[[Any], Floats]


def ranked(survival: Floats) -> list[tuple[float, int]]:
    """Candidates (survival, request) in the order of admission."""
    flat = [(float(value), row, place) for row, line in enumerate(survival) for place, value in enumerate(line)]
    return [(value, row) for value, row, _ in sorted(flat, key=lambda item: (-item[0], item[1], item[2]))]


def loop_prefixes(survival: Floats, rates: Rates) -> Ints:
    """Algorithm 1 as it is written down."""
    requests = len(survival)
    lengths, tau = np.zeros(requests, dtype=np.int64), float(requests)
    best, size = tau * float(rates(requests)), requests
    for value, row in ranked(survival):
        after = (tau + value) * float(rates(size + 1))
        if after <= best:
            break
        best, tau, size = after, tau + value, size + 1
        lengths[row] += 1
    return lengths


def loop_budget(survival: Floats, lagged: Floats, rates: Rates) -> Ints:
    """Sec. 5.2: a capacity by global search over ``lagged``, then the best candidates of now."""
    requests = len(survival)
    tau, best, capacity = float(requests), requests * float(rates(requests)), 0
    for count, (value, _) in enumerate(ranked(lagged), start=1):
        tau += value
        theta = tau * float(rates(requests + count))
        if theta > best:
            best, capacity = theta, count
    lengths = np.zeros(requests, dtype=np.int64)
    for _, row in ranked(survival)[:capacity]:
        lengths[row] += 1
    return lengths


def milliseconds(decide: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median and lowest CPU time of a call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        decide()
        times.append(1e3 * (time.process_time() - began))
    return float(np.median(times)), min(times)


def main(requests: int = 512, length: int = 16) -> None:
    """Print the line."""
    random = np.random.default_rng(0)
    survival, lagged = (np.cumprod(random.uniform(0.5, 1.0, (requests, length)), axis=1).astype(np.float32).astype(
        np.float64) for _ in range(2))
    size = np.arange(requests * (1 + length) + 1)
    curves = {"convex": 20.0 + 0.01 * size + 2e-6 * size ** 2, "stairs": 20.0 + 2.0 * np.ceil(size / 256)}
    result: dict[str, Any] = {}
    for name, seconds in curves.items():
        def rates(at: Any, table: Floats = 1.0 / seconds) -> Floats:
            return table[at]

        forms: dict[str, tuple[Callable[..., Any], Callable[..., Ints], tuple[Any, ...]]] = {
            "schedule_prefixes": (schedule_prefixes, loop_prefixes, (survival, rates)),
            "schedule_budget": (schedule_budget, loop_budget, (survival, lagged, rates))}
        for form, (used, loop, inputs) in forms.items():
            median, least = milliseconds(partial(used, *inputs), REPEATS)
            slow = milliseconds(partial(loop, *inputs), LOOP_REPEATS)[0]
            result[f"{form}, {name}"] = {
                "median_ms": round(median, 3), "lowest_ms": round(least, 3), "loop_ms": round(slow, 2),
                "ratio": round(slow / median, 1), "equal": bool((used(*inputs).lengths == loop(*inputs)).all())}
    ranking = milliseconds(partial(schedule_budget, survival, None, rates), REPEATS)
    print(json.dumps({"benchmark": "scheduler_time", "requests": requests, "draft_tokens": length, **result,
                      "ranking_ms": [round(value, 3) for value in ranking], "numpy": np.__version__,
                      "cpu": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    main(*[int(value) for value in sys.argv[1:]])
