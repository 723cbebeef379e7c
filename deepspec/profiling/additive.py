"""The additive form of a round's cost, ``T(R, B) = bias + alpha(R) + theta(B)``: what engines' 2-D tables can hold.

R requests, B tokens of a step. Numpy only.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from deepspec.decoding.cost import ProfileCell


@dataclass(frozen=True)
class AdditiveFit:
    """Seconds of a round, ``T(R, B) = bias + alpha(R) + theta(B)``; alpha and theta start at 0 and do not decrease."""

    bias: float
    requests: tuple[int, ...]
    alpha: tuple[float, ...]
    tokens: tuple[int, ...]
    theta: tuple[float, ...]
    max_rel_residual: float

    def seconds(self, requests: float, batch_tokens: float) -> float:
        """T(R, B), linear between probes and constant outside, as the engine does it."""
        return (self.bias + float(np.interp(requests, self.requests, self.alpha))
                + float(np.interp(batch_tokens, self.tokens, self.theta)))


def identifiable(cells: Sequence[ProfileCell]) -> Optional[str]:
    """None when the grid can tell the price of a request from that of a token; otherwise why it cannot."""
    requests = sorted({cell.num_reqs for cell in cells})
    tokens = sorted({cell.batch_tokens for cell in cells})
    if len(requests) < 2 or len(tokens) < 2:
        return "fewer than two request counts or token counts"
    neighbours: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for cell in cells:
        row, column = ("R", cell.num_reqs), ("B", cell.batch_tokens)
        neighbours[row].add(column)
        neighbours[column].add(row)
    reached, queue = {("R", requests[0])}, [("R", requests[0])]
    while queue:
        for node in neighbours[queue.pop()] - reached:
            reached.add(node)
            queue.append(node)
    if len(reached) < len(requests) + len(tokens):
        return "cells are not connected: no token count was measured under two request counts (diagonal grid)"
    return None


def fit_additive(cells: Sequence[ProfileCell]) -> AdditiveFit:
    """Least squares on the median round times of an ``identifiable`` grid, relative errors weighted equally."""
    requests = sorted({cell.num_reqs for cell in cells})
    tokens = sorted({cell.batch_tokens for cell in cells})
    seconds = np.array([cell.p50_ms / 1e3 for cell in cells])
    design = np.zeros((len(cells), 1 + len(requests) + len(tokens)))
    for index, cell in enumerate(cells):
        row, column = requests.index(cell.num_reqs), tokens.index(cell.batch_tokens)
        design[index, [0, 1 + row, 1 + len(requests) + column]] = 1.0
    keep = np.ones(design.shape[1], dtype=bool)
    keep[[1, 1 + len(requests)]] = False  # the smallest of each is the origin
    solution = np.zeros(design.shape[1])
    solution[keep] = np.linalg.lstsq(design[:, keep] / seconds[:, None], np.ones(len(cells)), rcond=None)[0]
    alpha = np.maximum.accumulate(np.maximum(solution[1:1 + len(requests)], 0.0))
    theta = np.maximum.accumulate(np.maximum(solution[1 + len(requests):], 0.0))
    # The clamps only ever raise prices; the bias takes back what they added on average.
    base = design[:, 1:] @ np.concatenate([alpha, theta])
    bias = max(float(np.median(seconds - base)), 1e-6)
    residual = float(np.abs((bias + base) / seconds - 1.0).max())
    return AdditiveFit(
        bias, tuple(requests), tuple(map(float, alpha)), tuple(tokens), tuple(map(float, theta)), residual)
