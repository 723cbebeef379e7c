"""Row-wise work on a chunk of logits, spread over the CPU's threads.

A tile of rows is worked through by a dozen short operators while it is in a core's cache. Splitting each of them over
the threads would wake and wait for threads a dozen times per tile; here every thread has tiles of its own.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Callable, Iterator

import torch


def workers_of(device: torch.device) -> int:
    """How many workers ``over_rows`` uses on ``device``: the CPU's threads, or one stream of launches."""
    return torch.get_num_threads() if device.type == "cpu" else 1


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    started = threading.Barrier(threads)

    def alone() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="rows", initializer=alone)
    for future in [pool.submit(lambda: None) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(threads)  # threads to come take the last value that anyone has set
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads


@contextmanager
def _short_turns() -> Iterator[None]:
    """Operators of a fraction of a millisecond would wait 5 ms for the interpreter, which one thread has at a time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def over_rows(count: int, tile: int, device: torch.device, work: Callable[[slice, int], None]) -> None:
    """Call ``work(rows, worker)`` for consecutive tiles of ``range(count)``, without gradients.

    Worker w of ``workers_of(device)`` runs one tile at a time, so it may have a buffer of its own. What ``work`` raises
    is raised here.
    """
    tiles = [slice(first, min(first + tile, count)) for first in range(0, count, tile)]
    workers = min(workers_of(device), len(tiles))

    def run(worker: int) -> None:
        with torch.no_grad():
            # A share in one piece: neighbouring rows use the same rows of the target.
            for rows in tiles[worker * len(tiles) // workers:(worker + 1) * len(tiles) // workers]:
                work(rows, worker)

    if workers <= 1:
        if workers:
            run(0)
        return
    with _short_turns():
        for future in [_pool(workers_of(device)).submit(run, worker) for worker in range(workers)]:
            future.result()
