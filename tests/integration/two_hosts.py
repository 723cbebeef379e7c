"""Two hosts on one machine: network namespaces joined by a virtual cable, each with processes of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Iterator, Optional

import psutil
import pytest

from tests.conftest import ROOT

CABLE = "dsv"  # interface names dsv0 and dsv1
ADDRESSES = ("10.213.77.1", "10.213.77.2")
_SETUP = """
import sys
from pyroute2 import IPRoute
with IPRoute() as net:
    for name in ("lo", sys.argv[1]):
        net.link("set", index=net.link_lookup(ifname=name)[0], state="up")
    net.addr("add", index=net.link_lookup(ifname=sys.argv[1])[0], address=sys.argv[2], prefixlen=24)
"""


def _require() -> None:
    if os.geteuid() != 0:
        pytest.skip("two hosts need network namespaces, which only root may make")
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"two hosts need the command {tool} (util-linux)")
    pytest.importorskip("pyroute2", reason="two hosts need pyroute2: pip install -e '.[dev]'")


class TwoHosts:
    """Context manager; skips the test, saying why, where the system does not allow namespaces or virtual cables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("first slots=1\nsecond slots=1\n")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "TwoHosts":
        _require()
        try:
            self._join()
        except Exception as error:  # whatever the kernel or the container refuses
            self.__exit__(None, None, None)
            pytest.skip(f"two hosts cannot be made here: {type(error).__name__}: {error}")
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        for host in self._started:
            kill_tree(host)
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders.clear()

    def _join(self) -> None:
        from pyroute2 import IPRoute

        own = os.readlink("/proc/self/ns/net")
        for _ in ADDRESSES:
            self._holders.append(subprocess.Popen(["unshare", "--net", "sleep", "3600"]))
        for holder in self._holders:
            deadline = time.monotonic() + 10
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                if holder.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("unshare --net made no namespace")
                time.sleep(0.02)
        with IPRoute() as net:
            net.link("add", ifname=f"{CABLE}0", kind="veth", peer=f"{CABLE}1")
            for number, holder in enumerate(self._holders):
                net.link("set", index=net.link_lookup(ifname=f"{CABLE}{number}")[0], net_ns_pid=holder.pid)
        for number, address in enumerate(ADDRESSES):
            subprocess.run([*self._inside(number), sys.executable, "-c", _SETUP, f"{CABLE}{number}", address],
                           check=True, capture_output=True)

    def _inside(self, number: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[number].pid), "--net"]

    def start(self, number: int, *command: str, **environ: str) -> "subprocess.Popen[str]":
        """Run ``command`` on host ``number`` (0 or 1), its output in ``host-NUMBER.txt``."""
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
        clean = {key: value for key, value in os.environ.items() if key not in launcher}
        variables: dict[str, Any] = clean | {
            "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": f"{CABLE}{number}", "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1"} | environ
        with open(self.output(number), "w", encoding="utf-8") as sink:
            process = subprocess.Popen([*self._inside(number), *command], env=variables, cwd=ROOT, text=True,
                                       stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        self._started.append(process)
        return process

    def output(self, number: int) -> Path:
        """Where host ``number`` writes."""
        return self.folder / f"host-{number}.txt"

    def launch(self, *script: str, port: int = 29511, **environ: str) -> list["subprocess.Popen[str]"]:
        """The same command on both hosts, each through its own launcher, without ssh between them."""
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        return [
            self.start(number, sys.executable, launcher, "--hostfile", str(self.hostfile), "--no_ssh", "--node_rank",
                       str(number), "--master_addr", ADDRESSES[0], "--master_port", str(port), *script, **environ)
            for number in range(2)
        ]

    def start_ranks(self, *script: str, port: int, **environ: str) -> list["subprocess.Popen[str]"]:
        """One rank on each host without a launcher, as ``launch`` would start it."""
        return [
            self.start(number, sys.executable, *script, MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port),
                       WORLD_SIZE="2", RANK=str(number), LOCAL_RANK="0", **environ)
            for number in range(2)
        ]

    def launch_alone(self, *script: str) -> "subprocess.Popen[str]":
        """The same command on the first host, which is left to itself."""
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        return self.start(0, sys.executable, launcher, "--num_accelerators", "1", *script)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The cable is out: nothing sent arrives any more, and nobody is told."""
        self._set_cable("down")
        try:
            yield
        finally:
            self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        code = "import sys\nfrom pyroute2 import IPRoute\nwith IPRoute() as net:\n" \
               "    net.link('set', index=net.link_lookup(ifname=sys.argv[1])[0], state=sys.argv[2])"
        subprocess.run([*self._inside(1), sys.executable, "-c", code, f"{CABLE}1", state], check=True,
                       capture_output=True)

    def finish(self, *processes: "subprocess.Popen[str]", timeout: float = 240.0) -> list[int]:
        """Exit codes; fails with what the hosts printed, and where they are, if one does not end in ``timeout`` s."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER: the stacks of all threads
            time.sleep(2)
            said = "\n".join(self.output(n).read_text()[-6000:] for n in range(2) if self.output(n).exists())
            raise AssertionError(f"a host is still running after {timeout:.0f} s\n{said}") from None


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """SIGKILL ``process`` and everything it started, parents first, as a host that loses power does."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
