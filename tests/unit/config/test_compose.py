"""Composition: every stage with every experiment, and every kind of mistake, named with the nearest valid key."""

import re
from pathlib import Path

import pytest

from deepspec.config import compose
from deepspec.config.compose import (
    CONF_DIR, adapt_argv, compose_checked, compose_config, known_keys, options, split_argv,
)
from deepspec.errors import ConfigError

PRIMARIES = sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "base")


@pytest.mark.parametrize("experiment", options("experiment"))
@pytest.mark.parametrize("primary", PRIMARIES)
def test_every_stage_composes_with_every_experiment(primary: str, experiment: str) -> None:
    config = compose_config([f"+experiment={experiment}"], primary)
    assert config.run.name == experiment
    assert config.run.dir == f"runs/{experiment}"
    assert config.target.shape.hidden_size > 0


@pytest.mark.parametrize("group", sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir()))
def test_every_group_choice_composes(group: str) -> None:
    if group == "experiment":
        return
    for choice in options(group):
        extra = ["data.sources.0.path=p.jsonl"] if (group, choice) == ("data", "files") else []
        plus = "+" if group == "sweep" else ""  # in no defaults list, as experiment
        compose_config(["+experiment=tiny", f"{plus}{group}={choice}", *extra])


def test_experiments_hold_the_published_recipe() -> None:
    config = compose_config(["+experiment=qwen3_8b"])
    assert (config.drafter.block_size, config.drafter.num_layers, config.drafter.markov_rank) == (7, 5, 256)
    assert config.target.feature_layers == [1, 9, 17, 25, 33]
    assert config.target.mask_token_id == 151669
    assert (config.optimizer.lr, config.optimizer.warmup_ratio, config.optimizer.weight_decay) == (6e-4, 0.04, 0.0)
    assert (config.trainer.global_batch_size, config.trainer.epochs, config.trainer.num_anchors) == (512, 10, 512)
    objective = config.objective
    assert (objective.ce_weight, objective.tv_weight, objective.confidence_weight) == (0.1, 0.9, 1.0)
    assert "train" == config.stages[0]
    assert compose_config(["+experiment=qwen3_14b"]).target.feature_layers == [1, 10, 19, 28, 37]


def test_command_line_beats_experiment_beats_budget() -> None:
    assert compose_config(["+experiment=tiny"]).drafter.num_layers == 2
    assert compose_config(["+experiment=tiny", "drafter.num_layers=3"]).drafter.num_layers == 3
    assert compose_config(["+experiment=tiny", "budget=1h"]).trainer.num_anchors == 128


def test_dflash_is_one_choice() -> None:
    config = compose_config(["+experiment=tiny", "drafter=dflash"])
    assert (config.drafter.algorithm, config.drafter.head, config.drafter.confidence_head) == ("dflash", "none", False)
    assert (config.objective.ce_weight, config.objective.tv_weight) == (1.0, 0.0)


@pytest.mark.parametrize("override, expected", [
    ("drafter.blok_size=8", "drafter.block_size"),
    ("+drafter.blok_size=8", "drafter.block_size"),
    ("+optimizer.lrr=1", "optimizer.lr"),
    ("trainer.lr=1", "optimizer.lr"),
    ("lr=1", "optimizer.lr"),
    ("targt=qwen3_8b", "target"),
    ("target=qwen3_9b", "qwen3_8b"),
    ("drafter.block_size=seven", "drafter.block_size"),
    ("data.sources.0.cap=many", "data.sources.0.cap"),
    ("~drafter", "removed"),
    ("~optimizer.lr", "removed"),
    ("run.name=out/step=100,loss=1.2", "quoted"),
    ("experiment=tiny", "+experiment=tiny"),
    ("engine.deepspeed.zero_optimization.reduce_bucket_size=1", "+engine.deepspeed"),
    ("trainer={epochz: 3}", "epochs"),
    ("trainer=3", "default"),
    ("engine=null", "zero1"),
    ("runs=dflash", "'runs=[A]'"),
])
def test_mistakes_name_the_key_and_the_way_out(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["+experiment=tiny", override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key, group, expected", [
    ("evaluation.temperature", "", "evaluate.temperatures"), ("optimiser.lrs", "", "optimizer.lr"),
    ("calibrate.min_sample", "", "calibration.min_samples"), ("trainer.steps", "", "trainer.max_steps"),
    ("max_steps", "", "trainer.max_steps"), ("data.sources.0.capp", "", "data.sources.0.cap"),
    ("endpiont", "doctor", "endpoint"), ("drafters", "doctor", "drafter"), ("max_tokens", "doctor", "max_new_tokens"),
    ("endpiont", "loop", "endpoint"), ("serv", "loop", "serve"), ("recrods", "calibration", "records"),
    ("targt", "doctor", "target"), ("doctor.endpiont", "doctor", "doctor.endpoint"),
    ("confidence.temprature", "calibration", "confidence.temperature"),
])
def test_near_groups_with_near_options_and_a_scripts_own_group_come_first(key: str, group: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{re.escape(expected)}'"):
        compose_config(["+experiment=tiny", f"{key}=1"], group=group)


def test_nothing_near_lists_what_stands_beside_it() -> None:
    with pytest.raises(ConfigError, match="There are: optimizer.lr, ") as caught:
        compose_config(["+experiment=tiny", "optimizer.xyzzy=1"])
    assert "trainer" not in str(caught.value)


def test_unknown_experiment_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match="qwen3_8b"):
        compose_config(["+experiment=qwen3_9b"])


