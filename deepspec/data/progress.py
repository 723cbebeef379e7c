"""Progress of a long stage: a bar on a terminal, a line a minute in a log file; rank 0 alone shows it."""

import contextlib
import logging
import time
from typing import Optional, Protocol

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)

_LINE_SECONDS = 60.0
_BAR_SECONDS = 1.0


class RowCallback(Protocol):
    """Is told of each row that is done: its tokens, and whether it failed."""

    def __call__(self, tokens: int, *, failed: bool = False) -> None: ...


class Progress:
    """Counts rows, failed ones and tokens of this rank. ``total`` None: it is not known how many there will be.

    ``done`` rows were there before, which rates and the time left do not count as work of this process.
    """

    def __init__(self, name: str, total: Optional[int], unit: str = "rows", *, done: int = 0) -> None:
        self._name, self._unit, self._total, self._before = name, unit, total, done
        from deepspec import distributed  # here: torch is not needed to read prompts until something is counted

        self._quiet = distributed.rank() != 0
        # A bar is for terminals: in a file every one of its states would stay, behind carriage returns.
        self._bar = tqdm(total=total, initial=done, desc=name, unit=unit, disable=True if self._quiet else None,
                         leave=False, dynamic_ncols=True)
        self.rows, self.failed, self.tokens, self._note = done, 0, 0, ""
        self._started = self._shown = time.monotonic()
        self._around = contextlib.ExitStack()

    def add(self, tokens: int, rows: int = 1, *, failed: bool = False, note: Optional[str] = None) -> None:
        """``rows`` more are done, with so many tokens; or they failed. ``note`` says how it goes (a loss, say)."""
        self.rows += rows
        self.failed += rows if failed else 0
        self.tokens += tokens
        self._note = self._note if note is None else note
        self._bar.update(rows)
        now = time.monotonic()
        if now - self._shown < (_BAR_SECONDS if not self._bar.disable else _LINE_SECONDS):
            return
        self._shown = now
        if not self._bar.disable:
            # The bar itself has the rate of rows and the time left.
            self._bar.set_postfix_str(", ".join(self._facts()))
        elif not self._quiet:
            log.info("%s: %s", self._name, self)

    def update(self, rows: int = 1) -> None:
        """``rows`` more are done, where nobody counts tokens."""
        self.add(0, rows)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return max(1e-9, time.monotonic() - self._started)

    def _facts(self) -> list[str]:
        """What there is to say beside the rows."""
        facts = [f"{self.tokens / self.seconds:.0f} tokens/s"] if self.tokens else []
        if self.failed:
            facts.append(f"{self.failed / max(1, self.rows - self._before):.1%} failed")
        return facts + ([self._note] if self._note else [])

    def __str__(self) -> str:
        new = self.rows - self._before
        count = f"{self.rows} {self._unit}" if self._total is None else f"{self.rows} of {self._total} {self._unit}"
        parts = [count, f"{new / self.seconds:.2f} {self._unit}/s", *self._facts()]
        if self._total is not None and new and self.rows < self._total:
            parts.append(f"{tqdm.format_interval((self._total - self.rows) * self.seconds / new)} left")
        return ", ".join(parts)

    def close(self) -> None:
        """Take the bar away and log the totals."""
        self._around.close()
        self._bar.close()
        if self.rows > self._before and not self._quiet:
            log.info("%s: %s", self._name, self)

    def __enter__(self) -> "Progress":
        if not self._bar.disable:
            self._around.enter_context(logging_redirect_tqdm())  # log lines above the bar, not into it
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
