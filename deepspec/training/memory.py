"""Peak memory, and keeping a CPU run's memory flat."""

import ctypes
import ctypes.util
import resource
from functools import cache
from typing import Any, Optional

import torch


def peak_bytes() -> int:
    """Most memory this rank has held so far: allocated on the GPU, resident on the CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@cache
def _libc() -> Optional[Any]:
    name = ctypes.util.find_library("c")
    library = ctypes.CDLL(name) if name else None
    return library if library is not None and hasattr(library, "malloc_trim") else None


def release_free_pages() -> None:
    """Give pages of freed tensors back. glibc keeps them in its heap, which tensors of ever new sizes fragment until
    the machine is full; on a GPU the caching allocator does its own bookkeeping."""
    library = _libc()
    if library is not None and not torch.cuda.is_available():
        library.malloc_trim(0)
