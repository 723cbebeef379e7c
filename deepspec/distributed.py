"""Ranks, devices and collectives. The only place that starts a process group; works without any launcher.

One launch may be split: its last ranks then only run the target, and everything here, like DeepSpeed's default group,
is about the others, which train. What passes between the two has a group of its own (``Split.connect``).
"""

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Optional, Sequence

import torch
from torch.distributed import PrefixStore, TCPStore

from deepspec.errors import ConfigError, UserError

_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 30.0
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo/transport",
         "Timed out waiting", "remote process exited")


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
    if _split is not None and _split.is_target:
        raise RuntimeError("a target rank is in no process group of the trainers")
    _require_address()
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
    elif _split is not None:
        torch.distributed.init_process_group(backend, store=PrefixStore("trainers", _split.store), rank=rank(),
                                             world_size=world_size(), timeout=timeout)
    try:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
    except torch.distributed.DistNetworkError as error:
        raise _port_in_use(error) from None


def _require_address() -> None:
    if "MASTER_ADDR" not in os.environ and world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()} is set but MASTER_ADDR is not. Start through the deepspeed launcher."
        )


def _port_in_use(error: Exception) -> Exception:
    """What to say of an error that came up while a port was opened."""
    if "EADDRINUSE" not in str(error):
        return error
    return ConfigError(f"Port {os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')} is in use, by "
                       "another job perhaps. Give this one its own: deepspeed --master_port 29501 ...")


def _time_limit(seconds: float) -> timedelta:
    text = os.environ.get("DEEPSPEC_COLLECTIVE_TIMEOUT", str(seconds))
    try:
        return timedelta(seconds=float(text))
    except ValueError:
        raise ConfigError(
            f"DEEPSPEC_COLLECTIVE_TIMEOUT={text!r} is not a number of seconds. Correct or unset it.") from None


def lost_rank(error: BaseException) -> bool:
    """Whether ``error`` of a collective only says that another rank has ended or is not to be reached."""
    return isinstance(error, RuntimeError) and world_size() > 1 and any(word in str(error) for word in _LOST)


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


@dataclass(frozen=True)
class Split:
    """Ranks 0 .. ``trainers`` - 1 of the launch train, the last ``targets`` run the target for them.

    ``store`` is shared by all of them; rank 0 holds it, so it ends with rank 0.
    """

    rank: int  # in the launch
    trainers: int
    targets: int
    store: Any

    @property
    def is_target(self) -> bool:
        """Whether this process runs the target."""
        return self.rank >= self.trainers

    def tell(self, key: str, text: str = "") -> None:
        """Leave ``text`` for the other side under ``key``."""
        self.store.set(f"split/{key}", text)

    def told(self, key: str) -> Optional[str]:
        """What was left under ``key``; None if nothing was. Raises UserError when rank 0 is gone."""
        try:
            if not self.store.check([f"split/{key}"]):
                return None
            return self.store.get(f"split/{key}").decode()
        except torch.distributed.DistError:
            raise UserError("Rank 0 has ended, and this rank with it; the reason is among rank 0's messages. After a "
                            "failure start the same command again: it continues from the last checkpoint.") from None

    def wait(self, *keys: str, seconds: float = float("inf"), check: Callable[[], None] = lambda: None) -> str:
        """The first of ``keys`` that is there, "" after ``seconds``; ``check`` is called meanwhile and may raise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key in keys:
                if self.told(key) is not None:
                    return key
            check()
            time.sleep(_POLL_SECONDS)
        return ""

    def connect(self, timeout_seconds: float = 1800.0) -> Any:
        """A gloo group of all ranks of the launch, beside the default group. Every rank must call this.

        Raises UserError where they do not find each other.
        """
        try:
            return torch.distributed.ProcessGroupGloo(PrefixStore("features", self.store), self.rank,
                                                      self.trainers + self.targets, _time_limit(timeout_seconds))
        except RuntimeError as error:
            raise UserError(f"Rank {self.rank} of {self.trainers + self.targets} could not connect to the others "
                            f"({str(error).splitlines()[0]}). Another rank has ended, as its messages say, or hosts do "
                            "not reach each other: then set GLOO_SOCKET_IFNAME to their common network interface."
                            ) from None

    def leave(self) -> None:
        """The last thing a process does: rank 0 lets the target ranks go and keeps the store until they are gone."""
        try:
            if self.is_target:
                self.tell(f"left-{self.rank}")
            elif self.rank == 0:
                self.tell("over")
                for target in range(self.trainers, self.trainers + self.targets):
                    self.wait(f"left-{target}", seconds=_LEAVE_SECONDS)
        except (torch.distributed.DistError, UserError):
            pass  # the other side has failed, and has said so


_split: Optional[Split] = None


def split(targets: int) -> Split:
    """Divide this launch once, before any group is started. Trainers then see a world of their own.

    Raises ConfigError where no trainer would be left.
    """
    global _split
    if _split is not None:
        return _split
    trainers = world_size() - targets
    if trainers < 1:
        raise ConfigError(f"target.ranks={targets} of {world_size()} ranks leave none to train. Start more ranks "
                          f"(deepspeed --num_gpus {targets + 1} ...) or lower target.ranks.")
    _require_address()
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank() == 0,
                         wait_for_workers=False, timeout=_time_limit(1800.0))
    except torch.distributed.DistNetworkError as error:
        raise _port_in_use(error) from None
    _split = Split(rank(), trainers, targets, store)
    os.environ["WORLD_SIZE"] = str(1 if _split.is_target else trainers)
    return _split


def current_split() -> Optional[Split]:
    """How this launch is divided, if it is."""
    return _split
