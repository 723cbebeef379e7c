"""Progress of a long stage: a bar on a terminal, a line a minute in a log file; rank 0 alone shows it."""

import logging
import time
from typing import Protocol

from tqdm import tqdm

from deepspec import distributed

log = logging.getLogger(__name__)

_LINE_SECONDS = 60.0


class RowCallback(Protocol):
    """Is told of each row that is done: its tokens, and whether it failed."""

    def __call__(self, tokens: int, *, failed: bool = False) -> None: ...


class Progress:
    """Counts rows, failed ones and tokens of this rank."""

    def __init__(self, name: str, total: int, unit: str = "rows") -> None:
        self._name, self._unit, self._total = name, unit, total
        self._quiet = distributed.rank() != 0
        self._bar = tqdm(total=total, desc=name, unit=unit, disable=True if self._quiet else None, leave=False)
        self.rows = self.failed = self.tokens = 0
        self._started = self._shown = time.monotonic()

    def add(self, tokens: int, rows: int = 1, *, failed: bool = False) -> None:
        """``rows`` more are done, with so many tokens; or they failed."""
        self.rows += rows
        self.failed += rows if failed else 0
        self.tokens += tokens
        self._bar.update(rows)
        now = time.monotonic()
        if now - self._shown < (1.0 if not self._bar.disable else _LINE_SECONDS):
            return
        self._shown = now
        if not self._bar.disable:
            # The bar itself has the rate of rows and the time left.
            self._bar.set_postfix_str(f"{self.tokens / (now - self._started):.0f} tokens/s, {self._error_share()}")
        elif not self._quiet:
            log.info("%s: %s", self._name, self)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return max(1e-9, time.monotonic() - self._started)

    def _error_share(self) -> str:
        return f"{self.failed / max(1, self.rows):.1%} failed"

    def __str__(self) -> str:
        left = (self._total - self.rows) * self.seconds / max(1, self.rows)
        ends = f", {tqdm.format_interval(left)} left" if 0 < self.rows < self._total else ""
        return (f"{self.rows} of {self._total} {self._unit}, {self.rows / self.seconds:.2f} {self._unit}/s, "
                f"{self.tokens / self.seconds:.0f} tokens/s, {self._error_share()}{ends}")

    def close(self) -> None:
        """Take the bar away and log the totals."""
        self._bar.close()
        if self.rows and not self._quiet:
            log.info("%s: %s", self._name, self)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
