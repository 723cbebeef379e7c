"""Profiles that a scheduler refuses, each with its reason, and what it is made with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec.config.schema import ProfileConfig, SchedulerConfig
from deepspec.decoding.cost import CostTable
from deepspec.errors import InputRefused
from deepspec.profiling.extras import ExtrasSampler, read_extras
from deepspec.profiling.files import write_profile
from deepspec.profiling.measure import grid, measure
from deepspec.profiling.scheduler import recorded_logits, scheduler_factory, trusted_cost
from tests.unit.profiling.test_measure import CONFIG, Engine, additive

HEADER = {"hardware": "A", "dtype": "float32", "target_sha256": "t"}


def written(directory: Path, cost: Any = additive, config: ProfileConfig = CONFIG, **header: Any) -> Path:
    measured = measure(Engine(cost), grid(config, 4), config)
    write_profile(directory, measured, header=HEADER | header, drafter_sha256="d", parallel=1, max_batch_tokens=64)
    return directory


def test_a_sound_profile_is_taken(tmp_path: Path) -> None:
    cost = trusted_cost(written(tmp_path), min_samples=5, drafter_sha256="d", **HEADER)
    assert isinstance(cost, CostTable) and cost.draft_seconds(1) > 0


@pytest.mark.parametrize("wanted, said", [
    ({"hardware": "B"}, "hardware is 'A', here it is 'B'"), ({"dtype": "bfloat16"}, "dtype"),
    ({"target_sha256": "u"}, "target_sha256"), ({"drafter_sha256": "e"}, "drafter_sha256 is 'd', here it is 'e'"),
])
def test_other_hardware_or_weights_are_refused(tmp_path: Path, wanted: dict[str, str], said: str) -> None:
    with pytest.raises(InputRefused, match=said):
        trusted_cost(written(tmp_path), min_samples=1, **({"drafter_sha256": "d"} | HEADER | wanted))


def test_flat_and_thin_profiles_are_refused(tmp_path: Path) -> None:
    flat = written(tmp_path / "flat", cost=lambda requests, tokens: 0.5)
    with pytest.raises(InputRefused, match="step times differ by"):
        trusted_cost(flat, min_samples=1)
    with pytest.raises(InputRefused, match="fewer than profile.min_samples=6 samples"):
        trusted_cost(written(tmp_path / "thin"), min_samples=6)


def test_one_length_says_nothing_about_draft_tokens(tmp_path: Path) -> None:
    options = ProfileConfig(num_reqs=[1, 2, 4], verify_lengths=[3], kv_lengths=[16], samples_per_cell=3)
    with pytest.raises(InputRefused, match="two verification lengths"):
        trusted_cost(written(tmp_path, config=options), min_samples=1)


def test_modes_choose_the_policy_and_how_a_staircase_is_seen(tmp_path: Path) -> None:
    cost = trusted_cost(written(tmp_path), min_samples=1)
    make = scheduler_factory(cost, 4, SchedulerConfig(min_gain=0.2, max_verify=3, min_tokens_per_second_per_user=9.0))
    scheduled, asynchronous = make("scheduled"), make("asynchronous")
    assert (scheduled.policy, asynchronous.policy) == ("early_stop", "lagged")
    assert scheduled.cost.convex and not asynchronous.cost.convex
    assert scheduled.min_gain == 0.2 and scheduled.max_verify == 3 and scheduled.floor == 9.0
    informed = scheduler_factory(cost, 4, SchedulerConfig(), logits=np.full((30, 4), -6.0))("scheduled")
    assert not informed.should_draft(8)


def test_records_of_another_drafter_are_no_start(tmp_path: Path) -> None:
    assert recorded_logits(tmp_path / "none.npz", "d") is None
    (tmp_path / "torn.npz").write_bytes(b"no")
    assert recorded_logits(tmp_path / "torn.npz", "d") is None


class Extras:
    """Plain rounds of 2 ms and a request; prompts of 1 ms and 0.1 ms per token, twice that with a drafter."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def prepare_extras(self, num_reqs: int, kv_len: int, prompt_tokens: int) -> None:
        self.room = (num_reqs, kv_len, prompt_tokens)

    def alone(self, num_reqs: int) -> float:
        self.calls.append(("alone", num_reqs))
        return (2.0 + num_reqs) / 1e3

    def prompt(self, tokens: int, *, drafting: bool) -> float:
        self.calls.append(("drafting" if drafting else "prompt", tokens))
        return (1.0 + 0.1 * tokens) * (1 + drafting) / 1e3


def test_prompts_and_plain_rounds_are_kept_in_the_table(tmp_path: Path) -> None:
    runner = Extras()
    options = ProfileConfig(num_reqs=[1, 4], kv_lengths=[64, 16], prefill_tokens=[10, 50], samples_per_cell=4, warmup=2)
    sampler = ExtrasSampler(runner, options)
    measure(Engine(additive), grid(options, 4), options, each_pass=sampler.sample)
    extras = sampler.result()
    assert runner.room == (4, 16, 50) and len(runner.calls) == 6 * (2 + 2 * 4)  # a pass per pass of either depth
    orders = [runner.calls[12 + 6 * place:18 + 6 * place] for place in range(8)]
    assert all(set(order) == set(orders[0]) for order in orders) and len({tuple(order) for order in orders}) > 1
    path = written(tmp_path)
    values = json.loads((path / "sps.json").read_text())
    (path / "sps.json").write_text(json.dumps(values | extras))
    found = read_extras(path / "sps.json")
    assert [(row["num_reqs"], row["p50_ms"]) for row in found["alone"]] == [(1, pytest.approx(3.0)),
                                                                            (4, pytest.approx(6.0))]
    assert [(cell.tokens, cell.alone_ms, cell.drafting_ms, cell.n) for cell in found["prefill"]] == [
        (10, pytest.approx(2.0), pytest.approx(4.0), 8), (50, pytest.approx(6.0), pytest.approx(12.0), 8)]
    assert not found["padded"]
    (path / "sps.json").write_text(json.dumps(values | extras | {"engine": "deepspec in process, torch 2"}))
    assert read_extras(path / "sps.json")["padded"], "our own decoder"
    with pytest.raises(InputRefused, match="not found"):
        read_extras(tmp_path / "none.json")
