"""Checks of the objective, the training loop, the optimizer and the engine."""

import math

from deepspec.config.owned import refuse_owned
from deepspec.config.schema import Config
from deepspec.errors import ConfigError
from deepspec.planning.ranks import trainer_ranks
from deepspec.planning.require import choice, require, whole, wholes, within


def check_objective(config: Config) -> None:
    """Weights of Eq. 12 and how the loss is computed. Raises ConfigError."""
    objective = config.objective
    for name in ("ce_weight", "tv_weight", "confidence_weight"):
        within(f"objective.{name}", getattr(objective, name), 0.0, math.inf)
    require(objective.ce_weight + objective.tv_weight > 0, "objective.ce_weight + objective.tv_weight", 0, "above 0")
    if objective.decay is not None:
        within("objective.decay", objective.decay, 0.0, math.inf, open_low=True)
    choice("objective.implementation", objective.implementation, ("auto", "eager", "chunked", "triton"))
    choice("objective.ce_labels", objective.ce_labels, ("data", "target"))
    if objective.ce_labels == "target" and objective.implementation == "triton":
        raise ConfigError("objective.implementation=triton has no kernel for objective.ce_labels=target. Use "
                          "objective.implementation=auto, which then takes chunked.")
    whole("objective.chunk_megabytes", objective.chunk_megabytes, 1)


def _batch(config: Config) -> None:
    trainer = config.trainer
    for name in ("pack_anchors", "pad_packs"):
        if getattr(trainer, name):
            raise ConfigError(f"trainer.{name}={getattr(trainer, name)} belongs to packing by tokens, but "
                              "trainer.pack_tokens is null. Set trainer.pack_tokens (a multiple of data.max_length is "
                              f"a good start), or leave trainer.{name} out.")
    world = trainer_ranks(config)
    unit = trainer.micro_batch_size * world
    if trainer.global_batch_size % unit:
        raise ConfigError(f"trainer.global_batch_size={trainer.global_batch_size} must be a multiple of "
                          f"trainer.micro_batch_size={trainer.micro_batch_size} x {world} ranks = {unit}. Nearest: "
                          f"{max(1, round(trainer.global_batch_size / unit)) * unit}.")


def _packing(config: Config) -> None:
    trainer = config.trainer
    require((trainer.pack_tokens or 0) >= config.data.max_length, "trainer.pack_tokens", trainer.pack_tokens,
            f"at least data.max_length={config.data.max_length}, so that the longest sample fits")
    if trainer.pack_anchors is not None:
        require(trainer.pack_anchors >= trainer.num_anchors, "trainer.pack_anchors", trainer.pack_anchors,
                f"at least trainer.num_anchors={trainer.num_anchors}, so that one sample's blocks fit")
    elif trainer.pad_packs:
        raise ConfigError("trainer.pad_packs=true needs a number of blocks to fill up to. Set trainer.pack_anchors.")


def _early_stopping(config: Config) -> None:
    trainer = config.trainer
    within("trainer.early_stopping_threshold", trainer.early_stopping_threshold, 0.0, math.inf)
    if trainer.early_stopping_patience is None:
        if trainer.early_stopping_threshold:
            raise ConfigError(f"trainer.early_stopping_threshold={trainer.early_stopping_threshold} has no effect "
                              "without trainer.early_stopping_patience (3, say). Set both, or leave it out.")
        return
    wholes("trainer", trainer, ("early_stopping_patience",), 1)
    for name, value, needed in (("validate_every", trainer.validate_every, "the steps between two validations"),
                                ("keep_best", trainer.keep_best, "true, so that the best checkpoint is there")):
        if not value:
            raise ConfigError(f"trainer.early_stopping_patience={trainer.early_stopping_patience} needs "
                              f"trainer.{name}, which is {str(value).lower()}: set it to {needed}.")


