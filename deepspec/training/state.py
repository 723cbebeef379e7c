"""Weights and optimizer moments as whole fp32 tensors by parameter name, gathered from and given to any ZeRO stage.

Whole tensors instead of DeepSpeed's per-rank shards: a run resumes on any number of ranks and at any stage, nothing is
unpickled, and the weights on disk are the drafter. Every function here is collective.
"""

from typing import Any, Iterator, Mapping, Optional

import torch
from torch import Tensor, nn

from deepspec import distributed
from deepspec.training.ema import Outline, WeightAverage
from deepspec.training.engine import named_trainable

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGES = "ema"


def gather(engine: Any, average: Optional[WeightAverage] = None) -> Optional[dict[str, dict[str, Tensor]]]:
    """``{"weights" | moment | "ema": {name: fp32 CPU tensor}}`` on rank 0, None on the others.

    Nothing that training does later shows in the result.
    """
    state = {"weights": _collect(engine, None) | _buffers(engine), **{key: _collect(engine, key) for key in MOMENTS}}
    if average is not None:
        with average.as_masters():
            state[AVERAGES] = _collect(engine, None) | _buffers(engine)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return state if distributed.rank() == 0 else None


def _collect(engine: Any, key: Optional[str]) -> dict[str, Tensor]:
    shares_memory = engine.zero_optimization_stage() == 0  # elsewhere DeepSpeed has put the parts into a new tensor
    kept = {}
    for name, parameter in named_trainable(engine):
        full = _read(engine, parameter, key).detach()
        if distributed.rank() == 0:
            kept[name] = _on_cpu(full, shares_memory)
        del full
    return kept


def _buffers(engine: Any) -> dict[str, Tensor]:
    """What the drafter keeps outside of parameters, on rank 0. The same on all ranks, and no optimizer moves it."""
    if distributed.rank() != 0:
        return {}
    return {name: _on_cpu(value, copy=True) for name, value in engine.module.drafter.named_buffers()}


def _on_cpu(full: Tensor, copy: bool) -> Tensor:
    """fp32 on the CPU. From a GPU into pinned memory, which is many times faster; the copy may still be under way."""
    if full.is_cuda:
        pinned = torch.empty(full.shape, dtype=torch.float32, pin_memory=True)
        return pinned.copy_(full, non_blocking=True)
    return full.to(torch.float32, copy=copy).contiguous()


def each_weight(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Every trainable weight whole, fp32, by name and on all ranks, one after the other: never all at once."""
    for name, parameter in named_trainable(engine):
        yield name, _read(engine, parameter, None)


def averaged_module(engine: Any, average: WeightAverage, outline: Outline) -> nn.Module:
    """The engine's module (``outline`` of it) with the averages, in the engine's dtype, whole on every rank."""
    dtype = next(engine.module.parameters()).dtype
    with average.as_masters():
        weights = {f"drafter.{name}": full.detach().to(dtype, copy=True) for name, full in each_weight(engine)}
    weights |= {f"drafter.{name}": value.clone() for name, value in engine.module.drafter.named_buffers()}
    return outline.filled(weights)


def scatter(engine: Any, state: Mapping[str, Mapping[str, Tensor]], average: Optional[WeightAverage] = None) -> None:
    """Set masters and moments of a primed engine (``adam_step`` exists) from what ``gather`` returned, and ``average``
    where there is one to set and one to set it from."""
    for name, parameter in named_trainable(engine):
        for key in state.keys() - {AVERAGES}:
            _write(engine, parameter, None if key == "weights" else key, state[key][name])
    if average is None:
        return
    average.restart()
    if AVERAGES in state:
        with average.as_masters():
            for name, parameter in named_trainable(engine):
                _write(engine, parameter, None, state[AVERAGES][name])


def link_optimizer_state(engine: Any) -> None:
    """Let every parameter find its moments. DeepSpeed 0.19 does so after the first parameter group has stepped, when
    the other groups have none yet, and never again."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2) and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def adam_step(engine: Any) -> int:
    """Updates applied so far, which AdamW's bias correction counts; skipped steps are not among them."""
    states = list(engine.basic_optimizer.state.values())
    return int(states[0]["step"]) if states else 0


def set_adam_step(engine: Any, count: int) -> None:
    """Tell AdamW that ``count`` updates were applied."""
    for state in engine.basic_optimizer.state.values():
        state["step"] = torch.full_like(state["step"], float(count))


def _read(engine: Any, parameter: Tensor, key: Optional[str]) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        return parameter if key is None else engine.basic_optimizer.state[parameter][key]
    return safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)


def _write(engine: Any, parameter: Any, key: Optional[str], value: Tensor) -> None:
    import deepspeed.utils as hooks

    if engine.zero_optimization_stage() == 0:
        with torch.no_grad():
            (parameter if key is None else engine.basic_optimizer.state[parameter][key]).copy_(value)
    elif engine.zero_optimization_stage() == 3:
        # Its function for whole tensors fails where a parameter does not divide by the number of ranks.
        part = _own_partition(value, parameter.ds_tensor.numel())
        if key is None:
            hooks.safe_set_local_fp32_param(parameter, part)
        else:
            hooks.safe_set_local_optimizer_state(parameter, part, key)
    elif key is None:
        hooks.safe_set_full_fp32_param(parameter, value)
    else:
        hooks.safe_set_full_optimizer_state(parameter, value, key)


def _own_partition(value: Tensor, size: int) -> Tensor:
    """This rank's ``size`` elements of a flattened tensor, zeros beyond its end."""
    padded = torch.zeros(size * distributed.world_size(), dtype=value.dtype)
    padded[:value.numel()] = value.flatten()
    return padded.narrow(0, size * distributed.rank(), size)
