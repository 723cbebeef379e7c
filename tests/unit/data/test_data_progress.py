"""What a long stage says about itself."""

import io
import logging
import time

import pytest

from deepspec.data import progress as module
from deepspec.data.progress import Progress


def test_rates_error_share_and_time_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), Progress("responses", 200) as progress:
        for index in range(40):
            now[0] += 2.0
            progress.add(0 if index % 4 == 0 else 30, failed=index % 4 == 0)
        assert str(progress) == "40 of 200 rows, 0.50 rows/s, 11 tokens/s, 25.0% failed, 05:20 left"
    lines = [line for line in caplog.text.split("\n") if "responses: " in line]
    assert len(lines) == 2  # one a minute, and the totals
    assert lines[0].endswith("responses: 30 of 200 rows, 0.50 rows/s, 11 tokens/s, 26.7% failed, 05:40 left")


def test_a_bar_on_a_terminal_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    started = time.monotonic()
    progress = Progress("responses", 100)
    monkeypatch.setattr(module.time, "monotonic", lambda: started + 5.0)
    progress.add(50, rows=10)
    progress.add(0, rows=10, failed=True)
    monkeypatch.setattr(module.time, "monotonic", lambda: started + 10.0)
    progress.add(50, rows=5)
    progress.close()
    shown = terminal.getvalue()
    assert "25/100" in shown and "10 tokens/s" in shown and "40.0% failed" in shown
    assert "rows/s" in shown and "<" in shown  # elapsed<left
