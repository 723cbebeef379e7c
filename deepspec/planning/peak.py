"""The most one rank holds at a time: model state, what a step adds, and which settings an accelerator has room for."""

import os
from dataclasses import dataclass, replace
from typing import Any, Mapping, Optional

from deepspec.config.schema import Config
from deepspec.drafters.v4.options import is_v4
from deepspec.planning.memory import StateBytes, StepBytes, state_bytes, step_bytes
from deepspec.planning.packs import PackPlan, plan_packs
from deepspec.planning.samples import SampleLength
from deepspec.planning.sizes import ParameterCount
from deepspec.planning.sizes_v4 import stacked_elements

BUCKET_ELEMENTS = 50_000_000  # gradients reduced together (training.engine; compared by a test)
GATHERED_ELEMENTS = 1_000_000_000  # parameters that ZeRO-3 keeps gathered (DeepSpeed's stage3_max_live_parameters)
USABLE = 0.92  # of an accelerator's memory; the rest is the context, kernels and fragmentation
ACCELERATOR_GB = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}
_OFFLOADED = ("cpu", "nvme")


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank. ``host`` of its model state lie in main memory, because ``engine.deepspeed`` offloads it."""

    state: StateBytes
    step: StepBytes
    gathered: int  # whole parameters that ZeRO-3 keeps from the forward pass to the end of the backward one
    collectives: int  # buckets of gradients
    update: int  # temporaries of the optimizer's step
    host: int

    @property
    def peak(self) -> int:
        """Of the device. Objective, collectives and update are never there together."""
        step = self.step
        working = max(step.activations + self.gathered + max(step.objective, self.collectives), self.update)
        return self.state.total - self.host + step.frozen + step.target + step.batch + working


def collective_bytes(trainable: int, precision: str, zero_stage: int, ranks: int) -> int:
    """Buffers while gradients are reduced: in fp32 between the ranks, whatever the precision."""
    width = 2 if precision == "bf16" else 4
    if zero_stage == 0:
        return trainable * 4 if ranks > 1 else 0  # DeepSpeed flattens up to 500 million gradients into one tensor
    bucket = min(BUCKET_ELEMENTS, trainable)
    between = 4 * bucket if ranks > 1 and width == 2 else 0
    return bucket * width + between


def gathered_bytes(trainable: int, precision: str, zero_stage: int, ranks: int, largest: int = 0) -> int:
    """Parameters that ZeRO-3 holds whole while a step lasts; the ``largest`` one it gathers beyond its limit."""
    held = min(GATHERED_ELEMENTS + largest, trainable) if zero_stage == 3 and ranks > 1 else 0
    return held * (2 if precision == "bf16" else 4)


def update_bytes(trainable: int, zero_stage: int, ranks: int) -> int:
    """AdamW's denominator and its quotient, fp32, of everything that a rank updates at once (its flat partition)."""
    return 8 * (-(-trainable // ranks)) if zero_stage else 0


def offloaded(config: Config) -> frozenset[str]:
    """Which of ``optimizer`` and ``param`` the engine keeps in main memory or on NVMe."""
    zero: Any = config.engine.deepspeed.get("zero_optimization") or {}
    parts = ((part, zero.get(f"offload_{part}")) for part in ("optimizer", "param"))
    return frozenset(part for part, value in parts
                     if isinstance(value, Mapping) and value.get("device") in _OFFLOADED)


def rank_bytes(config: Config, parameters: ParameterCount, packs: PackPlan, zero_stage: int, ranks: int) -> RankBytes:
    """Everything of one rank, for its largest pack."""
    precision = config.trainer.precision
    if zero_stage == 0 and precision == "bf16":
        zero_stage = 1  # what then runs (training.engine.effective_stage)
    state = state_bytes(parameters.trainable, precision, zero_stage, ranks,
                        averaged=config.trainer.ema_decay is not None)
    away = offloaded(config)
    host = state.optimizer + state.gradients if "optimizer" in away else 0
    host += state.parameters if "param" in away and zero_stage == 3 else 0
    return RankBytes(state, step_bytes(config, parameters, packs),
                     gathered_bytes(parameters.trainable, precision, zero_stage, ranks,
                                    stacked_elements(config) if is_v4(config.drafter.algorithm) else 0),
                     collective_bytes(parameters.trainable, precision, zero_stage, ranks),
                     0 if "optimizer" in away else update_bytes(parameters.trainable, zero_stage, ranks), host)


def target_rank_bytes(config: Config, parameters: ParameterCount, packs: PackPlan) -> int:
    """What a rank needs that only runs the target (features.mode=disaggregated): weights, a layer's work, states."""
    shape, width = config.target.shape, 2 if config.target.dtype == "bfloat16" else 4
    inner = 3 * shape.intermediate_size + 2 * shape.num_heads * shape.head_dim + 4 * shape.hidden_size
    kept = (len(config.target.feature_layers) + 1) * shape.hidden_size
    return parameters.target * width + packs.tokens * (inner + 2 * kept) * width


def machine_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def largest_batch(config: Config, parameters: ParameterCount, length: SampleLength, zero_stage: int, ranks: int,
                  device_bytes: float) -> Optional[int]:
    """Most samples of a micro batch, or with packing tokens of a pack, that fit into ``device_bytes``; None: not one.

    Micro batches divide trainer.global_batch_size; packs grow in steps of data.max_length, with their anchors.
    """
    best = None
    for size in _sizes(config, ranks):
        trial = replace(config, trainer=replace(config.trainer, **_scaled(config, size)))
        packs = plan_packs(trial, length)
        if rank_bytes(trial, parameters, packs, zero_stage, ranks).peak > device_bytes:
            break
        best = size
    return best


def _sizes(config: Config, ranks: int) -> list[int]:
    trainer = config.trainer
    if trainer.pack_tokens is not None:
        return [config.data.max_length * count for count in range(1, 65)]
    share = max(1, trainer.global_batch_size // ranks)
    return [size for size in range(1, share + 1) if share % size == 0]


def _scaled(config: Config, size: int) -> dict[str, Any]:
    trainer = config.trainer
    if trainer.pack_tokens is None:
        return {"micro_batch_size": size}
    anchors = None
    if trainer.pack_anchors is not None:
        anchors = max(trainer.num_anchors, trainer.pack_anchors * size // trainer.pack_tokens)
    return {"pack_tokens": size, "pack_anchors": anchors}
