"""JSON Lines, read strictly and written durably.

A record ends at a line feed and nowhere else: U+2028, U+2029 and U+0085 are ordinary characters inside a string, which
is why nothing here calls ``str.splitlines``. Rows are plain Python objects; no column types are inferred.
"""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from deepspec.errors import InputRefused

log = logging.getLogger(__name__)

_TAIL_BLOCK = 1 << 16


@dataclass
class ReadCounts:
    """What a reader passed by; filled while it runs."""

    rows: int = 0
    blank: int = 0


class BadValue(InputRefused):
    """A row that is whole, but holds a value no strict writer could write back; the rows around it are sound.

    ``reason`` is a short constant to count by."""

    reason = "bad value"

    @classmethod
    def of(cls, reason: str, message: str) -> "BadValue":
        """The error with its reason."""
        error = cls(message)
        error.reason = reason
        return error


class _Unwritable(ValueError):
    """(reason, message)"""


def _refuse_constant(name: str) -> None:
    raise _Unwritable("not a JSON number", f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Unwritable("duplicate key", f"key {twice!r} occurs twice in one object")
    return result


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def parse_row(line: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises InputRefused naming ``where`` for what is none, and its subclass BadValue for anything a
    strict writer could not write back: NaN and infinities, duplicate keys, lone surrogates."""
    try:
        value = _DECODER.decode(line.strip(" \t\r\n"))
    except _Unwritable as error:
        raise BadValue.of(error.args[0], f"{where}: not a valid JSON row ({error.args[1]}): {_shorten(line)}") from None
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"{where}: not a valid JSON row ({error}): {_shorten(line)}") from None
    if isinstance(value, list):
        raise InputRefused(
            f"{where}: the line holds a JSON array, expected one JSON object per line. If the file is one big array, "
            f"convert it with: jq -c '.[]' FILE > FILE.jsonl"
        )
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise InputRefused(f"{where}: expected one JSON object per line, found {kind}: {_shorten(line)}")
    # Only an escape can bring a lone surrogate into a text that was valid UTF-8.
    if "\\u" in line and _has_surrogate(value):
        problem = "a string holds a lone surrogate (such as \\ud83d without its other half)"
        raise BadValue.of("lone surrogate", f"{where}: {problem}")
    if "e" in line.lower() and _has_infinity(value):
        raise BadValue.of("number too large", f"{where}: a number is too large for a 64-bit float: {_shorten(line)}")
    return value


def _shorten(line: str) -> str:
    text = ascii(line.strip())[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def _walk(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        else:
            yield item


def _has_surrogate(value: Any) -> bool:
    return any(isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item) for item in _walk(value))


def _has_infinity(value: Any) -> bool:
    return any(isinstance(item, float) and item in (float("inf"), float("-inf")) for item in _walk(value))


def read_rows(path: os.PathLike | str, *, counts: Optional[ReadCounts] = None, torn_tail: bool = False,
              bad_value: Optional[Callable[[int, BadValue], Any]] = None) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, row). Blank lines are skipped and counted, a byte-order mark is accepted.

    ``torn_tail``: the file is one of our own that a kill may have cut; its last line counts only if it is whole.
    ``bad_value``: gives what to yield for a row with a bad value, instead of an end of the reading.
    Raises InputRefused with ``file:line`` for a bad row and for a file that is missing or not UTF-8.
    """
    counts = counts if counts is not None else ReadCounts()
    number = 0
    try:
        with open(path, "rb") as handle:
            for number, raw in enumerate(handle, start=1):
                if torn_tail and not raw.endswith(b"\n"):
                    return
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not line.strip():
                    counts.blank += 1
                    continue
                row: Any
                try:
                    row = parse_row(line, f"{path}:{number}")
                except BadValue as error:
                    if bad_value is None:
                        raise
                    row = bad_value(number, error)
                counts.rows += 1
                yield number, row
    except UnicodeDecodeError as error:
        raise InputRefused(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None


def read_nonempty(path: os.PathLike | str, what: str = "rows",
                  bad_value: Optional[Callable[[int, BadValue], Any]] = None) -> Iterator[tuple[int, Any]]:
    """Like ``read_rows``, but raises InputRefused at the end of a file that has no row."""
    counts = ReadCounts()
    yield from read_rows(path, counts=counts, bad_value=bad_value)
    if not counts.rows:
        blank = f" ({counts.blank} blank lines)" if counts.blank else ""
        raise InputRefused(f"{path}: 0 {what}, expected one JSON object per line{blank}. Give a file that has {what}.")
    if counts.blank:
        log.info("%s: skipped %d blank lines", path, counts.blank)


def dump_row(row: dict[str, Any]) -> bytes:
    """One row as a UTF-8 line ending in a line feed. Raises ValueError for NaN."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode("utf-8")


def repair_tail(path: os.PathLike | str) -> int:
    """Cut a last line that a kill left incomplete; returns the bytes cut and reports them in one line."""
    path = Path(path)
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with open(path, "rb+") as handle:
        size = handle.seek(0, os.SEEK_END)
        keep = _end_of_whole_rows(handle, size)
        if keep == size:
            return 0
        handle.truncate(keep)
        handle.flush()
        os.fsync(handle.fileno())
    log.warning("%s: cut %d bytes of an incomplete last row; it will be made again", path, size - keep)
    return size - keep


def _end_of_whole_rows(handle: Any, size: int) -> int:
    """Offset after the last line that is terminated and parses."""
    end = _last_line_feed(handle, size)
    while end > 0:
        start = _last_line_feed(handle, end - 1)
        handle.seek(start)
        try:
            parse_row(handle.read(end - start).decode("utf-8"), "tail")
            return end
        except (InputRefused, UnicodeDecodeError):
            # A power cut can leave a terminated block of zeros: step back to the line before.
            end = start
    return 0


def _last_line_feed(handle: Any, end: int) -> int:
    """Offset after the last line feed before ``end``, 0 if there is none."""
    while end > 0:
        start = max(0, end - _TAIL_BLOCK)
        handle.seek(start)
        found = handle.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class DurableWriter:
    """Appends rows: one row is one write, synced to disk every ``sync_rows`` rows or ``sync_seconds`` seconds.

    Opening repairs a torn tail, so an append never joins two rows.
    """

    def __init__(self, path: os.PathLike | str, *, sync_rows: int = 64, sync_seconds: float = 2.0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        repair_tail(self.path)
        self._handle = open(self.path, "ab", buffering=0)
        self._sync_rows, self._sync_seconds = sync_rows, sync_seconds
        self._pending, self._synced_at = 0, time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; durable after the next sync."""
        payload = memoryview(dump_row(row))
        while payload:  # an unbuffered write may be short, for instance on a full disk just before the error
            payload = payload[self._handle.write(payload):]
        self._pending += 1
        if self._pending >= self._sync_rows or time.monotonic() - self._synced_at >= self._sync_seconds:
            self.sync()

    def sync(self) -> None:
        """Make all rows so far durable."""
        if self._pending:
            os.fsync(self._handle.fileno())
        self._pending, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Sync and close; further calls do nothing."""
        if not self._handle.closed:
            self.sync()
            self._handle.close()

    def __enter__(self) -> "DurableWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
