"""Profiles of servers, replayed in the shape SGLang 0.5.23 and vLLM 0.32 reply, and what must be refused."""

import json
import threading
import time
from typing import Any, Callable, Optional

import httpx
import pytest

from deepspec.config.schema import ProfileConfig
from deepspec.decoding.cost import CostTable
from deepspec.errors import InputRefused
from deepspec.profiling.measure import Shape
from deepspec.profiling.served import RAMP_STEPS, Http, measure_server
from deepspec.profiling.sglang import SglangEngine
from deepspec.profiling.vllm import VllmEngine, read_metrics

CONFIG = ProfileConfig(num_reqs=[1, 4], verify_lengths=[0, 3, 7], kv_lengths=[16], samples_per_cell=6, warmup=1,
                       max_batch_tokens=64)


def http(answer: Callable[[httpx.Request], httpx.Response], seconds: float = 0.1) -> Http:
    """A client of a replayed server; so many ``seconds`` pass per look at it."""
    ticks = iter(range(100_000))
    found = Http.open("http://server:30000", httpx.MockTransport(answer))
    found.sleep, found.clock = (lambda seconds: time.sleep(0.001)), (lambda: seconds * next(ticks))
    return found


class Sglang:
    """Makes five steps between two looks while a load runs; the first of each burst has fewer requests."""

    def __init__(self, mode: str = "compact", ranks: int = 1, parts: bool = True, **changes: Any) -> None:
        self.mode, self.ranks, self.parts, self.changes = mode, ranks, parts, changes
        self.share, self.load, self.count = 1.0, 0, 100
        self.records: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.gate = threading.Event()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if request.method == "POST":
            self.posted.append((request.url.path, body))
        if request.url.path == "/set_internal_state":
            self.share = body["server_args"]["dspark_force_budget_frac"]
            return httpx.Response(200, json=[{"updated": True}])
        if request.url.path == "/generate":
            self.load = len(body["input_ids"]) // self.ranks
            self.gate.set()
            return httpx.Response(200, json=[])
        if request.url.path in ("/flush_cache", "/abort_request"):
            self.load = 0
            self.gate.clear()
            return httpx.Response(200, json={})
        self.gate.wait(timeout=0.01)
        if self.load:
            self.steps()
        payload = {"mode": self.mode, "gamma": 7, "verify_num_draft_tokens": 8, "simulate_acc_len": 1.0,
                   "components": ["core", "step_cpu_time"]} | self.changes
        states = [{"dspark_info_record": payload | {"records": rows}} for rows in self.records]
        return httpx.Response(200, json={"speculative_algorithm": "DSPARK", "version": "0.5.23", "tp_size": 2,
                                         "dtype": "bfloat16", "internal_states": states})

    def steps(self) -> None:
        tokens = self.load + int(self.share * self.load * 7)
        for _ in range(5):
            self.count += 1
            for rank, rows in enumerate(self.records):
                verify = 4.0 + 0.1 * tokens + 0.01 * rank
                row = {"forward_ct": self.count, "bs": self.load, "num_running_reqs": self.load,
                       "num_verify_tokens": tokens, "step_cpu_ms": verify + 1.5}
                if self.parts:
                    row |= {"draft_gpu_ms": 1.0, "target_verify_gpu_ms": verify}
                rows.append(row)


def test_sglang_cells_are_medians_of_aligned_steps() -> None:
    server = Sglang()
    engine = SglangEngine(http(server), vocab_size=1000)
    measured = measure_server(engine, CONFIG, seed=1)
    cells = {(cell.num_reqs, cell.verify_tokens): cell for cell in measured.cells}
    assert set(cells) == {(1, 1), (1, 4), (1, 8), (4, 1), (4, 4), (4, 8)} and measured.partial is None
    for (requests, tokens), cell in cells.items():
        assert cell.n >= 6 and cell.kv_len == 16
        assert cell.verify_ms == pytest.approx(4.0 + 0.1 * requests * tokens)
        assert cell.draft_ms == 1.0 and cell.host_ms == pytest.approx(0.5)
        assert cell.p50_ms == pytest.approx(5.5 + 0.1 * requests * tokens)
    assert CostTable.from_cells(measured.cells).draft_seconds(4) == pytest.approx(1e-3)
    generated = [body for path, body in server.posted if path == "/generate"]
    assert len(generated) == 2 + 6  # two warm-up bursts
    assert all(len(ids) == 16 and 100 <= min(ids) and max(ids) < 900 for ids in generated[-1]["input_ids"])
    assert generated[-1]["sampling_params"]["ignore_eos"] and generated[-1]["sampling_params"]["temperature"] == 1.0
    orders = []
    for seed in (1, 1, 2):
        again = Sglang()
        measure_server(SglangEngine(http(again), vocab_size=1000), CONFIG, seed=seed)
        orders.append([body["server_args"]["dspark_force_budget_frac"] for path, body in again.posted
                       if path == "/set_internal_state"])
    assert orders[0] == orders[1] != orders[2]
    conditions = engine.conditions()
    assert conditions["engine"] == "sglang 0.5.23, compact mode" and conditions["parallel"]["tensor"] == 2


def test_sglang_ranks_are_aligned_and_static_mode_knows_one_length() -> None:
    engine = SglangEngine(http(Sglang(mode="static", ranks=2, parts=False)), vocab_size=1000)
    assert engine.shapes(CONFIG) == [Shape(1, 8, 16), Shape(4, 8, 16)]
    cell = measure_server(engine, CONFIG).cells[0]
    assert cell.draft_ms == 0.0 and cell.host_ms == 0.0
    assert cell.p50_ms == pytest.approx(4.0 + 0.8 + 1.5 + 0.005)