def test_no_experiment_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"\+experiment=tiny"):
        compose_config([])


def test_unknown_key_inside_an_experiment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(CONF_DIR, tmp_path / "conf")
    text = "# @package _global_\nrun: {name: typo}\noptimizer: {lrr: 1}\n"
    (tmp_path / "conf" / "experiment" / "typo.yaml").write_text(text)
    monkeypatch.setattr(compose, "CONF_DIR", tmp_path / "conf")
    with pytest.raises(ConfigError) as caught:
        compose_config(["+experiment=typo"])
    assert "optimizer.lrr" in str(caught.value) and "optimizer.lr'" in str(caught.value)


def test_free_form_deepspeed_options_pass() -> None:
    config = compose_config(["+experiment=tiny", "+engine.deepspeed.zero_optimization.reduce_bucket_size=1000"])
    assert config.engine.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000}}


def test_local_rank_never_reaches_hydra() -> None:
    for flag in ("--local_rank=0", "--local-rank=0"):
        assert adapt_argv([flag, "+experiment=tiny"], {"LOCAL_RANK": "0"}) == ["+experiment=tiny"]
    with pytest.raises(ConfigError, match="LOCAL_RANK=0"):
        adapt_argv(["--local_rank=1"], {"LOCAL_RANK": "0"})


def test_other_ranks_write_no_hydra_files() -> None:
    assert "hydra.output_subdir=null" in adapt_argv(["+experiment=tiny"], {"RANK": "1"})
    assert adapt_argv(["+experiment=tiny"], {"RANK": "0"}) == ["+experiment=tiny"]


def test_multirun_is_refused() -> None:
    with pytest.raises(ConfigError, match="sweep"):
        adapt_argv(["-m", "drafter.block_size=4,8"], {})


def test_flags_and_overrides_are_told_apart() -> None:
    overrides, flags = split_argv(["--cfg", "job", "+experiment=tiny", "-cn", "x", "a=b"])
    assert (overrides, flags) == (["+experiment=tiny", "a=b"], ["--cfg", "job", "-cn", "x"])


def test_known_keys_cover_sections_and_leaves() -> None:
    keys = set(known_keys())
    assert {"drafter", "drafter.block_size", "target.shape.hidden_size", "plan"} <= keys


@pytest.mark.parametrize("flag, way_out", [("--plan", "plan=true"), ("--features=online", "features=online"),
                                           ("--zero_stage", "key=value")])
def test_flags_of_other_programs_are_refused(flag: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        split_argv([flag, "+experiment=tiny"])


def test_a_configuration_without_an_experiment_can_be_looked_at() -> None:
    assert compose_checked([], "train_drafter").drafter.block_size == 7


@pytest.mark.parametrize("foreign, ours", [
    ("trainer.gradient_accumulation_steps=4", "trainer.global_batch_size"), ("trainer.ema=0.9", "trainer.ema_decay"),
    ("optimizer.learning_rate=1", "optimizer.lr"),
])
def test_names_of_other_trainers_lead_to_ours(foreign: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{ours}'"):
        compose_config(["+experiment=tiny", foreign])
