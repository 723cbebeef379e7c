"""A real ``vllm serve`` for the length of a ``with``: started as its own process, stopped at the end."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterator

SCRIPT = Path(__file__).with_name("vllm_server.py")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def vllm_server(target: Path, speculative: dict[str, Any], log: Path, *arguments: str, runner: int = 2,
                seconds: float = 400.0) -> Iterator[str]:
    """The address of a server of ``target`` with the drafter of ``speculative``; its output goes to ``log``."""
    port = free_port()
    told = speculative | ({"draft_sample_method": "greedy"} if runner == 1 else {})
    command = [os.environ["DEEPSPEC_VLLM_PYTHON"], str(SCRIPT), str(target), "--port", str(port), "--host", "127.0.0.1",
               "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager",
               "--speculative-config", json.dumps(told), *arguments]
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    variables = clean | {"OMP_NUM_THREADS": "1", "DEEPSPEC_VLLM_RUNNER": str(runner)}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", time.monotonic() + seconds, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, deadline: float, log: Path) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        time.sleep(1.0)
    raise AssertionError(f"vLLM did not start: {log.read_text(encoding='utf-8')[-4000:]}")