def _schedule(config: Config) -> None:
    optimizer = config.optimizer
    choice("optimizer.schedule", optimizer.schedule, ("cosine", "linear", "constant", "wsd"))
    for name in ("warmup_ratio", "min_lr_ratio"):
        within(f"optimizer.{name}", getattr(optimizer, name), 0.0, 1.0)
    if optimizer.decay_ratio is not None:
        if optimizer.schedule != "wsd":
            raise ConfigError(f"optimizer.decay_ratio={optimizer.decay_ratio} belongs to optimizer.schedule=wsd, but "
                              f"it is {optimizer.schedule}. Set optimizer.schedule=wsd, or leave decay_ratio out.")
        within("optimizer.decay_ratio", optimizer.decay_ratio, 0.0, 1.0, open_low=True)
        require(optimizer.warmup_ratio + optimizer.decay_ratio <= 1.0, "optimizer.warmup_ratio + decay_ratio",
                optimizer.warmup_ratio + optimizer.decay_ratio, "at most 1")
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio:
        raise ConfigError(f"optimizer.min_lr_ratio={optimizer.min_lr_ratio} has no effect with "
                          "optimizer.schedule=constant, which never falls. Leave it out, or choose cosine, linear or "
                          "wsd.")


def check_trainer(config: Config) -> None:
    """The training loop, its optimizer and engine. Raises ConfigError."""
    trainer, optimizer = config.trainer, config.optimizer
    wholes("trainer", trainer, ("epochs", "max_steps", "global_batch_size", "micro_batch_size", "num_anchors",
                                "log_every", "save_every", "keep_last", "max_bad_steps",
                                "pack_tokens", "pack_anchors"), 1)
    if trainer.seed is not None:
        whole("trainer.seed", trainer.seed, 0)
        require(trainer.seed < 2**32, "trainer.seed", trainer.seed, "below 2**32, the range of all generators")
    wholes("trainer", trainer, ("validate_every", "validation_samples", "decode_every"), 0)
    wholes("trainer", trainer, ("decode_prompts", "decode_tokens"), 1)
    choice("trainer.precision", trainer.precision, ("bf16", "fp32"))
    choice("trainer.attention", trainer.attention, ("auto", "chunked", "flex"))
    _early_stopping(config)
    if trainer.ema_decay is not None:
        within("trainer.ema_decay", trainer.ema_decay, 0.0, 1.0, open_high=True)
    if trainer.pack_tokens is None:
        _batch(config)
    else:
        _packing(config)
    within("optimizer.lr", optimizer.lr, 0.0, math.inf, open_low=True)
    require(len(optimizer.betas) == 2, "optimizer.betas", list(optimizer.betas), "a list of two numbers")
    for beta in optimizer.betas:
        within("optimizer.betas", beta, 0.0, 1.0, open_high=True)
    within("optimizer.eps", optimizer.eps, 0.0, math.inf, open_low=True)
    for name in ("weight_decay", "backbone_lr_multiplier", "head_lr_multiplier", "confidence_lr_multiplier"):
        within(f"optimizer.{name}", getattr(optimizer, name), 0.0, math.inf)
    _schedule(config)
    within("optimizer.max_grad_norm", optimizer.max_grad_norm, 0.0, math.inf, open_low=True)
    require(config.engine.zero_stage in (0, 1, 2, 3), "engine.zero_stage", config.engine.zero_stage, "0, 1, 2 or 3")
    if trainer.compile and config.engine.zero_stage == 3:
        raise ConfigError("trainer.compile=true does not work with engine.zero_stage=3, which empties the parameters "
                          "that a compiled layer has captured. Set trainer.compile=false or engine.zero_stage=2.")
    refuse_owned(config.engine.deepspeed)
    within("tracking.timeout_seconds", config.tracking.timeout_seconds, 0.0, math.inf, open_low=True)
    choice("tracking.mode", config.tracking.mode, ("auto", "online", "offline", "disabled"))
