"""Profile of a running SGLang server through its SPS record endpoint. Written after SGLang 0.5.23; untested live.

The server must have been started with ``SGLANG_DSPARK_ENABLE_SPS_RECORD=1`` and ``SGLANG_SIMULATE_ACC_LEN=1.0`` (each
step then advances every request by one token, so that contexts grow alike). ``SGLANG_RAGGED_VERIFY_MODE=static``
verifies whole blocks only; ``compact`` lets the budget be forced, which is what tells the price of a request from that
of a token. ``SGLANG_DSPARK_DEBUG_DUMP=draft_gpu_time,target_verify_gpu_time`` adds the parts of a step.
"""

import logging
import threading
from typing import Any, Optional

import httpx
import numpy as np

from deepspec.config.schema import ProfileConfig
from deepspec.errors import InputRefused
from deepspec.profiling.measure import RoundTime, Shape
from deepspec.profiling.served import PATIENCE_SECONDS, POLL_SECONDS, RAMP_STEPS, Http, prompt_ids, require_steady

log = logging.getLogger(__name__)
_NEEDED = {"core", "step_cpu_time"}
_HOW = "Start it with SGLANG_DSPARK_ENABLE_SPS_RECORD=1 SGLANG_SIMULATE_ACC_LEN=1.0 SGLANG_RAGGED_VERIFY_MODE=compact."
_SLACK = 64  # tokens a request may make beyond the steps that are wanted


