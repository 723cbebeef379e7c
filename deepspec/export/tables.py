"""Engine tables from profile cells and acceptance. R requests, B tokens of a step, K draft tokens. Numpy only.

An engine prices a step by its own rule, so the same cells become different files: SGLang's 1-D loader looks at the
probe *below* a token count, its 2-D loader adds a term of requests and a term of tokens, vLLM takes ranges of requests.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Sequence

import numpy as np

from deepspec.decoding.cost import ProfileCell

MAX_RESIDUAL = 0.10  # worst relative residual of an additive fit that may still be served


def at_one_depth(cells: Iterable[ProfileCell], kv_len: Optional[int] = None) -> list[ProfileCell]:
    """Cells of one context length (the shallowest unless told): tables cannot mix depths."""
    cells = list(cells)
    depths = {cell.kv_len for cell in cells}
    chosen = kv_len if kv_len in depths else min(depths, default=0)
    return [cell for cell in cells if cell.kv_len == chosen]


def sps_1d(batch_tokens: Sequence[int], steps_per_sec: Sequence[float], max_batch_tokens: int) -> dict[str, Any]:
    """SGLang's 1-D table: what a *floor* lookup must hold so that no count looks cheaper than the probe above it.

    Between two probes the measured cost is unknown and, on padded graphs, that of the next one: the count right after a
    probe therefore already has the next probe's rate. At the probes themselves the lookup returns what was measured.
    """
    tokens = [int(value) for value in batch_tokens]
    seconds = np.maximum.accumulate(1.0 / np.asarray(steps_per_sec, dtype=np.float64))
    rates = [float(rate) for rate in 1.0 / seconds]
    probes = {tokens[-1]: rates[-1]}
    probes |= {below + 1: rate for below, rate in zip(tokens, rates[1:])} | {tokens[0]: rates[0]}
    counts = sorted(probes)
    return {
        "sample_batch_tokens": counts, "sample_steps_per_sec": [probes[count] for count in counts],
        "max_batch_tokens": max(int(max_batch_tokens), tokens[-1]),
    }


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


def sps_2d(fit: AdditiveFit) -> dict[str, Any]:
    """SGLang's additive table, seconds."""
    return {
        "bias_seconds": fit.bias, "bs_probes": list(fit.requests), "alpha_seconds": list(fit.alpha),
        "m_probes": list(fit.tokens), "theta_seconds": list(fit.theta),
    }


def trtllm_cost(fit: AdditiveFit, cells: Sequence[ProfileCell]) -> dict[str, Any]:
    """TensorRT-LLM's decomposed table in ms, in the schema of an open pull request: experimental."""
    return {
        "token_counts": list(fit.tokens), "step_time_ms": [1e3 * value for value in fit.theta],
        "fixed_overhead_ms": 1e3 * fit.bias, "batch_sizes": list(fit.requests),
        "batch_overhead_ms": [1e3 * value for value in fit.alpha],
        "_meta": {
            "experimental": "schema of NVIDIA/TensorRT-LLM pull request #17056; no released version documents it",
            "encoding": "decomposed", "token_unit": "target tokens per step and rank, anchors included",
            "cells": [{
                "batch_size": cell.num_reqs, "verify_len": cell.verify_tokens, "total_verify_tokens": cell.batch_tokens,
                "step_time_ms": cell.p50_ms, "num_samples": cell.n, "p10_ms": cell.p10_ms, "p90_ms": cell.p90_ms,
            } for cell in cells],
            "fit": {"max_rel_residual": fit.max_rel_residual},
        },
    }


def vllm_ranges(fit: AdditiveFit, mean_survival: Sequence[float], max_requests: int) -> list[list[int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: inclusive ranges [start, end, K].

    ``K*(R) = argmax_k R (1 + sum_{j<=k} a_j) / T(R, R (1 + k))`` with the mean prefix survival ``a`` [K] (Sec. 3.2.2
    with equal requests).
    """
    gain = 1.0 + np.concatenate([[0.0], np.cumsum(np.asarray(mean_survival, dtype=np.float64))])
    ranges: list[list[int]] = []
    for requests in range(1, max_requests + 1):
        rates = [gain[k] * requests / fit.seconds(requests, requests * (1 + k)) for k in range(len(gain))]
        best = int(np.argmax(rates))
        if ranges and ranges[-1][2] == best:
            ranges[-1][1] = requests
        else:
            ranges.append([requests, requests, best])
    return ranges
