"""The stage as a user runs it: with confidence records, without a head, and beside other runs."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec.config.schema import ProfileConfig
from deepspec.errors import InputRefused
from deepspec.profiling.extras import ExtrasSampler
from deepspec.profiling.files import write_profile
from deepspec.profiling.measure import grid, measure
from deepspec.simulation.subjects import TRACES_FILE
from deepspec.simulation.traces import Traces
from deepspec.stages import simulate
from tests.unit.profiling.test_measure import Engine
from tests.unit.profiling.test_scheduler_profile import Extras
from tests.unit.simulation.test_serving_simulation import traces

SHA = "a" * 64
GRID = ProfileConfig(num_reqs=[1, 4], verify_lengths=[0, 2, 4], kv_lengths=[16], samples_per_cell=3, warmup=1)


def cost(requests: int, tokens: int) -> float:
    return 0.02 + 0.001 * tokens


class Alone(Extras):
    """Plain rounds cost what the engine charges for one token of each request."""

    def alone(self, num_reqs: int) -> float:
        return cost(num_reqs, num_reqs)


def run_folder(path: Path, *, sha: str = SHA, hardware: str = "A", accepted: int = 3, kept: bool = True) -> Path:
    """What a run leaves that the simulation reads: profile, traces, manifest."""
    measured = measure(Engine(cost), grid(GRID, 4), GRID)
    header = {"hardware": hardware, "dtype": "float32", "target_sha256": "t", "engine": "e"}
    write_profile(path / "profile", measured, header=header, drafter_sha256=sha, parallel=1, max_batch_tokens=64,
                  extras=ExtrasSampler(Alone(), GRID).result())
    if kept:
        found = traces([[accepted, 4, 1]] * 6, answer=30, domains=["math"] * 3 + ["chat"] * 3)
        (path / "simulation").mkdir(parents=True)
        Traces(**vars(found) | {"drafter_sha256": sha}).save(path / TRACES_FILE)
    config = {"drafter": {"algorithm": "dspark", "num_layers": 5}}
    (path / "manifest.json").write_text(json.dumps({"config": config}))
    return path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from deepspec.config.schema import Config

    made = Config()
    made.run.name, made.run.dir, made.run.data_root = "own", str(tmp_path / "own"), str(tmp_path / "data")
    made.drafter.block_size, made.drafter.num_layers = 4, 2
    made.simulate.concurrency, made.simulate.requests = [1, 4], 12
    monkeypatch.setattr(simulate, "chosen_checkpoint", lambda config: Path("checkpoint"))
    monkeypatch.setattr(simulate, "drafter_sha256", lambda checkpoint, weights: SHA)
    return made


def test_points_and_advice_for_every_load_and_drafter(config: Any, tmp_path: Path) -> None:
    run_folder(tmp_path / "own")
    run_folder(tmp_path / "other", sha="b" * 64, accepted=1)
    config.runs, config.simulate.arrival_rates = ["other"], [5.0]
    simulate.run(config)
    values = json.loads((tmp_path / "own" / "simulation.json").read_text())
    assert [row["name"] for row in values["drafters"]] == ["own", "other"]
    assert [row["layers"] for row in values["drafters"]] == [2, 5]
    # Plain decoding once, three ways of each drafter; two loads and an arrival rate.
    assert len(values["points"]) == (1 + 2 * 3) * 3
    own, other = (next(point for point in values["points"] if point["drafter"] == name and point["policy"] == "fixed"
                       and point["concurrency"] == 1) for name in ("own", "other"))
    assert own["acceptance_length"] > other["acceptance_length"]
    assert own["tokens_per_second"] > other["tokens_per_second"]
    assert [row["concurrency"] for row in values["recommendations"]] == [1, 4]
    assert all(row["settings"]["run"] == "own" for row in values["recommendations"])


def test_runs_that_cannot_be_compared_are_refused_by_name(config: Any, tmp_path: Path) -> None:
    run_folder(tmp_path / "own")
    config.runs = ["elsewhere"]
    with pytest.raises(InputRefused, match="elsewhere"):
        simulate.run(config)
    run_folder(tmp_path / "elsewhere", hardware="B")
    with pytest.raises(InputRefused, match="hardware='B'"):
        simulate.run(config)
    run_folder(tmp_path / "untraced", kept=False)
    config.runs = ["untraced"]
    with pytest.raises(InputRefused, match="launch/simulate_serving.py run.dir="):
        simulate.run(config)


def test_a_profile_of_another_drafter_is_refused(config: Any, tmp_path: Path) -> None:
    run_folder(tmp_path / "own", sha="c" * 64)
    with pytest.raises(InputRefused, match="drafter_sha256"):
        simulate.run(config)


def test_traces_come_from_records_once_and_stay(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspec.calibration import ConfidenceRecords, RecordsOrigin

    own = run_folder(tmp_path / "own", kept=False)
    (own / "confidence").mkdir()
    ConfidenceRecords(
        RecordsOrigin(4, SHA, 1.0, (1.0,) * 4), np.full((6, 4), 2.0, dtype=np.float32), np.array([2, 3, 4, 0, 1, 2]),
        np.full(6, 4), np.full((6, 4), 0.5, dtype=np.float32), np.array(["p", "p", "p", "q", "q", "q"]),
        np.array(["math"] * 3 + ["code"] * 3)).save(own / "confidence" / "records.npz")
    monkeypatch.setattr(simulate, "read_responses", lambda directory, split: [])
    Traces(**vars(traces([[4, 4]], answer=11)) | {"drafter_sha256": SHA}).save(own / TRACES_FILE)  # of older records
    simulate.run(config)
    kept = Traces.load(own / TRACES_FILE, drafter_sha256=SHA)
    assert kept.answer_tokens.tolist() == [13, 7] and kept.logits is not None
    (own / "confidence" / "records.npz").unlink()
    simulate.run(config)  # from what it kept; nothing is decoded
    config.confidence.temperature = 0.5
    monkeypatch.setattr(simulate, "decode_traces", lambda config: Traces(**vars(kept) | {"sampling_temperature": 0.5}))
    simulate.run(config)  # what it kept is of another temperature
    assert Traces.load(own / TRACES_FILE, drafter_sha256=SHA).sampling_temperature == 0.5


def test_without_a_confidence_head_prompts_are_decoded(config: Any, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "own", kept=False)
    made = Traces(**vars(traces([[1, 2]], answer=12)) | {"drafter_sha256": SHA})
    monkeypatch.setattr(simulate, "decode_traces", lambda config: made)
    simulate.run(config)
    values = json.loads((tmp_path / "own" / "simulation.json").read_text())
    assert values["drafters"][0]["calibrated"] is False
    assert {point["policy"] for point in values["points"]} == {"none", "fixed", "scheduled", "asynchronous"}


def test_the_evaluation_of_the_run_is_compared_and_a_mismatch_is_told(config: Any, tmp_path: Path,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    own = run_folder(tmp_path / "own")
    seconds = 2 * (0.021 * 29 + 0.03)  # two answers of 30 tokens, one at a time; the prompt costs what it costs
    row = {"domain": "math", "num_prompts": 2, "tokens": 60, "tokens_per_second": 60 / seconds}
    setting = {"decoding": "none", "batch_size": 1, "temperature": 1.0, "benchmarks": {"held_out-math": row}}
    slow = dict(setting, benchmarks={"held_out-math": dict(row, tokens_per_second=20 / seconds)})
    other = dict(setting, temperature=0.0)
    report = {"drafter": SHA, "hardware": "A", "max_new_tokens": 64, "settings": {"plain": setting, "greedy": other}}
    (own / "evaluation.json").write_text(json.dumps(report))
    simulate.run(config)
    values = json.loads((own / "simulation.json").read_text())["against_evaluation"]
    assert [item["setting"] for item in values] == ["plain"] and abs(values[0]["error"]) < 0.1
    assert "apart" not in caplog.text
    (own / "evaluation.json").write_text(json.dumps(report | {"settings": {"plain": slow}}))
    with caplog.at_level(logging.WARNING):
        simulate.run(config)
    assert "none decoding of 1 requests at a time" in caplog.text and "profile_throughput" in caplog.text


def test_more_users_than_slots_take_turns_and_far_loads_are_refused(config: Any, tmp_path: Path) -> None:
    run_folder(tmp_path / "own")
    config.simulate.concurrency, config.simulate.max_concurrent = [4, 100000], 4
    config.simulate.policies = ["none"]
    simulate.run(config)
    few, many = json.loads((tmp_path / "own" / "simulation.json").read_text())["points"]
    assert many["tokens_per_second"] == pytest.approx(few["tokens_per_second"], rel=1e-9)
    assert many["tokens_per_second_per_user"] == pytest.approx(few["tokens_per_second_per_user"] * 4 / 100000)
    assert few["wait_seconds"] == 0.0 and many["wait_seconds"] > 1000 and not many["extrapolated"]
    config.simulate.max_concurrent = 100000
    with pytest.raises(InputRefused, match="simulate.concurrency=100000.*4 at most; beyond 256"):
        simulate.run(config)
