"""DeepSpeed: configuration, optimizer, and the few places where its ZeRO stages behave differently."""

import contextlib
import copy
import io
import logging
import warnings
from typing import Any, Iterator, Mapping

import torch
from torch import nn

from deepspec import distributed
from deepspec.config.owned import refuse_owned
from deepspec.config.schema import EngineConfig, OptimizerConfig, TrainerConfig
from deepspec.errors import ConfigError

logger = logging.getLogger(__name__)

_HEAD_PREFIXES = ("markov_head", "sequential", "rnn_head")
_CONFIDENCE_PREFIXES = ("confidence",)
# DeepSpeed's own 500 million are 2 GB of every rank, however small the drafter; larger parameters are reduced alone.
_BUCKET_ELEMENTS = 50_000_000
# Of stages 1 and 2, of stage 1 in bf16, and of stage 3.
_FLAT_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")


class GuardedAdamW(torch.optim.AdamW):
    """AdamW with the clipping, gradient norm and skipping of invalid steps that DeepSpeed has for stages 1 to 3 only.

    DeepSpeed reads ``overflow`` and ``_global_grad_norm`` after the step, as it does from its own optimizers.
    """

    def __init__(self, params: Any, max_norm: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update unless the gradient is not finite. Gradients are already reduced, so all ranks decide alike."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not bool(torch.isfinite(norm))
        if self.overflow:
            return
        if self.max_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))
        super().step()


def accumulation_steps(trainer: TrainerConfig, world: int) -> int:
    """Micro-steps of a full window. Raises ConfigError when the global batch does not divide.

    With packing a window has as many as its packs, at most one per sample. At least 2 are announced, because to
    DeepSpeed 1 means that nothing is ever accumulated (stage_1_and_2.py: set_norm_for_param_grad).
    """
    if trainer.pack_tokens is not None:
        return max(2, -(-trainer.global_batch_size // world))
    per_step = trainer.micro_batch_size * world
    if trainer.micro_batch_size < 1 or trainer.global_batch_size < 1 or trainer.global_batch_size % per_step:
        raise ConfigError(
            f"global_batch_size={trainer.global_batch_size} must be a multiple of "
            f"micro_batch_size * world_size = {per_step}. Change trainer.global_batch_size or trainer.micro_batch_size."
        )
    return trainer.global_batch_size // per_step


def effective_stage(stage: int, precision: str) -> int:
    """The DeepSpeed stage that runs. Stage 0 cannot accumulate bf16 gradients in fp32, stage 1 can, at no cost."""
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"engine.zero_stage={stage} must be 0, 1, 2 or 3.")
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"trainer.precision={precision!r} must be bf16 or fp32.")
    if stage == 0 and precision == "bf16":
        logger.info("engine.zero_stage=0 with bf16 runs as stage 1: fp32 gradient accumulation needs it")
        return 1
    return stage


def build_config(trainer: TrainerConfig, optimizer: OptimizerConfig, engine: EngineConfig,
                 world: int) -> dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``; ``engine.deepspeed`` is merged into it verbatim."""
    stage = effective_stage(engine.zero_stage, trainer.precision)
    accumulation = accumulation_steps(trainer, world)
    micro = trainer.micro_batch_size if trainer.pack_tokens is None else 1
    config: dict[str, Any] = {
        # Only for DeepSpeed's own accounts: step.accumulate sets the boundary and no gradient is divided by these.
        "train_batch_size": micro * accumulation * world,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        # Stage 0 clips in GuardedAdamW, which also knows the norm.
        "gradient_clipping": optimizer.max_grad_norm if stage else 0.0,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": _BUCKET_ELEMENTS},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
    }
    if trainer.precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    refuse_owned(engine.deepspeed)
    return _merge(config, engine.deepspeed)


def _merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parameter_groups(drafter: nn.Module, options: OptimizerConfig) -> list[dict[str, Any]]:
    """Backbone, sequential head and confidence head, each with its multiple of the learning rate.

    Groups with equal settings are joined: ZeRO partitions each group by itself.
    """
    settings: dict[float, list[nn.Parameter]] = {}
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        multiplier = options.backbone_lr_multiplier
        if name.startswith(_CONFIDENCE_PREFIXES):
            multiplier = options.confidence_lr_multiplier
        elif name.startswith(_HEAD_PREFIXES):
            multiplier = options.head_lr_multiplier
        settings.setdefault(multiplier, []).append(parameter)
    return [
        {"params": parameters, "lr": options.lr * multiplier, "lr_multiplier": multiplier}
        for multiplier, parameters in settings.items()
    ]


def _make_optimizer(groups: list[dict[str, Any]], options: OptimizerConfig, stage: int) -> torch.optim.AdamW:
    values: dict[str, Any] = {
        "lr": options.lr, "betas": tuple(options.betas), "eps": options.eps, "weight_decay": options.weight_decay,
    }
    if stage == 0:
        return GuardedAdamW(groups, max_norm=options.max_grad_norm, **values)
    return torch.optim.AdamW(groups, **values)


class _KnownNoise(logging.Filter):
    """Drops DeepSpeed's remark about dataclass arguments: no module of ours needs hooks on them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "unknown inputs or outputs type" not in record.getMessage()


