"""Ranks, devices and collectives. The only place that starts a process group; works without any launcher."""

import os
import socket
from datetime import timedelta
from typing import Optional, Sequence

import torch

from deepspec.errors import ConfigError


def rank() -> int:
    """Global rank, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank on this host, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is global rank 0, which writes files and shows progress."""
    return rank() == 0


def device() -> torch.device:
    """The accelerator of this local rank, or the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def set_threads(threads: int) -> None:
    """Give this rank ``threads`` CPU threads; 0 shares the cores between the local ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", str(world_size()))))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // max(1, local)))


def init(timeout_seconds: float = 1800.0) -> None:
    """Start DeepSpeed's default process group once; a single process without a launcher opens no port.

    A collective that a lost host never joins fails after ``timeout_seconds``, or ``$DEEPSPEC_COLLECTIVE_TIMEOUT``.
    """
    if torch.distributed.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ and world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()} is set but MASTER_ADDR is not. Start through the deepspeed launcher."
        )
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.cuda.is_available():
        # The shared-memory collectives need a compiler and a minute and a half; gloo does everything we use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = _time_limit(timeout_seconds)
    if world_size() == 1:
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(f"Port {os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')} is in use, by "
                          "another job perhaps. Give this one its own: deepspeed --master_port 29501 ...") from None


def _time_limit(seconds: float) -> timedelta:
    text = os.environ.get("DEEPSPEC_COLLECTIVE_TIMEOUT", str(seconds))
    try:
        return timedelta(seconds=float(text))
    except ValueError:
        raise ConfigError(
            f"DEEPSPEC_COLLECTIVE_TIMEOUT={text!r} is not a number of seconds. Correct or unset it.") from None


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def barrier() -> None:
    """Wait for all ranks."""
    if torch.distributed.is_initialized() and world_size() > 1:
        torch.distributed.barrier()


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Sum of ``values`` over all ranks, in float64."""
    if world_size() == 1 or not torch.distributed.is_initialized():
        return [float(value) for value in values]
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device())
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(value: float) -> float:
    """Largest ``value`` of all ranks."""
    if world_size() == 1 or not torch.distributed.is_initialized():
        return float(value)
    tensor = torch.tensor([value], dtype=torch.float64, device=device())
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)


def broadcast_object(value: object, source: int = 0) -> object:
    """``value`` of rank ``source`` on every rank."""
    if world_size() == 1 or not torch.distributed.is_initialized():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=source, device=device() if torch.cuda.is_available() else None)
    return box[0]


def gather_objects(value: object) -> Optional[list[object]]:
    """Values of all ranks on rank 0, None elsewhere."""
    if world_size() == 1 or not torch.distributed.is_initialized():
        return [value]
    box: Optional[list[object]] = [None] * world_size() if rank() == 0 else None
    torch.distributed.gather_object(value, box, dst=0)
    return box
