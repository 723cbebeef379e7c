"""Draw docs/scheduling.svg: what verifying more draft tokens is worth, by Algorithm 1's own functions.

    python benchmarks/scheduling_picture.py docs/scheduling.svg

Nothing is measured: the costs and confidences are an example, written below.
"""

import sys
from pathlib import Path

import numpy as np

from deepspec.calibration import survival_probability
from deepspec.report.svg import Series, line_chart, standalone
from deepspec.scheduling import SpsTable, expected_throughput, schedule_prefixes

# A step costs 10 ms up to 64 tokens (weights are read once, whoever needs them) and 0.1 ms for each token beyond.
PROBES = (1, 64, 512, 4096)
MILLISECONDS = (10.0, 10.0, 54.8, 413.2)
GAMMA = 7
CONFIDENCES = (0.9, 0.75, 0.6)
LOADS = (1, 16, 64)


def table() -> SpsTable:
    """The example's cost curve."""
    return SpsTable.from_samples(PROBES, [1000.0 / cost for cost in MILLISECONDS])


def survival(confidence: float, requests: int) -> np.ndarray:
    """a_{r,j} [requests, GAMMA] where every draft token has the same confidence."""
    return survival_probability(np.full((requests, GAMMA), confidence))


def gains(requests: int, confidence: float = 0.75) -> list[float]:
    """Throughput of verifying 0..GAMMA draft tokens of every request, as a multiple of verifying none."""
    curve, rates = table(), survival(confidence, requests)
    found = [expected_throughput(rates, np.full(requests, length), curve.steps_per_second)
             for length in range(GAMMA + 1)]
    return [value / found[0] for value in found]


def chosen(requests: int, confidence: float) -> float:
    """Draft tokens per request that Algorithm 1 admits."""
    return float(schedule_prefixes(survival(confidence, requests), table().steps_per_second).lengths.mean())


def picture() -> str:
    """Both charts as one SVG file."""
    lengths = list(range(GAMMA + 1))
    left = line_chart([Series(f"{load} requests", lengths, gains(load)) for load in LOADS],
                      x_label="draft tokens verified per request", y_label="throughput, of none verified",
                      description="throughput against verified draft tokens for three loads")
    loads = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    right = line_chart([Series(f"{value:g}", loads, [chosen(load, value) for load in loads]) for value in CONFIDENCES],
                       x_label="requests in the batch", y_label="draft tokens chosen per request", x_log=True,
                       description="draft tokens that Algorithm 1 chooses against load")
    return standalone([("confidence 0.75: what a length is worth", left), ("what Algorithm 1 chooses", right)],
                      [f"load {load} | {value:g}" for load, value in zip(LOADS, CONFIDENCES)]) + "\n"


def main(path: str) -> None:
    """Write the picture."""
    Path(path).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
