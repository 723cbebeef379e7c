"""DeepSpeed's configuration: what is derived, what is refused, and that nothing needs a compiler."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_training import tiny_config, tiny_drafter

from deepspec.config.owned import TOP_LEVEL
from deepspec.config.schema import EngineConfig, OptimizerConfig, TrainerConfig
from deepspec.errors import ConfigError
from deepspec.training.engine import accumulation_steps, build_config, effective_stage, initialize, parameter_groups
from deepspec.training.module import TrainingModule

TRAINER = TrainerConfig(global_batch_size=8, micro_batch_size=2, precision="fp32")


def test_accumulation_is_derived():
    assert accumulation_steps(TRAINER, 1) == 4
    assert accumulation_steps(TRAINER, 4) == 1
    message = r"global_batch_size=8 must be a multiple of micro_batch_size \* world_size = 6"
    with pytest.raises(ConfigError, match=message):
        accumulation_steps(TRAINER, 3)
    with pytest.raises(ConfigError, match="world_size = 0"):
        accumulation_steps(TrainerConfig(global_batch_size=8, micro_batch_size=0), 1)


@pytest.mark.parametrize("extra,key", [
    ({"train_batch_size": 4}, "train_batch_size"), ({"bf16": {"enabled": True}}, "bf16"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer"), ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
    ({"gradient_clipping": 2.0}, "gradient_clipping"), ({"wandb": {"enabled": True}}, "wandb"),
])
def test_owned_keys_are_refused_by_name(extra, key):
    with pytest.raises(ConfigError, match=rf"engine.deepspeed.{key} is decided by"):
        build_config(TRAINER, OptimizerConfig(), EngineConfig(deepspeed=extra), 1)


def test_a_key_deepspeed_would_pass_over_is_refused():
    with pytest.raises(ConfigError, match="wall_clock_brakedown is nothing DeepSpeed reads.*'wall_clock_breakdown'"):
        build_config(TRAINER, OptimizerConfig(), EngineConfig(deepspeed={"wall_clock_brakedown": True}), 1)


def test_every_key_let_through_is_known_to_the_installed_deepspeed():
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    words = set()
    for path in folder.rglob("*.py"):
        words.update(re.findall(r"""["']([a-z0-9_]+)["']""", path.read_text(encoding="utf-8")))
    assert TOP_LEVEL - words == set()


@pytest.mark.parametrize("extra,said", [
    ({"zero_optimization": 5}, "must be a mapping"), ({"zero_optimization": {"overlap_com": True}}, "overlap_com"),
    ({"zero_optimization": {"reduce_bucket_size": "many"}}, "reduce_bucket_size"),
])
def test_what_deepspeed_refuses_is_said_in_one_sentence(tmp_path, extra, said):
    drafter = tiny_drafter()
    config = tiny_config(tmp_path)
    with pytest.raises(ConfigError, match=f"DeepSpeed does not take.*{said}"):
        initialize(TrainingModule(drafter, config.objective), config.trainer, config.optimizer,
                   EngineConfig(zero_stage=1, deepspeed=extra))


def test_other_keys_are_merged_verbatim():
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_allow_untested_optimizer": True}
    config = build_config(TRAINER, OptimizerConfig(), EngineConfig(zero_stage=2, deepspeed=extra), 2)
    zero = config["zero_optimization"]
    assert zero.pop("reduce_bucket_size") == 50_000_000, "DeepSpeed's own default takes 2 GB of every rank"
    assert zero == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    own = EngineConfig(zero_stage=2, deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}})
    assert build_config(TRAINER, OptimizerConfig(), own, 2)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["train_batch_size"] == 8 and config["gradient_accumulation_steps"] == 2
    assert not {"optimizer", "wandb", "tensorboard"} & config.keys()


@pytest.mark.parametrize("stage", (2, 3))
def test_offload_options_reach_deepspeed_as_they_are(tmp_path, stage):
    config = tiny_config(tmp_path)
    options = {"offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 3}, "sub_group_size": 12345}
    config.engine = EngineConfig(zero_stage=stage, deepspeed={"zero_optimization": dict(options)})
    engine = initialize(TrainingModule(tiny_drafter(), config.objective), config.trainer, config.optimizer,
                        config.engine)
    assert options.items() <= engine.config["zero_optimization"].items()
    zero = engine.zero_optimization_stage(), engine.zero_offload_optimizer()
    assert zero[0] == stage and zero[1].device == "cpu" and zero[1].pin_memory and zero[1].buffer_count == 3


def test_stage_and_precision():
    assert effective_stage(0, "fp32") == 0 and effective_stage(0, "bf16") == 1 and effective_stage(3, "bf16") == 3
    with pytest.raises(ConfigError, match="zero_stage=4"):
        effective_stage(4, "fp32")
    with pytest.raises(ConfigError, match="'fp16'"):
        effective_stage(1, "fp16")


def test_parameter_groups_cover_everything_once():
    drafter = tiny_drafter()
    names = {id(p): name for name, p in drafter.named_parameters()}
    groups = parameter_groups(drafter, OptimizerConfig(lr=1.0, head_lr_multiplier=2.0, confidence_lr_multiplier=3.0))
    found = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert len(found) == len(names)
    for name, rate in found.items():
        assert rate == (2.0 if name.startswith("markov_head") else 3.0 if name.startswith("confidence_head") else 1.0)
    assert len(parameter_groups(drafter, OptimizerConfig())) == 1


def test_no_compiler_is_needed(tmp_path):
    here = Path(__file__).parent
    script = (
        "import sys; from pathlib import Path; from tiny_training import tiny_trainer, tiny_config\n"
        "for stage in (0, 2):\n"
        "    config = tiny_config(Path(sys.argv[1]) / str(stage), max_steps=1)\n"
        "    config.engine.zero_stage = stage\n"
        "    assert tiny_trainer(None, config=config).run().step == 1\n"
    )
    environ = os.environ | {
        "PATH": str(tmp_path / "nothing"), "CC": "/bin/false", "CXX": "/bin/false", "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "PYTHONPATH": f"{here}{os.pathsep}{here.parents[2]}",
    }
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "ext").exists()
    assert "DeepSpeed" not in result.stdout and "MA 0" not in result.stdout


def test_config_has_no_side_effect_on_the_options(tmp_path):
    config = tiny_config(tmp_path)
    before = dict(config.engine.deepspeed)
    build_config(config.trainer, config.optimizer, config.engine, 1)
    assert config.engine.deepspeed == before
