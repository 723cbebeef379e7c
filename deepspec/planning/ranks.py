"""How many ranks of the launch train."""

import os

from deepspec.config.schema import Config
from deepspec.errors import ConfigError


def trainer_ranks(config: Config) -> int:
    """Ranks that train: those of the launch but for target ranks. At least 1, so that a plan needs no launcher."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world - (config.target.ranks if config.features.mode == "disaggregated" else 0))


def check_split(config: Config, stages: list[str]) -> None:
    """Raises ConfigError where target ranks would leave none to train."""
    if config.features.mode != "disaggregated" or "train" not in stages:
        return
    world, targets = int(os.environ.get("WORLD_SIZE", "1")), config.target.ranks
    if targets >= world:
        raise ConfigError(f"target.ranks={targets} leaves no rank to train: the launch has {world}. Start at least "
                          f"{targets + 1} (deepspeed --num_gpus {targets + 1} ..., on a CPU --num_accelerators), or "
                          f"use features=online, which runs the target on the ranks that train.")
