"""features=hybrid and features=disaggregated before anything starts: options, what is refused, what the plan says."""

from pathlib import Path

import pytest

from deepspec.config.schema import Config
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning import memory, work
from deepspec.planning.estimate import make_plan
from deepspec.planning.plan import render
from deepspec.planning.preflight import preflight, required
from deepspec.planning.ranks import check_split, trainer_ranks
from deepspec.planning.sizes import count_parameters
from deepspec.planning.validate import validate


@pytest.fixture
def modes(composed, tmp_path: Path) -> dict[str, Config]:
    """Qwen3-4B in each mode that needs no features stage, and cached."""
    found = {}
    for name in ("cached", "online", "hybrid", "disaggregated"):
        found[name] = composed("+experiment=qwen3_4b", f"features={name}")
        found[name].run.data_root, found[name].run.dir = str(tmp_path / "data"), str(tmp_path / "run")
    return found


def test_presets(modes):
    assert [(config.features.mode, config.target.ranks) for config in modes.values()] == [
        ("cached", 0), ("online", 0), ("hybrid", 0), ("disaggregated", 1)]
    for config in modes.values():
        validate(config)


def test_ranks_belong_to_disaggregated(modes):
    modes["online"].target.ranks = 2
    with pytest.raises(ConfigError, match="target.ranks=2 is only for features.mode=disaggregated"):
        validate(modes["online"])
    modes["disaggregated"].target.ranks = 0
    with pytest.raises(ConfigError, match="Set target.ranks to 1 or more"):
        validate(modes["disaggregated"])
    for key, value in (("queue_depth", 0), ("queue_timeout", 0.0)):
        config = modes["hybrid"]
        kept = getattr(config.features, key)
        setattr(config.features, key, value)
        with pytest.raises(ConfigError, match=f"features.{key}"):
            validate(config)
        setattr(config.features, key, kept)


@pytest.mark.parametrize("world, ranks, ok", ((1, 1, False), (2, 2, False), (2, 1, True), (8, 2, True)))
def test_a_rank_to_train_is_left(modes, monkeypatch, world, ranks, ok):
    config = modes["disaggregated"]
    config.target.ranks = ranks
    monkeypatch.setenv("WORLD_SIZE", str(world))
    check_split(config, ["evaluate"])  # a job that does not train is not divided
    check_split(modes["online"], ["train"])
    assert trainer_ranks(config) == max(1, world - ranks) and trainer_ranks(modes["online"]) == world
    if ok:
        check_split(config, ["train"])
    else:
        with pytest.raises(ConfigError, match=f"target.ranks={ranks} leaves no rank to train: the launch has {world}"):
            check_split(config, ["train"])


def test_the_batch_is_that_of_the_trainers(modes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")  # two trainers
    config = modes["disaggregated"]
    config.trainer.pack_tokens = config.trainer.pack_anchors = None
    config.trainer.pad_packs = False
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 4, 2
    validate(config)
    config.trainer.global_batch_size = 6
    with pytest.raises(ConfigError, match="x 2 ranks = 4"):
        validate(config)


def test_bytes_on_disk_and_in_memory(modes):
    plans = {name: make_plan(config) for name, config in modes.items()}
    stored = plans["cached"].workload.cache_bytes
    assert stored > 10**12
    assert {name: plan.workload.cache_bytes for name, plan in plans.items()} == {
        "cached": stored, "online": 0, "hybrid": stored, "disaggregated": 0}
    assert modes["hybrid"].stages == modes["cached"].stages and "features" not in modes["hybrid"].stages
    assert [plans[name].disks[0].need for name in ("hybrid", "disaggregated", "online")] == [stored, 0, 0]
    parameters = count_parameters(modes["online"])
    packs = plans["online"].workload.packs
    whole = {name: memory.step_bytes(config, parameters, packs).target for name, config in modes.items()}
    assert whole["online"] == whole["hybrid"] > 0 and whole["cached"] == whole["disaggregated"] == 0
    forwards = {name: work.stage_flops(config, parameters, plans[name].workload).get("features", 0)
                for name, config in modes.items()}
    assert forwards["online"] == 0 and forwards["hybrid"] == forwards["cached"] > 0
    epochs = modes["disaggregated"].trainer.epochs
    share = (1 - modes["disaggregated"].data.held_out_fraction) * epochs
    assert forwards["disaggregated"] == pytest.approx(forwards["cached"] * share, rel=0.01)


def test_the_features_stage_is_part_of_training(modes):
    for name in ("hybrid", "disaggregated", "online", "cached"):
        config = modes[name]
        config.stages = ["features", "train"]
        line = next(line for line in render(make_plan(config)).splitlines() if line.startswith("  features "))
        assert ("part of train" in line) == (name != "cached"), line


def test_training_asks_for_responses_only(modes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("hybrid", "disaggregated"):
        assert required(modes[name], "train") == ("responses",)
    with pytest.raises(InputRefused, match="output of stage 'responses'"):
        preflight(modes["disaggregated"], ["train"])