def initialize(module: nn.Module, trainer: TrainerConfig, optimizer: OptimizerConfig, engine: EngineConfig) -> Any:
    """Wrap ``module`` (with a ``drafter`` inside) in a DeepSpeed engine; the process group is started if need be.

    The module's fp32 weights become the masters. Moving it to the device is done here.
    """
    distributed.init()
    import deepspeed
    from deepspeed.utils import logger as deepspeed_logger

    # DeepSpeed calls torch's older names of two collectives, several times per step.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+_tensor", category=FutureWarning)
    deepspeed_logger.setLevel(logging.WARNING)
    if not any(isinstance(known, _KnownNoise) for known in deepspeed_logger.filters):
        deepspeed_logger.addFilter(_KnownNoise())
    config = build_config(trainer, optimizer, engine, distributed.world_size())
    _accepted(config)
    module.to(distributed.device())
    stage = config["zero_optimization"]["stage"]
    client = _make_optimizer(parameter_groups(module.get_submodule("drafter"), optimizer), optimizer, stage)
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory statistics
        wrapped, _, _, _ = deepspeed.initialize(
            model=module, optimizer=client, config=config, dist_init_required=False,
        )
    return wrapped


def _accepted(config: Mapping[str, Any]) -> None:
    """Raises ConfigError with DeepSpeed's reason where it does not take its configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(copy.deepcopy(dict(config)))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"DeepSpeed does not take what engine.deepspeed says: {' '.join(str(error).split())}. "
                          "Correct engine.deepspeed; its keys and values are those of DeepSpeed's own documentation."
                          ) from None


def set_learning_rate(engine: Any, rate: float) -> None:
    """Learning rate of the next step: ``rate`` times each group's multiplier."""
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]


def step_was_skipped(engine: Any) -> bool:
    """Whether the last step was dropped because its gradient was not finite; the same on all ranks."""
    return bool(getattr(engine.optimizer, "overflow", False))


def gradient_norm(engine: Any) -> float:
    """Norm of the last window's gradient before clipping, over all ranks."""
    norm = engine.get_global_grad_norm()
    return float(norm) if norm is not None else float("nan")


def named_trainable(engine: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters under the drafter's own names, in a fixed order."""
    for name, parameter in engine.module.drafter.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def masters(engine: Any) -> list[torch.Tensor]:
    """The fp32 weights that this rank's optimizer updates, wherever they lie: flat partitions, or whole at stage 0.

    Raises ConfigError where they are not in memory.
    """
    if engine.zero_optimization_stage() == 0:
        return [parameter.data for _, parameter in named_trainable(engine)]
    flat = next(getattr(engine.optimizer, name) for name in _FLAT_MASTERS if hasattr(engine.optimizer, name))
    if not all(part.numel() for part in flat):
        raise ConfigError("trainer.ema_decay cannot average weights that engine.deepspeed keeps on NVMe. Offload them "
                          "to the CPU instead, or leave trainer.ema_decay out.")
    return [part.data for part in flat]