class SglangEngine:
    """See the module."""

    def __init__(self, http: Http, *, seed: int = 0, vocab_size: Optional[int] = None) -> None:
        self._http = http
        self._random = np.random.default_rng(seed)
        info = self._info()
        if info.get("speculative_algorithm") != "DSPARK":
            raise InputRefused(f"profile.endpoint={http.endpoint}: the server reports speculative_algorithm="
                               f"{info.get('speculative_algorithm')!r}, only DSPARK records its steps. {_HOW}")
        payloads = self._payloads(info)
        for payload in payloads:
            missing = _NEEDED - set(payload.get("components") or ())
            if missing:
                raise InputRefused(f"profile.endpoint={http.endpoint}: the record lacks {sorted(missing)}. {_HOW}")
            if payload.get("simulate_acc_len") != 1.0:
                raise InputRefused(f"profile.endpoint={http.endpoint}: simulate_acc_len is "
                                   f"{payload.get('simulate_acc_len')!r}; with real acceptance contexts drift apart "
                                   f"and no two steps are alike. {_HOW}")
        self._info_at_start = info
        self._length = int(payloads[0]["verify_num_draft_tokens"]) - 1
        self._mode = str(payloads[0].get("mode"))
        self._vocab_size = vocab_size or 32000

    def _info(self) -> dict[str, Any]:
        found = self._http.get("/server_info").json()
        return found if isinstance(found, dict) else {}

    def _payloads(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """The record of each data-parallel rank."""
        states = info.get("internal_states") or []
        payloads = [state.get("dspark_info_record") for state in states]
        if not payloads or any(payload is None for payload in payloads):
            raise InputRefused(f"profile.endpoint={self._http.endpoint}: /server_info has no dspark_info_record. "
                               f"{_HOW}")
        return payloads

    def conditions(self) -> dict[str, Any]:
        """What the server says it runs on; what it does not say is left to the header of the run."""
        info = self._info_at_start
        return {
            "engine": f"sglang {info.get('version', 'of unknown version')}, {self._mode} mode",
            "hardware": str(info.get("device_name") or info.get("device") or "not reported by the server"),
            "dtype": str(info.get("dtype") or "auto"),
            "parallel": {"tensor": int(info.get("tp_size") or 1), "data": len(info.get("internal_states") or [1])},
        }

    def shapes(self, config: ProfileConfig) -> list[Shape]:
        """Whole blocks in static mode, every length that a forced budget gives in compact mode."""
        lengths = sorted({min(length, self._length) for length in config.verify_lengths})
        if self._mode != "compact":
            log.warning("profile: the server runs in %s mode and always verifies %d tokens: the price of a draft token "
                        "stays unknown. Start it in compact mode.", self._mode, self._length)
            lengths = [self._length]
        return [Shape(requests, 1 + length, depth) for depth in sorted(set(config.kv_lengths))
                for requests in sorted(set(config.num_reqs)) for length in lengths
                if requests * (1 + length) <= config.max_batch_tokens]

    def burst(self, shape: Shape, samples: int) -> list[RoundTime]:
        """Steps of ``shape.num_reqs`` equal requests on every rank, aligned over the ranks."""
        if self._mode == "compact":
            self._force_budget(shape)
        self._http.post("/flush_cache", {})
        before = [max((row["forward_ct"] for row in payload["records"]), default=-1)
                  for payload in self._payloads(self._info())]
        load = threading.Thread(target=self._load, args=(shape, samples, len(before)), daemon=True)
        load.start()
        deadline = self._http.clock() + PATIENCE_SECONDS
        steady: list[list[dict[str, Any]]] = []
        seen = 0
        while self._http.clock() < deadline and len(steady) < RAMP_STEPS + samples:
            self._http.sleep(POLL_SECONDS)
            steady, seen = self._aligned(before, shape)
        self._http.post("/abort_request", {"abort_all": True})
        load.join(timeout=PATIENCE_SECONDS)
        kept = steady[RAMP_STEPS:]
        require_steady(kept, max(seen - RAMP_STEPS, 0), shape, samples)
        return [_round_time(step) for step in kept]

    def _force_budget(self, shape: Shape) -> None:
        """The server verifies ``R + int(share R gamma)`` tokens in all."""
        # A hair above the exact share, or rounding in int() would lose a token.
        share = min(1.0, (shape.verify_tokens - 1) / self._length + 1e-9)
        reply = self._http.post("/set_internal_state", {"server_args": {"dspark_force_budget_frac": share}}).json()
        parts = reply if isinstance(reply, list) else [reply]
        if not parts or not all(part.get("updated") if isinstance(part, dict) else part for part in parts):
            raise InputRefused(f"profile.endpoint={self._http.endpoint}: the server refused to force its budget "
                               f"({reply}). It needs SGLang 0.5.23 or later in compact mode.")

    def _load(self, shape: Shape, samples: int, ranks: int) -> None:
        everybody = Shape(shape.num_reqs * ranks, shape.verify_tokens, shape.kv_len)
        body = {"input_ids": prompt_ids(everybody, self._vocab_size, self._random), "stream": False,
                "sampling_params": {"temperature": 1.0, "ignore_eos": True,
                                    "max_new_tokens": RAMP_STEPS + samples + _SLACK}}
        try:
            self._http.client.post("/generate", json=body, timeout=PATIENCE_SECONDS)
        except httpx.HTTPError as error:  # aborted requests may end the connection
            log.debug("load ended: %s", error)

    def _aligned(self, before: list[int], shape: Shape) -> tuple[list[list[dict[str, Any]]], int]:
        """New steps at which every rank ran exactly this many requests, and how many new steps there were."""
        payloads = self._payloads(self._info())
        ranks = [{row["forward_ct"]: row for row in payload["records"]
                  if row["forward_ct"] > mark and row.get("step_cpu_ms") is not None}
                 for payload, mark in zip(payloads, before)]
        common = sorted(set.intersection(*(set(rank) for rank in ranks)))
        steps = [[rank[count] for rank in ranks] for count in common]
        steady = [step for step in steps if all(row["num_running_reqs"] == shape.num_reqs for row in step)]
        if not steady:
            return [], 0
        first, last = steady[0][0]["forward_ct"], steady[-1][0]["forward_ct"]
        return steady, sum(first <= count <= last for count in common)


def _round_time(step: list[dict[str, Any]]) -> RoundTime:
    """Mean over ranks of one step; without recorded parts all of it counts as verification."""
    def mean(key: str) -> Optional[float]:
        values = [row[key] for row in step if row.get(key) is not None]
        return sum(values) / len(values) / 1e3 if len(values) == len(step) else None

    total, draft, verify = mean("step_cpu_ms"), mean("draft_gpu_ms"), mean("target_verify_gpu_ms")
    assert total is not None
    if draft is None or verify is None:
        return RoundTime(0.0, total, total)
    return RoundTime(draft, verify, max(total, draft + verify))
