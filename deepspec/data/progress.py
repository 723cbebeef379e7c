"""Progress of a long stage: a bar on a terminal, a line a minute in a log file; rank 0 alone shows it."""

import logging
import time

from tqdm import tqdm

from deepspec import distributed

log = logging.getLogger(__name__)

_LINE_SECONDS = 60.0


class Progress:
    """Counts rows and tokens of this rank."""

    def __init__(self, name: str, total: int, unit: str = "rows") -> None:
        self._name, self._unit, self._total = name, unit, total
        self._quiet = distributed.rank() != 0
        self._bar = tqdm(total=total, desc=name, unit=unit, disable=True if self._quiet else None, leave=False)
        self.rows = self.tokens = 0
        self._started = self._shown = time.monotonic()

    def add(self, tokens: int, rows: int = 1) -> None:
        """``rows`` more are done, with so many tokens."""
        self.rows += rows
        self.tokens += tokens
        self._bar.update(rows)
        now = time.monotonic()
        if now - self._shown < (1.0 if not self._bar.disable else _LINE_SECONDS):
            return
        self._shown = now
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{self.tokens / (now - self._started):.0f} tokens/s")
        elif not self._quiet:
            log.info("%s: %s", self._name, self)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return max(1e-9, time.monotonic() - self._started)

    def __str__(self) -> str:
        return (f"{self.rows} of {self._total} {self._unit}, {self.rows / self.seconds:.2f} {self._unit}/s, "
                f"{self.tokens / self.seconds:.0f} tokens/s")

    def close(self) -> None:
        """Take the bar away and log the totals."""
        self._bar.close()
        if self.rows and not self._quiet:
            log.info("%s: %s", self._name, self)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
