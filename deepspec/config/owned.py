"""DeepSpeed settings that other options decide; a second source would make one of the two a lie."""

from typing import Any, Mapping

from deepspec.errors import ConfigError

OWNED = {
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "gradient_accumulation_steps": "trainer.global_batch_size and trainer.micro_batch_size",
    "optimizer": "optimizer.*",
    "scheduler": "optimizer.warmup_ratio and optimizer.min_lr_ratio",
    "gradient_clipping": "optimizer.max_grad_norm",
    "bf16": "trainer.precision", "bfloat16": "trainer.precision", "fp16": "trainer.precision",
    "data_types": "trainer.precision",
    "zero_optimization.stage": "engine.zero_stage",
    "wandb": "tracking.*", "tensorboard": "tracking.*", "csv_monitor": "tracking.*", "comet": "tracking.*",
}


def refuse_owned(deepspeed: Mapping[str, Any]) -> None:
    """Raises ConfigError when ``engine.deepspeed`` sets what another option decides."""
    for key, option in OWNED.items():
        if _contains(deepspeed, key):
            raise ConfigError(f"engine.deepspeed.{key} is decided by {option}. Remove it and set that instead.")


def _contains(tree: Mapping[str, Any], path: str) -> bool:
    head, _, rest = path.partition(".")
    if head not in tree:
        return False
    return not rest or (isinstance(tree[head], Mapping) and _contains(tree[head], rest))
