"""DeepSpeed settings that other options decide; a second source would make one of the two a lie."""

import difflib
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
# DeepSpeed reads these at the top of its configuration and passes over any other without a word. (What stands below
# them it checks itself.) A test compares them with the installed DeepSpeed.
TOP_LEVEL = frozenset("""
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
""".split())


def refuse_owned(deepspeed: Mapping[str, Any]) -> None:
    """Raises ConfigError when ``engine.deepspeed`` sets what another option decides, or what DeepSpeed never reads."""
    for key in deepspeed:
        if key not in TOP_LEVEL:
            close = difflib.get_close_matches(key, sorted(TOP_LEVEL), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "its configuration reference has those it reads."
            raise ConfigError(f"engine.deepspeed.{key} is nothing DeepSpeed reads; it would be ignored: {hint}")
    for key, option in OWNED.items():
        if _contains(deepspeed, key):
            raise ConfigError(f"engine.deepspeed.{key} is decided by {option}. Remove it and set that instead.")


def _contains(tree: Mapping[str, Any], path: str) -> bool:
    head, _, rest = path.partition(".")
    if head not in tree:
        return False
    return not rest or (isinstance(tree[head], Mapping) and _contains(tree[head], rest))
