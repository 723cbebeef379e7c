"""Profile of a running vLLM server through its Prometheus metrics. Written after vLLM 0.32; untested live.

vLLM keeps no record of steps, but counts them: ``iteration_tokens_total`` has one observation per step, and
``inter_token_latency_seconds`` one per request and step, taken in the engine. Under a steady burst of R requests the
mean latency between two readings is the mean time of a step. The number of verified tokens follows from the draft
counters; one server verifies one length, so profile servers with different ``num_speculative_tokens`` one after the
other with ``profile.extend=true``.
"""

import logging
import re
import threading
from typing import Any, Optional

import httpx
import numpy as np

from deepspec.config.schema import ProfileConfig
from deepspec.errors import InputRefused
from deepspec.profiling.measure import RoundTime, Shape
from deepspec.profiling.served import PATIENCE_SECONDS, RAMP_STEPS, Http, prompt_ids, require_steady

log = logging.getLogger(__name__)
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)")
_PROBE = Shape(1, 1, 16)  # a burst that shows how many tokens the server verifies
_PROBE_STEPS = 16
_READING_SECONDS = 0.1
_STEPS_PER_READING = 16  # more are read when steps are short: the burst is then repeated


def read_metrics(text: str) -> dict[str, float]:
    """Values by metric name in the text format of Prometheus, summed over labels (engines). Buckets are left out."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or line.startswith("#") or found["name"].endswith("_bucket"):
            continue
        try:
            values[found["name"]] = values.get(found["name"], 0.0) + float(found["value"])
        except ValueError:
            continue
    return values


class VllmEngine:
    """See the module."""

    def __init__(self, http: Http, *, seed: int = 0, vocab_size: Optional[int] = None) -> None:
        self._http = http
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size or 32000
        models = http.get("/v1/models").json().get("data") or []
        if not models:
            raise InputRefused(f"profile.endpoint={http.endpoint}: the server lists no model. Is it vLLM?")
        self._model = str(models[0]["id"])
        self._version = str(http.get("/version").json().get("version", "of unknown version"))
        for name in ("iteration_tokens_total_count", "inter_token_latency_seconds_sum"):
            if f"vllm:{name}" not in self._metrics():
                raise InputRefused(f"profile.endpoint={http.endpoint}: /metrics has no vllm:{name}. Start vLLM 0.11 or "
                                   "later without --disable-log-stats.")
        self._length = self._draft_length()

    def _metrics(self) -> dict[str, float]:
        return read_metrics(self._http.get("/metrics").text)

    def _draft_length(self) -> int:
        """Draft tokens the server verifies per request and step; 0 without speculation."""
        before = self._metrics()
        if "vllm:spec_decode_num_drafts_total" not in before:
            return 0
        self._load(_PROBE, _PROBE_STEPS)
        after = self._metrics()
        drafts, tokens = (after[f"vllm:spec_decode_num_{name}_total"] - before[f"vllm:spec_decode_num_{name}_total"]
                          for name in ("drafts", "draft_tokens"))
        if drafts <= 0:
            raise InputRefused(f"profile.endpoint={self._http.endpoint}: the server speculates, but drafted nothing in "
                               "a trial. Look at its log.")
        return round(tokens / drafts)

    def conditions(self) -> dict[str, Any]:
        """What the server says about itself: vLLM tells neither hardware nor dtype."""
        return {"engine": f"vllm {self._version}", "hardware": "not reported by the server", "dtype": "auto"}

    def shapes(self, config: ProfileConfig) -> list[Shape]:
        """Every request count and context at the length this server verifies."""
        return [Shape(requests, 1 + self._length, depth) for depth in sorted(set(config.kv_lengths))
                for requests in sorted(set(config.num_reqs))
                if requests * (1 + self._length) <= config.max_batch_tokens]

    def burst(self, shape: Shape, samples: int) -> list[RoundTime]:
        """One sample per pair of readings between which all requests were running and no prompt was fed."""
        tokens = (RAMP_STEPS + samples * _STEPS_PER_READING) * (1 + self._length)
        deadline = self._http.clock() + PATIENCE_SECONDS
        kept: list[RoundTime] = []
        seen = 0
        load: Optional[threading.Thread] = None
        before = self._metrics()
        while self._http.clock() < deadline and len(kept) < samples:
            if load is None or not load.is_alive():  # a burst may end before enough readings were good
                load = threading.Thread(target=self._load, args=(shape, tokens), daemon=True)
                load.start()
                started = before["vllm:iteration_tokens_total_count"]
            self._http.sleep(_READING_SECONDS)
            after = self._metrics()
            steps = after["vllm:iteration_tokens_total_count"] - before["vllm:iteration_tokens_total_count"]
            if steps and after["vllm:iteration_tokens_total_count"] - started > RAMP_STEPS and load.is_alive():
                seen += 1
                sample = self._sample(before, after, steps, shape)
                if sample is not None:
                    kept.append(RoundTime(0.0, sample, sample))
            before = after
        if load is not None:
            load.join(timeout=PATIENCE_SECONDS)
        require_steady(kept, seen, shape, samples)
        return kept

    @staticmethod
    def _sample(before: dict[str, float], after: dict[str, float], steps: float, shape: Shape) -> Optional[float]:
        """Seconds of a step; None if the requests were not all there, or a prompt came in between."""
        if after.get("vllm:prompt_tokens_total") != before.get("vllm:prompt_tokens_total"):
            return None
        counted, spent = (after[f"vllm:inter_token_latency_seconds_{part}"]
                          - before[f"vllm:inter_token_latency_seconds_{part}"] for part in ("count", "sum"))
        # One observation per request and step; the reading itself may cut a step in two.
        if abs(counted - steps * shape.num_reqs) > shape.num_reqs or counted <= 0:
            return None
        return spent / counted

    def _load(self, shape: Shape, tokens: int) -> None:
        """Equal requests in one call; the server batches them."""
        body = {"model": self._model, "prompt": prompt_ids(shape, self._vocab_size, self._random),
                "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        try:
            self._http.client.post("/v1/completions", json=body, timeout=PATIENCE_SECONDS).raise_for_status()
        except httpx.HTTPError as error:
            log.warning("load of %d requests failed: %s", shape.num_reqs, error)
