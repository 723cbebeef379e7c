"""Options of training: objective, loop, optimizer, engine. See schema.py."""

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class ObjectiveConfig:
    """Weights of Eq. 12 and how the loss is computed."""

    ce_weight: float = 0.1  # of the cross-entropy, Eq. 9
    # data: the token of the data (Eq. 9) | target: the target's distribution, as EAGLE-3 is trained (soft labels)
    ce_labels: str = "data"
    tv_weight: float = 0.9  # of the total variation, Eq. 10
    confidence_weight: float = 1.0  # of the confidence loss, Eq. 11
    decay: Optional[float] = 4.0  # w_k = exp(-(k-1)/decay), in slots; null: the block size
    confidence_detach: bool = False  # true: the confidence loss does not reach the backbone
    implementation: str = "auto"  # auto (triton on CUDA, else chunked) | eager | chunked | triton
    chunk_megabytes: int = 512  # memory budget of one chunk of logits


@dataclass
class TrainerConfig:
    """The training loop."""

    # Of initial weights, order of samples and anchors; null: run.seed, which prompts and answers depend on, too
    seed: Optional[int] = None
    epochs: int = 10  # passes over the training samples; unused with max_steps
    max_steps: Optional[int] = None  # optimizer steps; null: epochs decide
    global_batch_size: int = 512  # samples per optimizer step, over all ranks and accumulation
    micro_batch_size: int = 1  # samples packed into one forward of one rank; unused with pack_tokens
    num_anchors: int = 512  # per sample
    pack_tokens: Optional[int] = None  # tokens of a pack; null: micro_batch_size samples make one
    pack_anchors: Optional[int] = None  # blocks of a pack, with pack_tokens; null: no limit
    pad_packs: bool = False  # fill packs to their capacity with weight 0, so that shapes never change
    precision: str = "bf16"  # bf16 (fp32 masters) | fp32
    log_every: int = 1  # optimizer steps between two rows of metrics.jsonl
    save_every: int = 500  # optimizer steps between two checkpoints; the last step is always saved
    keep_last: int = 2  # newest checkpoints that stay
    keep_best: bool = True  # also keep the checkpoint with the best held-out acceptance, named by ``best``
    async_save: bool = True  # write checkpoints in a thread while training goes on
    ema_decay: Optional[float] = None  # per-step decay of an exponential moving average of the weights; null: none
    validate_every: int = 0  # 0 = only at the end
    validation_samples: int = 64  # held-out samples of a validation, evenly over the domains
    # validations in a row without a better held-out acceptance before training ends; null: never
    early_stopping_patience: Optional[int] = None
    early_stopping_threshold: float = 0.0  # tokens per round by which a validation must exceed the best to be better
    decode_every: int = 0  # also decode held-out prompts for real every so many steps; 0 = never
    decode_prompts: int = 8  # held-out prompts that decode_every decodes
    decode_tokens: int = 32  # of each answer
    max_bad_steps: int = 5  # consecutive non-finite steps before the run stops
    resume: str = "auto"  # auto | never | folder of a checkpoint
    activation_checkpointing: bool = False  # recompute layers in the backward pass: less memory, more time
    attention: str = "auto"  # auto (flex on CUDA, else chunked) | chunked | flex
    compile: bool = False  # torch.compile of the drafter's layers


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a schedule down to ``min_lr_ratio``."""

    lr: float = 6e-4  # peak of the schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04  # share of the steps that rise to the peak
    # after the warm-up: cosine | linear (both down to min_lr_ratio) | constant | wsd (constant, then a linear decay)
    schedule: str = "cosine"
    decay_ratio: Optional[float] = None  # wsd: share of the steps, at the end, that decay; null: 0.2
    min_lr_ratio: float = 0.0  # of the peak, what the schedule falls to
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    backbone_lr_multiplier: float = 1.0
    head_lr_multiplier: float = 1.0
    confidence_lr_multiplier: float = 1.0


@dataclass
class EngineConfig:
    """DeepSpeed. ``deepspeed`` is merged verbatim into its configuration (offload options and the like)."""

    zero_stage: int = 0  # 0 | 1 (optimizer) | 2 (and gradients) | 3 (and parameters) divided over ranks
    deepspeed: dict[str, Any] = field(default_factory=dict)
