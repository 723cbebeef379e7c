"""The profile's bookkeeping with made-up engines: warm-up, order, limits, memory, staircases; then the real decoder."""

import json
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import numpy as np
import pytest

from deepspec.config.schema import ProfileConfig
from deepspec.decoding.cost import CostTable, ProfileCell, SpsCost
from deepspec.errors import InputRefused
from deepspec.profiling.files import additive_fit, conditions, sps_samples, write_profile
from deepspec.profiling.measure import Measurement, RoundTime, Shape, grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.scheduling import SpsTable, schedule_prefixes
from tests.unit.decoding.tiny import tiny_drafter, tiny_target

CONFIG = ProfileConfig(num_reqs=[1, 2, 4, 8], verify_lengths=[0, 1, 3], kv_lengths=[16], samples_per_cell=5, warmup=2)


class Engine:
    """Charges ``cost(R, B)`` seconds; the first call of each shape compiles for half a minute."""

    def __init__(self, cost: Callable[[int, int], float], limit: Optional[int] = None) -> None:
        self.cost, self.limit = cost, limit
        self.calls: list[Shape] = []

    def prepare(self, kv_len: int, shapes: Sequence[Shape]) -> None:
        self.depth = kv_len

    def run(self, shape: Shape) -> RoundTime:
        assert shape.kv_len == self.depth
        if self.limit is not None and shape.batch_tokens > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        slow = 31.0 if shape not in self.calls else 0.0
        self.calls.append(shape)
        verify, draft = self.cost(shape.num_reqs, shape.batch_tokens), 0.001 * shape.num_reqs
        return RoundTime(draft, verify, draft + verify + 0.0005 + slow)


def additive(requests: int, tokens: int) -> float:
    return 0.004 + 0.0002 * requests + 0.0001 * tokens


def test_compilation_of_a_shape_is_not_measured() -> None:
    measured = measure(Engine(additive), grid(CONFIG, 4), CONFIG)
    assert measured.partial is None and len(measured.cells) == 12
    for cell in measured.cells:
        assert cell.n == 5 and cell.p90_ms < 100
        assert cell.p50_ms == pytest.approx(cell.draft_ms + cell.verify_ms + cell.host_ms)
        assert cell.p10_ms <= cell.p50_ms <= cell.p90_ms


def test_samples_are_taken_in_a_seeded_random_order() -> None:
    orders = []
    for seed in (0, 0, 1):
        engine = Engine(additive)
        measure(engine, grid(CONFIG, 4), CONFIG, seed=seed)
        orders.append(engine.calls[24:])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:12] != orders[0][12:24] and set(orders[0][:12]) == set(orders[0][12:24])


def test_a_time_limit_leaves_at_least_three_samples() -> None:
    ticks = iter(range(10_000))
    options = ProfileConfig(num_reqs=[1, 2], verify_lengths=[0, 1], samples_per_cell=50, seconds_limit=1.0)
    measured = measure(Engine(additive), grid(options, 4), options, clock=lambda: float(next(ticks)))
    assert {cell.n for cell in measured.cells} == {3}


def test_memory_running_out_keeps_what_was_measured_and_says_so(tmp_path: Path) -> None:
    measured = measure(Engine(additive, limit=16), grid(CONFIG, 4), CONFIG)
    assert measured.partial is not None and "8 requests x 4 tokens" in measured.partial
    assert max(cell.batch_tokens for cell in measured.cells) == 16
    table = write_profile(tmp_path, measured, header={}, drafter_sha256="d", parallel=1, max_batch_tokens=256)
    assert table["max_batch_tokens"] == 16 and table["partial"] == measured.partial
    with pytest.raises(InputRefused, match="smallest"):
        measure(Engine(additive, limit=0), grid(CONFIG, 4), CONFIG)


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    class Broken(Engine):
        def run(self, shape: Shape) -> RoundTime:
            raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        measure(Broken(additive), grid(CONFIG, 4), CONFIG)


def test_grid_respects_the_largest_batch_and_the_block() -> None:
    shapes = grid(ProfileConfig(num_reqs=[1, 64], verify_lengths=[0, 7, 15], max_batch_tokens=64), draft_length=7)
    assert [(shape.num_reqs, shape.verify_tokens) for shape in shapes] == [(1, 1), (1, 8), (64, 1)]
    with pytest.raises(InputRefused, match="max_batch_tokens"):
        grid(ProfileConfig(num_reqs=[64], max_batch_tokens=8), 7)


def test_additive_fit_finds_the_bias_or_says_that_it_cannot() -> None:
    measured = measure(Engine(additive), grid(CONFIG, 4), CONFIG)
    fit = additive_fit(measured.cells)
    # The origin is R = 1, B = 1: bias, host, and one request and one token with its draft.
    assert fit["bias_ms"] == pytest.approx(4.0 + 0.5 + 0.2 + 0.1 + 1.0, rel=1e-6)
    assert fit["max_rel_residual"] == pytest.approx(0.0, abs=1e-9)
    diagonal = [cell for cell in measured.cells if cell.verify_tokens == 4]
    unknown = additive_fit(diagonal)
    assert unknown["bias_ms"] is None and unknown["max_rel_residual"] is None and "diagonal" in unknown["reason"]


