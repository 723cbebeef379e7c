"""A port that another job has is reported as such, with the way out."""

import os
import socket
import subprocess
import sys


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0",
                                    "LOCAL_RANK": "0"}
        done = subprocess.run([sys.executable, "-c", "from deepspec import distributed; distributed.init(30)"],
                              env=environment, capture_output=True, text=True, timeout=240)
    last = done.stderr.strip().splitlines()[-1]
    assert f"ConfigError: Port {port}" in last and "--master_port" in last, done.stderr
