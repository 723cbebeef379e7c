"""Serving tables read by SGLang's own loaders, loaded by path. Needs DEEPSPEC_SGLANG_SRC: a folder that holds sglang/.

The loaders need msgspec; DEEPSPEC_SGLANG_PYTHON may name a Python that has it (default: the one that runs the tests).
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from deepspec.decoding.cost import ProfileCell
from deepspec.export import bundle, tables
from deepspec.export.evidence import Evidence

SOURCE = os.environ.get("DEEPSPEC_SGLANG_SRC")
PYTHON = os.environ.get("DEEPSPEC_SGLANG_PYTHON", sys.executable)
pytestmark = pytest.mark.skipif(not SOURCE, reason="DEEPSPEC_SGLANG_SRC is not set: no SGLang source")
READER = """
import importlib.util, json, sys
folder, source = sys.argv[1:]
def module(name):
    path = f"{source}/sglang/srt/speculative/dspark_components/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found
sps, sts = module("dspark_sps"), module("dspark_sts")
one = sps.load_sps_table_from_path(f"{folder}/sglang_sps_1d.json")
two = sps.load_sps_table_from_path(f"{folder}/sglang_sps_2d.json")
print(json.dumps({
    "one": type(one).__name__, "two": type(two).__name__,
    "lookup": [one.lookup(b) for b in range(1, 41)],
    "step": [[two.step_time(num_reqs=r, budget=b) for b in range(0, 30)] for r in (1, 2, 4, 8)],
    "temperatures": sts.load_sts_calibration_from_path(f"{folder}/dspark_sts.json").temperatures,
}))
"""


@pytest.fixture(scope="module")
def read_by_sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if subprocess.run([PYTHON, "-c", "import msgspec, torch"], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} lacks msgspec or torch, which SGLang's loaders import: set DEEPSPEC_SGLANG_PYTHON")
    folder = tmp_path_factory.mktemp("serving")
    config = {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "sample_from_anchor": True}
    bundle.cost_files(folder, Evidence(sps=SPS, cells=tuple(CELLS)), config, "DIR")
    (folder / "dspark_sts.json").write_text(json.dumps(bundle.sts_values({
        "temperatures": [1.1, 1.2, 1.0, 0.9], "ece_before": [0.1, None, 0.1, 0.1], "ece_after": [0.01] * 4,
        "num_samples": 900, "domains": {"math": 900}, "drafter_sha256": "a" * 64})))
    done = subprocess.run([PYTHON, "-c", READER, str(folder), str(SOURCE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _time(requests: int, tokens: int) -> float:
    return 5.0 + 0.2 * requests + 0.3 * tokens


CELLS = [ProfileCell(r, v, 64, 32, *[_time(r, r * v)] * 3, 1.0, 1.0, 1.0) for r in (1, 2, 4, 8) for v in (1, 2, 4, 5)]
PROBES = [1, 2, 4, 8, 16, 40]
SPS = {"sample_batch_tokens": PROBES, "sample_steps_per_sec": [1e3 / (5.5 + 0.35 * b) for b in PROBES],
       "max_batch_tokens": 64, "kv_len": 64}


def test_kinds_and_temperatures(read_by_sglang: dict[str, Any]) -> None:
    assert read_by_sglang["one"] == "SpsCostTable" and read_by_sglang["two"] == "SpsAdditiveCostTable"
    assert read_by_sglang["temperatures"] == [1.1, 1.2, 1.0, 0.9]


def test_floor_lookup_is_never_cheaper_than_measured(read_by_sglang: dict[str, Any]) -> None:
    for tokens, rate in zip(range(1, 41), read_by_sglang["lookup"]):
        above = next(index for index, probe in enumerate(PROBES) if probe >= tokens)
        assert rate == pytest.approx(SPS["sample_steps_per_sec"][above])


def test_additive_table_prices_as_fitted(read_by_sglang: dict[str, Any]) -> None:
    fit = tables.fit_additive(CELLS)
    for requests, row in zip((1, 2, 4, 8), read_by_sglang["step"]):
        for budget, seconds in enumerate(row):
            assert seconds == pytest.approx(fit.seconds(requests, requests + budget))
