"""Engine tables: what a floor lookup returns, when two axes can be told apart, and the ranges for vLLM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec.decoding.cost import ProfileCell
from deepspec.export import tables
from deepspec.export.acceptance import histogram, mean_survival
from deepspec.export.bundle import cost_files, sts_values
from deepspec.export.evidence import Evidence
from deepspec.scheduling import SpsTable


def cell(requests: int, per_request: int, milliseconds: float, kv_len: int = 64) -> ProfileCell:
    return ProfileCell(requests, per_request, kv_len, 32, milliseconds, milliseconds, milliseconds, 1.0, 1.0, 1.0)


def additive(requests: int, tokens: int) -> float:
    return 4.0 + 0.3 * requests + 0.05 * tokens


GRID = [cell(r, v, additive(r, r * v)) for r in (1, 2, 4, 8) for v in (1, 2, 4, 8)]


def test_floor_lookup_never_prices_below_the_next_probe() -> None:
    tokens, rates = [1, 8, 9, 64], [100.0, 90.0, 70.0, 40.0]
    table = tables.sps_1d(tokens, rates, 64)
    engine = SpsTable.from_samples(table["sample_batch_tokens"], table["sample_steps_per_sec"],
                                   table["max_batch_tokens"], lookup="floor")
    assert list(engine.steps_per_second(tokens)) == pytest.approx(rates)  # measured counts: as measured
    ceil = SpsTable.from_samples(tokens, rates, 64, lookup="ceil")
    wanted = np.arange(1, 65)
    assert np.allclose(engine.steps_per_second(wanted), ceil.steps_per_second(wanted))


def test_noise_never_rewards_more_tokens() -> None:
    table = tables.sps_1d([1, 2, 4], [100.0, 80.0, 90.0], 4)
    assert table["sample_steps_per_sec"] == sorted(table["sample_steps_per_sec"], reverse=True)


def test_additive_fit_recovers_its_terms() -> None:
    fit = tables.fit_additive(GRID)
    assert fit.max_rel_residual < 1e-9 and fit.alpha[0] == fit.theta[0] == 0.0
    for requests, tokens in ((1, 1), (4, 16), (8, 64)):
        assert fit.seconds(requests, tokens) == pytest.approx(additive(requests, tokens) / 1e3)
    assert tables.sps_2d(fit)["bias_seconds"] > 0


def test_staircase_residual_is_published() -> None:
    cells = [cell(r, v, 5.0 + 4.0 * -(-r * v // 16) * (1 + 0.5 * (r > 4))) for r in (1, 2, 4, 8) for v in (1, 2, 4, 8)]
    assert tables.fit_additive(cells).max_rel_residual > 0.02


@pytest.mark.parametrize("cells, identifiable", [
    (GRID, True), ([cell(r, 8, additive(r, 8 * r)) for r in (1, 2, 4, 8)], False),
    ([cell(1, v, 5.0 + v) for v in (1, 2, 4)], False),
])
def test_diagonal_grids_are_not_identifiable(cells: list[ProfileCell], identifiable: bool) -> None:
    assert (tables.identifiable(cells) is None) is identifiable


def test_depths_are_not_mixed() -> None:
    cells = [cell(1, 1, 5.0, 64), cell(1, 1, 9.0, 512)]
    assert [c.kv_len for c in tables.at_one_depth(cells)] == [64]
    assert [c.kv_len for c in tables.at_one_depth(cells, 512)] == [512]


def test_ranges_verify_less_under_load() -> None:
    cells = [cell(r, v, 5.0 + 0.02 * r + max(0.0, 0.4 * (r * v - 8))) for r in (1, 4, 16, 64) for v in (1, 2, 4, 8)]
    ranges = tables.vllm_ranges(tables.fit_additive(cells), [0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05], 64)
    assert ranges[0][0] == 1 and ranges[-1][1] == 64
    assert all(a[1] + 1 == b[0] for a, b in zip(ranges, ranges[1:]))
    assert ranges[0][2] > ranges[-1][2]


def test_histogram_and_survival() -> None:
    assert histogram([70, 45, 25], 100) == [30, 25, 20, 25]
    assert histogram([0.7, 0.45, 0.25], 100) == [30, 25, 20, 25]
    assert histogram([1, 0, 0], 50) == [49, 1, 0, 0] and histogram(None, 5) is None
    evaluation = {"settings": {"t": {"benchmarks": {"a": {
        "rounds": 100, "drafted": 300, "accepted_per_position": [70, 45, 25]}}}}}
    assert mean_survival(evaluation, 3) == [0.7, 0.45, 0.25]
    assert mean_survival(evaluation, 4) is None and mean_survival(None, 3) is None


def test_undefined_values_do_not_reach_strict_readers() -> None:
    values = sts_values({"temperatures": [1, 2], "ece_before": [0.1, None], "ece_after": [0.1, 0.2], "num_samples": 5,
                         "domains": {"math": 5}})
    assert "ece_before" not in values and values["ece_after"] == [0.1, 0.2] and values["dataset"] == "math"


def test_the_1d_file_never_holds_the_text_that_makes_it_2d(tmp_path: Path) -> None:
    sps: dict[str, Any] = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [10.0, 5.0], "max_batch_tokens": 8,
                           "engine": "x", "fit": {"bias_seconds": 1.0}, "kv_len": 64}
    config = {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "sample_from_anchor": True}
    written, left_out = cost_files(tmp_path, Evidence(sps=sps, cells=tuple(GRID)), config, "DIR")
    assert "bias_seconds" not in (tmp_path / "sglang_sps_1d.json").read_text()
    assert written[:2] == ["sglang_sps_1d.json", "sglang_sps_2d.json"] and set(left_out) == {"vllm_by_load.json"}
    assert json.loads((tmp_path / "trtllm_cost.json").read_text())["_meta"]["experimental"]
    _, left_out = cost_files(tmp_path, Evidence(sps=sps), config, "DIR")
    assert "no raw cells" in left_out["sglang_sps_2d.json"]
