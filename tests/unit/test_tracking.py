"""W&B can fail in any way without costing more than a bounded delay and one warning."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from deepspec.config.schema import TrackingConfig
from deepspec.errors import ConfigError
from deepspec.tracking import Tracker, resolve_mode, run_id, without_secrets

SCRIPT = """
import json, logging, sys, time
logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(message)s")
from pathlib import Path
from deepspec.config.schema import TrackingConfig
from deepspec.tracking import Tracker
run_dir, mode = Path(sys.argv[1]), sys.argv[2]
started = time.monotonic()
tracking = TrackingConfig(mode=mode, timeout_seconds=4.0)
tracker = Tracker.start({"lr": 1e-3, "api_key": "x"}, tracking, "job", run_dir, "train")
for step in (1, 2, 3):
    tracker.log({"train/loss": 1.0 / step}, step)
tracker.finish(failed=False)
sys.stdout.write(json.dumps({"seconds": time.monotonic() - started}))
"""


def run_tracker(tmp_path, mode, **environ):
    """Run the script above; returns (seconds inside, stderr)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    own = {"PYTHONPATH": os.getcwd(), "HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path / "c")}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), mode]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, env=clean | own | environ)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["seconds"], result.stderr


def test_mode_is_online_only_with_a_key(tmp_path):
    none = {"NETRC": str(tmp_path / "none")}
    assert resolve_mode("auto", none) == "offline"
    assert resolve_mode("auto", none | {"WANDB_API_KEY": "k"}) == "online"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    assert resolve_mode("auto", {"NETRC": str(tmp_path / "netrc")}) == "online"
    assert resolve_mode("auto", {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://own:1"}) == "offline"
    assert resolve_mode("disabled", {"WANDB_API_KEY": "k"}) == "disabled"
    with pytest.raises(ConfigError, match="sometimes"):
        resolve_mode("sometimes", {})


def test_id_is_stable_and_differs_per_stage(tmp_path):
    assert run_id(tmp_path, "train") == run_id(tmp_path, "train") != run_id(tmp_path, "evaluate")
    assert run_id(tmp_path, "train").isalnum()


def test_secrets_leave_the_config():
    assert without_secrets({"a": {"api_key": 1, "lr": 2}, "hf_token": 3, "mask_token_id": 5}) == {
        "a": {"lr": 2}, "mask_token_id": 5}


def test_other_ranks_and_disabled_do_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    tracker = Tracker.start({}, TrackingConfig(mode="offline"), "job", tmp_path, "train")
    tracker.log({"train/loss": 1.0}, 1)
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_offline_writes_one_run_quietly(tmp_path):
    _, output = run_tracker(tmp_path, "auto")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert "W&B" not in output and "wandb:" not in output


def test_refused_connection_is_one_warning(tmp_path):
    seconds, output = run_tracker(tmp_path, "auto", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40)
    assert seconds < 25
    assert output.count("W&B tracking is off") == 1


def test_silent_server_is_bounded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []
        threading.Thread(target=lambda: [held.append(server.accept()) for _ in range(99)], daemon=True).start()
        started = time.monotonic()
        seconds, output = run_tracker(
            tmp_path, "online", WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}", WANDB_API_KEY="0" * 40)
    assert seconds < 25 and time.monotonic() - started < 60
    assert output.count("W&B tracking is off") == 1


def test_unwritable_directory_is_one_warning(tmp_path):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    _, output = run_tracker(tmp_path, "offline")
    assert output.count("W&B tracking is off") <= 1


def test_slow_log_does_not_block(tmp_path):
    class SlowRun:
        rows = []

        def log(self, row):
            time.sleep(5)

        def finish(self, **kwargs):
            return None

    tracker = Tracker()
    tracker._run, tracker._timeout = SlowRun(), 0.1
    tracker._thread = threading.Thread(target=lambda: tracker._tasks.get()(), daemon=True)
    tracker._thread.start()
    started = time.monotonic()
    for step in range(5):
        tracker.log({"train/loss": 0.1}, step)
    assert time.monotonic() - started < 1.0
