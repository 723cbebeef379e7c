"""The files of docs/cluster start the main job on every node, seen with stand-ins for srun, scontrol and deepspeed."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepspec.config.compose import compose_config
from deepspec.planning.plan import make_plan, render
from deepspec.planning.validate import validate

ROOT = Path(__file__).resolve().parents[2]
SLURM, KUBERNETES = ROOT / "docs/cluster/slurm.sh", ROOT / "docs/cluster/kubernetes.yaml"
# Each stand-in does what the scripts need of the real one; deepspeed notes its arguments and its hostfile.
DEEPSPEED = """#!/usr/bin/env python3
import json, sys
arguments = sys.argv[1:]
with open(arguments[arguments.index("--hostfile") + 1]) as hosts, open("started.jsonl", "a") as out:
    out.write(json.dumps({"arguments": arguments, "hosts": hosts.read().splitlines()}) + "\\n")
"""
SRUN = """#!/bin/bash
for node in 0 1 2; do SLURM_NODEID=$node "$@"; done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames gpu[1-3]" ] && printf 'gpu1\\ngpu2\\ngpu3\\n'
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose ``bin`` has the stand-ins."""
    (tmp_path / "bin").mkdir()
    for name, text in (("deepspeed", DEEPSPEED), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def started(folder: Path, script: list[str], **environment: str) -> list[dict[str, Any]]:
    """What was started, in order."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(script, cwd=folder, check=True, timeout=120, env=os.environ | environment | {"PATH": path})
    return [json.loads(line) for line in (folder / "started.jsonl").read_text().splitlines()]


def check(nodes: list[dict[str, Any]], names: list[str], slots: int) -> None:
    """One launcher a node, all with the same hosts and master, and a command that the main job takes."""
    for rank, node in enumerate(nodes):
        arguments = node["arguments"]
        assert node["hosts"] == [f"{name} slots={slots}" for name in names]
        assert arguments[arguments.index("--node_rank") + 1] == str(rank) and "--no_ssh" in arguments
        assert arguments[arguments.index("--master_addr") + 1] == names[0]
        place = arguments.index("launch/train_drafter.py")
        config = compose_config(arguments[place + 1:], "train_drafter")
        validate(config)
        assert render(make_plan(config)).strip()
    assert len(nodes) == len(names)


def test_slurm(folder: Path) -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    nodes = started(folder, ["bash", str(SLURM)], SLURM_JOB_NODELIST="gpu[1-3]", SLURM_JOB_ID="77",
                    SLURM_GPUS_ON_NODE="4", EXPERIMENT="qwen3_4b")
    check(nodes, ["gpu1", "gpu2", "gpu3"], 4)
    assert "+experiment=qwen3_4b" in nodes[0]["arguments"]


def test_slurm_without_nodes_starts_nothing(folder: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        started(folder, ["bash", str(SLURM)], SLURM_JOB_NODELIST="other", SLURM_JOB_ID="77")
    assert not (folder / "started.jsonl").exists()


def test_kubernetes(folder: Path) -> None:
    service, job = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and spec["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert int(environment["PODS"]) == spec["completions"] == spec["parallelism"]
    assert int(environment["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (script,) = container["args"]
    script = script.replace("/tmp/hosts", str(folder / "hosts"))
    nodes: list[dict[str, Any]] = []
    for index in range(spec["completions"]):
        nodes = started(folder, [*container["command"], script], JOB_COMPLETION_INDEX=str(index), **environment)
    check(nodes, [f"drafter-{index}.drafter" for index in range(4)], 8)


@pytest.mark.skipif(shutil.which("pkill") is None, reason="pkill is not installed")
def test_before_a_pod_ends_its_ranks_are_told_and_nobody_else(tmp_path: Path) -> None:
    """The launcher's own command names the script as well, and so does the hook's: neither may be hit."""
    _, job = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    hook = job["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    mine = f"train_drafter_{os.getpid()}"  # so that no job on this machine is meant
    hook = [part.replace("train_drafter", mine) for part in hook]
    script = tmp_path / f"{mine}.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    rank = subprocess.Popen(["python3", str(script), "--local_rank=0"], stdout=subprocess.PIPE)
    launcher = subprocess.Popen(["python3", str(script), "+experiment=tiny"], stdout=subprocess.PIPE)
    try:
        for process in (rank, launcher):
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        done = subprocess.Popen(hook)
        assert rank.wait(timeout=120) == -15
        assert done.wait(timeout=120) == 0 and launcher.poll() is None
    finally:
        for process in (rank, launcher):
            process.kill()
            process.wait()
