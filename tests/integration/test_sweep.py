"""launch/sweep.py as a user runs it: real jobs, a failure, a kill, a continuation; and on Slurm."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, script

pytestmark = pytest.mark.slow
SMALL = ("+experiment=tiny", "data.max_prompts=24", "data.min_held_out=2", "responses.max_tokens=12",
         "stages=[prompts,responses,features,train]", "sweep.objective=validation", "trainer.global_batch_size=8",
         "trainer.num_anchors=8", "trainer.validation_samples=4")
ENVIRONMENT = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def status(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def wait_for(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, data_root: Path) -> None:
    sweep = tmp_path / "runs" / "sweeps" / "depth"
    words = [sys.executable, str(ROOT / "launch" / "sweep.py"), "-m", *SMALL, "drafter.num_layers=1,2",
             "drafter.init_from=null,nowhere", "run.name=depth", f"run.data_root={data_root}", "trainer.max_steps=40",
             "trainer.save_every=2"]
    first, cut = sweep / "num_layers-1_init_from-null", sweep / "num_layers-2_init_from-null"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)} | ENVIRONMENT
    process = subprocess.Popen(words, cwd=tmp_path, env=environment)
    try:
        wait_for(lambda: len(steps(cut)) > 3, 900, "the second training never started")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert status(first)["status"] == "complete" and status(cut)["status"] == "running"
    finished = status(first)
    # The ranks of the job that was cut notice and save before they go.
    lock = f"run.dir={cut}"
    wait_for(lambda: not running(lock), 120, "the job outlives its sweep")
    reached = max(steps(cut))
    assert reached < 40

    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output[-4000:]
    assert status(first) == finished and "complete before" in output
    assert status(cut)["status"] == "complete" and steps(cut) == list(range(1, 41))
    for layers in (1, 2):
        failed = status(sweep / f"num_layers-{layers}_init_from-nowhere")
        assert failed["status"] == "failed" and "nowhere" in " ".join(failed["error"])
    table = output[output.index("sweep runs/sweeps/depth"):].splitlines()
    assert "complete" in table[2] and "complete" in table[3] and "failed" in table[4]
    assert "drafter.num_layers" in (sweep / "report.html").read_text()


def running(word: str) -> bool:
    found = subprocess.run(["pgrep", "-f", word], capture_output=True, text=True).stdout.split()
    return any(pid != str(os.getpid()) for pid in found)


SBATCH = """#!/bin/bash
# Runs the tasks of the job's array one after the other on this machine, and keeps the script.
script="${@: -1}"; cp "$script" "$KEEP/rendered.sh"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
(export SLURM_JOB_ID=1 SLURM_ARRAY_JOB_ID=1 SLURM_LOCALID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_NNODES=1 \\
    SLURM_JOB_NODELIST=here SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1
 for task in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$task bash "$script"; done >"$KEEP/slurm.log" 2>&1
 touch "$KEEP/done") >/dev/null 2>&1 &
echo "Submitted batch job 1"
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == --output || "$1" == --error ]] && shift; shift; done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
state=RUNNING; [ -e "$KEEP/done" ] && state=COMPLETED
for task in 0 1; do echo "1_$task|$state|here"; done
"""


def test_jobs_on_slurm(tmp_path: Path, data_root: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'deepspec[sweep]' for Slurm")
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scancel": "#!/bin/bash\n"}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    result = script(
        "sweep", "-m", *SMALL, "drafter.num_layers=1,2", "hydra/launcher=submitit_slurm", "trainer.max_steps=2",
        "hydra.launcher.partition=accelerated", "hydra.launcher.gpus_per_node=8", "hydra.launcher.timeout_min=90",
        "run.name=slurm", f"run.data_root={data_root}", "trainer.validate_every=1", cwd=tmp_path, KEEP=str(tmp_path),
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", **ENVIRONMENT)
    output = result.stdout + result.stderr
    log = tmp_path / "slurm.log"
    assert result.returncode == 0, output[-3000:] + (log.read_text()[-3000:] if log.is_file() else "")
    rendered = (tmp_path / "rendered.sh").read_text()
    for line in ("#SBATCH --partition=accelerated", "#SBATCH --gpus-per-node=8", "#SBATCH --time=90",
                 "#SBATCH --ntasks-per-node=1"):
        assert line in rendered
    for name in ("num_layers-1", "num_layers-2"):
        job = tmp_path / "runs" / "sweeps" / "slurm" / name
        assert status(job)["status"] == "complete" and steps(job) == [1, 2]
        assert name in output[output.index("sweep runs/sweeps/slurm"):]
