"""Requests by signal, and the watch over the launcher's processes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from test_training_checkpoint import StoppingSource
from tiny_training import tiny_trainer

from deepspec.training import checkpoint, saving, signals
from deepspec.training.signals import Requests


@pytest.fixture(autouse=True)
def not_stopping(monkeypatch):
    monkeypatch.setattr(Requests, "stopping", False)


def test_handlers_set_flags_and_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Requests() as requests:
        assert requests.take() == (False, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() == (False, True) and requests.take() == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.take() == (True, False) == requests.take()
    assert signal.getsignal(signal.SIGTERM) is before and Requests.stopping


def test_the_first_interrupt_asks_and_the_second_ends():
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in a shell's background
    with pytest.raises(KeyboardInterrupt):
        with Requests() as requests:
            os.kill(os.getpid(), signal.SIGINT)
            assert requests.take() == (True, False)
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_sigterm_while_the_last_checkpoint_is_written_costs_nothing(tmp_path, monkeypatch):
    real = saving.save_file

    def again(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return real(*arguments, **keywords)

    monkeypatch.setattr(saving, "save_file", again)
    result = tiny_trainer(tmp_path, source=StoppingSource(22)).run()
    assert result.stopped and checkpoint.latest(tmp_path).name == f"step-{result.step}"


CHAIN = """
import os, subprocess, sys, time
depth = int(sys.argv[2])
if depth:
    child = subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1], str(depth - 1)])
    print(f"{depth} {os.getpid()}", flush=True)
    child.wait()
else:
    sys.path.insert(0, sys.argv[1])
    import signal
    from deepspec.training import signals
    signals._LAUNCHER = tuple((word,) for word in os.environ["WORDS"].split())
    signal.signal(signal.SIGTERM, lambda *_: (print("term", flush=True), os._exit(7)))
    signals.watch_launcher(0.05)
    print(f"0 {os.getpid()}", flush=True)
    time.sleep(float(os.environ["LIFE"]))
    print("left alone", flush=True)
"""


@pytest.mark.parametrize("killed,words,expected", [
    (1, ["chain.py", "chain.py"], "term"), (2, ["chain.py", "chain.py"], "term"), (1, ["chain.py"], "term"),
    (2, ["chain.py"], "left alone"), (1, ["other"], "left alone"),
])
def test_a_rank_ends_with_its_launcher_and_with_nothing_else(tmp_path, killed, words, expected):
    """Process 2 starts 1 starts 0; those named as launcher are watched, one is killed."""
    (tmp_path / "chain.py").write_text(CHAIN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(signals.__file__)))
    process = subprocess.Popen([sys.executable, str(tmp_path / "chain.py"), root, "2"], text=True,
                               stdout=subprocess.PIPE, env=os.environ | {
                                   "LIFE": "20" if expected == "term" else "1", "WORDS": " ".join(words)})
    pids = {}
    while "0" not in pids:
        depth, pid = process.stdout.readline().split()
        pids[depth] = int(pid)
    os.kill(pids[str(killed)], signal.SIGKILL)
    started = time.monotonic()
    assert process.stdout.read().strip() == expected
    assert time.monotonic() - started < 15
    process.wait()


def test_a_rank_that_is_stopping_already_is_left_alone(monkeypatch):
    monkeypatch.setattr(Requests, "stopping", True)
    monkeypatch.setattr(os, "kill", lambda *arguments: pytest.fail("signal sent"))
    signals._watch({os.getpid(): -1}, 0.01)


def test_without_a_launcher_nothing_is_watched():
    assert signals._launcher_above(os.getpid()) == {}