@pytest.mark.parametrize("changes, said", [
    ({"simulate_acc_len": None}, "simulate_acc_len is None"),
    ({"components": ["core"]}, "lacks \\['step_cpu_time'\\]"),
])
def test_sglang_servers_that_cannot_be_profiled_are_told_how(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputRefused, match=said) as error:
        SglangEngine(http(Sglang(**changes)))
    assert "SGLANG_SIMULATE_ACC_LEN=1.0" in str(error.value)


def test_other_servers_and_dead_ones_are_refused() -> None:
    with pytest.raises(InputRefused, match="speculative_algorithm='EAGLE'"):
        SglangEngine(http(lambda request: httpx.Response(200, json={"speculative_algorithm": "EAGLE"})))
    with pytest.raises(InputRefused, match="dspark_info_record"):
        SglangEngine(http(lambda request: httpx.Response(200, json={
            "speculative_algorithm": "DSPARK", "internal_states": [{}]})))
    for engine in (SglangEngine, VllmEngine):
        with pytest.raises(InputRefused, match="http://server:30000.*404"):
            engine(http(lambda request: httpx.Response(404)))


def test_a_burst_that_never_reaches_its_requests_is_refused() -> None:
    class Smaller(Sglang):
        def steps(self) -> None:
            wanted, self.load = self.load, min(self.load, 2)
            super().steps()
            self.load = wanted

    with pytest.raises(InputRefused, match="0 of 6 steps of 4 requests"):
        SglangEngine(http(Smaller(), seconds=20.0), vocab_size=1000).burst(Shape(4, 4, 16), 6)


class Vllm:
    """Steps on its own while a burst runs; ``intruder`` adds another client's prompt now and then."""

    def __init__(self, length: Optional[int] = 3, intruder: bool = False) -> None:
        self.length, self.intruder = length, intruder
        self.steps = self.latencies = self.drafts = self.prompts = 0
        self.seconds = 0.0
        self.posted: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        if request.url.path == "/v1/completions":
            body = json.loads(request.content)
            self.posted.append(body)
            with self.lock:
                self.prompts += sum(map(len, body["prompt"]))
            for _ in range(0, body["max_tokens"], 1 + (self.length or 0)):
                self.advance(len(body["prompt"]))
            return httpx.Response(200, json={})
        with self.lock:
            return httpx.Response(200, text=self.text())

    def advance(self, requests: int) -> None:
        time.sleep(0.0005)
        with self.lock:
            self.steps += 1
            self.latencies += requests
            self.drafts += requests
            self.seconds += requests * (0.004 + 0.0001 * requests * (1 + (self.length or 0)))
            self.prompts += 5 if self.intruder and self.steps % 7 == 0 else 0

    def text(self) -> str:
        lines = [
            "# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.",
            "# TYPE vllm:iteration_tokens_total histogram",
            'vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0',
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {float(self.steps)}',
            f'vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} {float(self.latencies)}',
            f'vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {self.seconds:.9f}',
            f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {float(self.prompts)}',
        ]
        if self.length is not None:
            lines += [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {float(self.drafts)}',
                      f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} '
                      f'{float(self.drafts * self.length)}']
        return "\n".join(lines) + "\n"


@pytest.mark.parametrize("length", [3, None])
def test_vllm_cells_are_latencies_per_step_at_the_length_it_verifies(length: Optional[int]) -> None:
    server = Vllm(length)
    engine = VllmEngine(http(server), vocab_size=1000)
    measured = measure_server(engine, CONFIG)
    tokens = 1 + (length or 0)
    assert [(cell.num_reqs, cell.verify_tokens) for cell in measured.cells] == [(1, tokens), (4, tokens)]
    for cell in measured.cells:
        assert cell.n == 6 and cell.p50_ms == pytest.approx(4.0 + 0.1 * cell.num_reqs * tokens, rel=1e-6)
    burst = server.posted[-1]
    assert burst["ignore_eos"] and burst["max_tokens"] >= RAMP_STEPS + 6 and burst["model"] == "m"
    assert engine.conditions()["engine"] == "vllm 0.32.0"


def test_vllm_readings_with_other_traffic_are_left_out() -> None:
    cells = VllmEngine(http(Vllm(None, intruder=True)), vocab_size=1000).burst(Shape(4, 1, 16), 6)
    assert len(cells) == 6 and all(cell.total == pytest.approx(0.0044) for cell in cells)


def test_metrics_are_summed_over_engines_and_buckets_left_out() -> None:
    text = 'a_bucket{le="1"} 4\na{engine="0"} 1.5\na{engine="1"} 2\n# b 3\nc 7e2\nnot a line at all\nd NaN\n'
    values = read_metrics(text)
    assert values["a"] == 3.5 and values["c"] == 700.0 and "a_bucket" not in values and "b" not in values


def test_metrics_without_step_counters_are_refused() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text="vllm:num_requests_running 0\n")
        return httpx.Response(200, json={"data": [{"id": "m"}], "version": "0.8"})

    with pytest.raises(InputRefused, match="iteration_tokens_total_count"):
        VllmEngine(http(answer))


def test_a_grid_that_the_server_cannot_run_is_refused() -> None:
    engine = SglangEngine(http(Sglang(mode="static")), vocab_size=1000)
    with pytest.raises(InputRefused, match="1 cells"):
        measure_server(engine, ProfileConfig(num_reqs=[1], kv_lengths=[16]))
