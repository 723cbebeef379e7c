"""What a long stage says about itself."""

import io
import logging
import os
import pty
import subprocess
import sys
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


def test_a_resumed_stage_rates_what_it_did_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress("train", 104, "steps", done=100)
    assert str(progress) == "100 of 104 steps, 0.00 steps/s"
    now[0] += 10.0
    progress.add(500, note="loss 1.2500, acceptance 2.00")
    assert str(progress) == ("101 of 104 steps, 0.10 steps/s, 50 tokens/s, loss 1.2500, acceptance 2.00, 00:30 left")


def test_where_the_end_is_not_known_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress("prompts", None)
    now[0] += 4.0
    progress.update(8)
    assert str(progress) == "8 rows, 2.00 rows/s"


JOB = """
import logging, sys
from deepspec.data import progress
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
progress._LINE_SECONDS = progress._BAR_SECONDS = 0.0
with progress.Progress("train", 40, "steps") as shown:
    for step in range(40):
        shown.add(10, note=f"loss {1 / (step + 1):.4f}")
        if step == 20:
            logging.info("validation at step 21")
"""


def test_in_a_pipe_there_are_lines_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, check=True, timeout=300)
    assert done.stderr == b"" and b"\r" not in done.stdout
    lines = done.stdout.decode().splitlines()
    assert sum(line.startswith("INFO train: ") for line in lines) == 41 and "INFO validation at step 21" in lines
    assert "40 of 40 steps" in lines[-1] and "loss 0.0250" in lines[-1]


def test_on_a_terminal_there_is_one_bar_and_log_lines_stand_alone() -> None:
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=slave, stderr=slave, close_fds=True) as job:
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:  # how Linux tells that the other end has closed
            pass
        assert job.wait(timeout=300) == 0
    os.close(master)
    text = shown.decode()
    lines = text.replace("\r\n", "\n").split("\n")
    assert "\r" in text and "train:" in text and "loss" in text and "tokens/s" in text
    said = next(line for line in lines if "validation at step 21" in line)
    assert said.rpartition("\r")[2].endswith("INFO validation at step 21"), said
    assert len([line for line in lines if line.strip()]) == 2, lines  # that line, and the totals in place of the bar
