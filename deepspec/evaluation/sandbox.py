"""Running a program that a model wrote, with limits. Not a security boundary: use a container for models you distrust.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile

_CPU_SECONDS = 10
_WALL_SECONDS = 60.0  # generous: on a loaded machine the processor's time is what counts
_MEMORY_BYTES = 2 << 30
_FILE_BYTES = 1 << 20
_REACHED_END = 86  # exit code of a program that ran to its end: one that leaves early may do so with 0, tests unseen
_END = f"\n__import__('os')._exit({_REACHED_END})\n"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def passes(program: str) -> bool:
    """Whether ``program`` (Python) runs to its last line within its limits of time, memory and file size.

    It runs in a process of its own in an empty folder, with no environment, input or site packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w", encoding="utf-8", errors="replace") as handle:
            handle.write(program + _END)
        process = subprocess.Popen([sys.executable, "-I", "-S", path], cwd=folder, env={}, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                                   preexec_fn=_limit)
        try:
            return process.wait(timeout=_WALL_SECONDS) == _REACHED_END
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also what it started and left running
            except (ProcessLookupError, PermissionError):
                pass
            process.wait()