def test_table_file(tmp_path: Path) -> None:
    measured = measure(Engine(additive), grid(CONFIG, 4), CONFIG)
    write_profile(tmp_path, measured, header={"dtype": "float32"}, drafter_sha256="d", parallel=2, max_batch_tokens=64)
    text = (tmp_path / "sps.json").read_text()
    assert "bias_seconds" not in text
    values = json.loads(text)
    assert values["schema_version"] == 1 and values["kv_len"] == 16
    assert values["fit"]["max_rel_residual"] == pytest.approx(0.0, abs=1e-9) and values["fit"]["reason"] is None
    assert "linear" in values["interpolation"]
    tokens, rates = values["sample_batch_tokens"], values["sample_steps_per_sec"]
    assert all(isinstance(value, int) for value in tokens) and tokens == sorted(set(tokens))
    assert rates == sorted(rates, reverse=True) and values["max_batch_tokens"] >= tokens[-1]
    assert SpsTable.load(tmp_path / "sps.json", dtype="float32").max_batch_tokens == 64
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [ProfileCell(**row) for row in rows] == list(measured.cells)


def test_noise_in_the_cells_stays_in_the_cells() -> None:
    probes = ((1, 2.0), (2, 3.0), (4, 2.5))
    cells = [ProfileCell(1, size, 16, 5, 1.0, cost, 9.0, 0.0, cost, 0.0) for size, cost in probes]
    assert sps_samples(cells) == ([1, 2, 4], [500.0, pytest.approx(1e3 / 3), pytest.approx(1e3 / 3)])


def test_staircase_is_followed_to_the_end_of_a_step() -> None:
    """Cost ceil(B / 8): points at the captured sizes and just above; the schedule fills the step it pays for."""
    options = ProfileConfig(num_reqs=[1], verify_lengths=[0, 7, 8, 15], kv_lengths=[16], samples_per_cell=3)
    measured = measure(Engine(lambda requests, tokens: 0.01 * np.ceil(tokens / 8)), grid(options, 15), options)
    cost = CostTable.from_cells(measured.cells)
    curve = cost.verify_curve(1)
    survival = 0.9 ** np.arange(1, 16)[None]
    assert schedule_prefixes(survival, lambda size: 1 / (0.001 + curve(size))).lengths.tolist() == [7]
    exact = cost.exact().verify_curve(1)
    assert exact(9) == pytest.approx(0.0205) and exact(8) == pytest.approx(0.0105)
    assert float(curve(9)) < float(exact(9))


def test_costs_between_and_beyond_the_grid() -> None:
    cost = CostTable.from_cells(measure(Engine(additive), grid(CONFIG, 4), CONFIG).cells)
    for requests, tokens in ((1, 1), (3, 6), (6, 24), (8, 32), (12, 24), (16, 64)):
        expected = additive(requests, tokens) + 0.0005
        assert float(cost.verify_curve(requests)(tokens)) == pytest.approx(expected, rel=1e-6)
    assert cost.draft_seconds(6) == pytest.approx(0.006) and cost.draft_seconds(12) == pytest.approx(0.012)
    assert float(cost.verify_curve(2)(2 * 9)) > float(cost.verify_curve(2)(2 * 4))


def test_profiles_that_cannot_price_a_token_are_refused(tmp_path: Path) -> None:
    flat = [ProfileCell(1, size, 16, 5, 1.0, 1.0, 1.0, 0.0, 1.0 + 0.01 * size, 0.0) for size in (1, 2, 4)]
    with pytest.raises(InputRefused, match="less than"):
        CostTable.from_cells(flat)
    with pytest.raises(InputRefused, match="two verification lengths"):
        CostTable.from_cells([ProfileCell(size, 1, 16, 5, 1.0, 1.0, 1.0, 0.0, size, 0.0) for size in (1, 2)])
    with pytest.raises(InputRefused, match="not found"):
        CostTable.load(tmp_path / "records.jsonl")
    (tmp_path / "records.jsonl").write_text('{"num_reqs": 1}\n')
    with pytest.raises(InputRefused, match="does not hold profile cells"):
        CostTable.load(tmp_path / "records.jsonl")


def test_one_dimensional_costs_stop_at_the_limit() -> None:
    cost = SpsCost(SpsTable.from_samples([1, 8], [100.0, 50.0], 16))
    assert cost.verify_curve(4)([8, 17]).tolist() == [0.02, float("inf")] and cost.draft_seconds(4) == 0.0


def test_the_real_decoder_runs_every_shape(tmp_path: Path) -> None:
    target = tiny_target()
    options = ProfileConfig(num_reqs=[1, 3], verify_lengths=[0, 2, 4], kv_lengths=[8, 40], samples_per_cell=3, warmup=1)
    runner = DecoderRunner(target, tiny_drafter(target))
    measured: Measurement = measure(runner, grid(options, 4), options)
    assert len(measured.cells) == 12
    header: dict[str, Any] = conditions(target)
    for cell in measured.cells:
        assert cell.draft_ms > 0 and cell.verify_ms > 0 and cell.p50_ms >= cell.draft_ms
    table = write_profile(tmp_path, measured, header=header, drafter_sha256="d", parallel=1, max_batch_tokens=256)
    assert table["hardware"] and table["target_sha256"] == target.fingerprint and table["kv_len"] == 8
