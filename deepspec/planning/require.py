"""What an option may be: small checks whose messages name the key, the value and what is allowed."""

import difflib
import math
from typing import Any, Iterable, Sequence

from deepspec.errors import ConfigError


def require(condition: bool, key: str, value: Any, allowed: str) -> None:
    """Refuse ``value`` of ``key`` unless ``condition``. Raises ConfigError."""
    if not condition:
        raise ConfigError(f"{key}={value!r} is not possible: it must be {allowed}.")


def choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    """``value`` is one of ``allowed``. Raises ConfigError."""
    if value in allowed:
        return
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key}={value!r} is unknown: it must be one of {', '.join(allowed)}.{hint}")


def whole(key: str, value: Any, least: int) -> None:
    """``value`` is a whole number of at least ``least``. Raises ConfigError."""
    require(isinstance(value, int) and not isinstance(value, bool) and value >= least, key, value,
            f"a whole number of at least {least}")


def within(key: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
    """``value`` is a finite number between the bounds. Raises ConfigError."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    inside = number and (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    if math.isfinite(high):
        bounds += f" and {'below' if open_high else 'at most'} {high:g}"
    require(bool(inside), key, value, f"a finite number {bounds}")


def wholes(prefix: str, group: Any, names: Iterable[str], least: int) -> None:
    """``whole`` for several options of a group; null passes. Raises ConfigError."""
    for name in names:
        value = getattr(group, name)
        if value is not None:
            whole(f"{prefix}.{name}", value, least)


def names_folder(path: str) -> bool:
    """Whether a target's path can only be a local folder: a hub id is OWNER/NAME and begins with neither . nor /."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
