"""Tokens, bytes on disk, FLOPs and hours of a run, from its options; every assumption is a named number."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from deepspec.config import paths
from deepspec.config.schema import Config, draft_length, drafter_layers
from deepspec.drafters.v4.options import is_v4
from deepspec.planning.packs import PackPlan, plan_packs
from deepspec.planning.rows import most_prompts
from deepspec.planning.samples import SampleLength, cache_bytes_per_sample, cache_bytes_per_token, expected_length
from deepspec.planning.sizes import ParameterCount, active_layers, drafter_head_dim, drafter_kv_heads
from deepspec.planning.sizes_v4 import attention_flops

UTILISATION = {"train": 0.35, "features": 0.40, "responses": 0.08}  # of peak; generation is bound by memory
CPU_UTILISATION = {"train": 0.7, "features": 0.8, "responses": 0.3}  # of the rate of large products
CPU_TFLOPS_PER_CORE = 0.03  # fp32, a core with AVX2
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}  # dense bf16


IN_TRAINING = ("online", "hybrid", "disaggregated")  # modes whose features stage has nothing to do


@dataclass(frozen=True)
class Workload:
    """How much there is to do."""

    prompts: Optional[int]  # None: the sources do not say
    prompts_from: str
    length: SampleLength
    samples_per_epoch: int
    steps: int
    packs: PackPlan
    tokens: int  # of all samples once
    cache_codec: str
    cache_bytes_per_token: int
    cache_bytes: int
    cache_files: int
    one_checkpoint_bytes: int  # also of rank 0's host memory while one is written in the background
    checkpoint_bytes: int
    export_bytes: int

    @property
    def disk_bytes(self) -> int:
        """All that a whole run writes."""
        return self.cache_bytes + self.checkpoint_bytes + self.export_bytes


def count_rows(path: Path) -> Optional[int]:
    """Lines of a JSONL file, or None where there is none."""
    try:
        with open(path, "rb") as handle:
            return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))
    except OSError:
        return None


def expected_prompts(config: Config) -> tuple[Optional[int], str]:
    """Number of prompts and where the number comes from: files that exist, then limits in the options."""
    if config.features.path is not None and (rows := count_rows(paths.features_dir(config) / "index.jsonl")):
        return rows, f"samples of {paths.features_dir(config)}"
    for path in (paths.responses_dir(config) / "responses.jsonl", paths.prompts_dir(config) / "prompts.jsonl"):
        rows = count_rows(path)
        if rows:
            return rows, f"lines of {path}"
    limit, found = config.data.max_prompts, most_prompts(list(config.data.sources))
    if found is not None and (limit is None or found[0].rows < limit):
        most, by_caps = found
        return most.rows, "sum of data.sources[].cap" if by_caps else f"{most.text} rows of data.sources[].path"
    if limit is not None:
        return limit, "data.max_prompts"
    return None, "unknown: neither data.max_prompts nor caps are set"


def workload(config: Config, parameters: ParameterCount) -> Workload:
    """The size of every part of the run."""
    prompts, source = expected_prompts(config)
    length = expected_length(config)
    held_out = config.data if config.features.path is None else config.features
    samples = int((prompts or 0) * (1.0 - held_out.held_out_fraction))
    steps = config.trainer.epochs * -(-samples // config.trainer.global_batch_size)
    if config.trainer.max_steps is not None:
        steps = min(steps, config.trainer.max_steps) if prompts else config.trainer.max_steps
    cached = 0
    if paths.leaves_store(config):
        cached = int((prompts or 0) * cache_bytes_per_sample(config, length))
    # fp32 weights, two moments, averages; all that stay, and the new one while it is written.
    state = 12 if config.trainer.ema_decay is None else 16
    checkpoints = config.trainer.keep_last + config.trainer.keep_best + 1
    element = 2 if config.export.dtype == "bfloat16" else 4
    return Workload(
        prompts=prompts, prompts_from=source, length=length, samples_per_epoch=samples, steps=steps,
        packs=plan_packs(config, length),
        tokens=int((prompts or 0) * length.tokens), cache_codec=config.features.codec,
        cache_bytes_per_token=cache_bytes_per_token(config), cache_bytes=cached,
        cache_files=-(-cached // (config.features.shard_megabytes * 2**20)),
        one_checkpoint_bytes=parameters.trainable * state, checkpoint_bytes=checkpoints * parameters.trainable * state,
        export_bytes=(parameters.trainable + parameters.frozen) * element * len(config.export.formats),
    )


def train_flops_per_sample(config: Config, parameters: ParameterCount, sample: SampleLength) -> float:
    """Forward and backward of one sample: 6 per weight and token, attention, the objective's LM-head products."""
    shape, drafter = config.target.shape, config.drafter
    hidden, vocab = shape.hidden_size, shape.vocab_size
    queries, keys = shape.num_heads * drafter_head_dim(config), drafter_kv_heads(config) * drafter_head_dim(config)
    length = sample.tokens
    anchors = min(config.trainer.num_anchors, sample.answer)
    slots = anchors * drafter.block_size
    context = 6.0 * length * (parameters.fc + drafter_layers(drafter) * 2 * keys * hidden)
    attention = 12.0 * slots * queries * (length / 2 + drafter.block_size) * drafter_layers(drafter)
    if is_v4(drafter.algorithm):
        attention = attention_flops(config, slots)
    backbone = 6.0 * slots * active_layers(config, parameters) + attention
    if drafter.algorithm == "medusa":  # each slot has a head of its own, and there is neither context nor attention
        context, backbone = 0.0, 6.0 * anchors * parameters.layers
    labels = anchors * draft_length(drafter)
    rank = drafter.markov_rank if drafter.head != "none" else 0
    objective = labels * 4.0 * vocab * (hidden + rank) + min(labels, length) * 2.0 * vocab * hidden
    online = 2.0 * parameters.target_active * length if config.features.mode == "online" else 0.0
    return context + backbone + objective + online


def padding_flops(config: Config, parameters: ParameterCount, packs: PackPlan) -> float:
    """Forward and backward of the padding of one optimizer step; its blocks see no context and have no label."""
    keys = drafter_kv_heads(config) * drafter_head_dim(config)
    context = parameters.fc + drafter_layers(config.drafter) * 2 * keys * config.target.shape.hidden_size
    slots = packs.padding_anchors * config.drafter.block_size
    return 6.0 * (packs.padding_tokens * context + slots * active_layers(config, parameters))


def stage_flops(config: Config, parameters: ParameterCount, work: Workload) -> dict[str, float]:
    """FLOPs of the three heavy stages."""
    samples = work.steps * config.trainer.global_batch_size
    once = 2.0 * parameters.target_active
    flops = {"responses": once * (work.prompts or 0) * work.length.answer}
    if paths.leaves_store(config):
        flops["features"] = once * work.tokens
    elif config.features.mode == "disaggregated":
        flops["features"] = once * samples * work.length.tokens  # on the target ranks
    flops["train"] = samples * train_flops_per_sample(config, parameters, work.length)
    flops["train"] += work.steps * padding_flops(config, parameters, work.packs)
    return flops


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """How this machine is called in the table."""
    return f"this CPU ({cores()} cores)"


def hours(flops: float, peak_tflops: float, utilisation: float, devices: int = 1) -> float:
    """Hours at ``utilisation`` of the peak."""
    return flops / (peak_tflops * 1e12 * utilisation * devices) / 3600.0
