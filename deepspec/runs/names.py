"""Names of a sweep's jobs: made from the options that differ, never from a counter or the clock."""

import hashlib
import re
from typing import Sequence

_MAX_LENGTH = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")


def swept(overrides: Sequence[str], common: Sequence[str]) -> tuple[str, ...]:
    """The overrides of one job that are not the whole sweep's, in order."""
    return tuple(text for text in overrides if text not in set(common))


def job_name(overrides: Sequence[str]) -> str:
    """A directory name for a job: ``block_size-4_seed-1`` for ``drafter.block_size=4 run.seed=1``.

    Free of characters that a shell or an override would want quoted. A key is cut to its last part, to its last two
    where two keys end alike; a value that loses something on the way, or a long name, gets eight digits of a hash.
    """
    pairs = [text.lstrip("+~").partition("=")[::2] for text in overrides]
    leaves = [key.rpartition(".")[2] for key, _ in pairs]
    parts = []
    for (key, value), leaf in zip(pairs, leaves):
        short = leaf if leaves.count(leaf) == 1 else "-".join(key.split(".")[-2:])
        parts.append(f"{_safe(short)}-{_safe(value)}")
    name = "_".join(parts) or "job"
    exact = all(_safe(value) == value for _, value in pairs) and len(name) <= _MAX_LENGTH
    return name if exact else f"{name[:_MAX_LENGTH]}-{_digest(overrides)}"


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)


def _digest(overrides: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:8]
