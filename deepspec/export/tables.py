"""Engine tables from profile cells and acceptance. R requests, B tokens of a step, K draft tokens. Numpy only.

An engine prices a step by its own rule, so the same cells become different files: SGLang's 1-D loader looks at the
probe *below* a token count, its 2-D loader adds a term of requests and a term of tokens, vLLM takes ranges of requests.
"""

from typing import Any, Iterable, Optional, Sequence

import numpy as np

from deepspec.decoding.cost import ProfileCell
from deepspec.profiling.additive import AdditiveFit, fit_additive, identifiable

__all__ = ["AdditiveFit", "fit_additive", "identifiable"]
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
