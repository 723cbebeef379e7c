"""Step time and wait for hidden states of the ways training gets them, on a small target, in one run.

    PYTHONPATH=. python benchmarks/feature_modes.py data_root=data directory=FOLDER [name=value ...]

Trains the same two epochs with features=cached, online, hybrid and disaggregated (one target rank beside the trainer),
one after the other, from the responses that ``+experiment=tiny`` (``experiment``) has under ``data_root``; the store is
made anew in ``directory``, where the runs are left. Every rank has one thread, so on two cores ``disaggregated`` has
twice the compute of the others: what it shows is how much of the target's forward it takes off the trainer.

Prints one JSON line. ``seconds`` is the median step of an epoch (the first step is left out), ``wait_share`` the share
of all steps that the trainer waited for a pack, and ``ratio`` the step against that of ``cached`` in its second epoch.
``losses_equal`` says whether online and disaggregated had the same losses bit for bit.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepspec.distributed import free_port

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {"data_root": "data", "directory": "", "experiment": "tiny", "batch": "48", "codec": "int8", "workers": "2",
            "depth": "4"}
MODES = {  # name -> features=, ranks, own data
    "cached": ("cached", 1, "store"), "online": ("online", 1, "store"),
    "disaggregated": ("disaggregated", 2, "store"), "hybrid": ("hybrid", 1, "hybrid"),
}


def main(options: dict[str, str]) -> None:
    folder = Path(options["directory"]).absolute()
    for data in sorted({own for _, _, own in MODES.values()}):
        copy_responses(Path(options["data_root"]).absolute(), folder / data)
    rows = {name: train(options, folder, name) for name in MODES}
    base = median(rows["cached"], 1)
    result = {
        name: {f"epoch_{epoch + 1}": {
            "seconds": round(median(found, epoch), 4), "ratio": round(median(found, epoch) / base, 3),
            "wait_share": round(wait_share(found, epoch), 4)} for epoch in (0, 1)}
        for name, found in rows.items()
    }
    losses = [[row["loss"] for row in rows[name]] for name in ("online", "disaggregated")]
    print(json.dumps({"benchmark": "feature_modes", "cpu": platform.processor() or platform.machine(),
                      "cores": len(os.sched_getaffinity(0)), **options, "steps_per_epoch": len(losses[0]) // 2,
                      "losses_equal": losses[0] == losses[1], "modes": result}))


def copy_responses(source: Path, target: Path) -> None:
    """Everything that training needs besides features, which are made again."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("features-*", "targets"))
    (target / "targets").symlink_to(source / "targets")


def train(options: dict[str, str], folder: Path, name: str) -> list[dict[str, Any]]:
    """Metrics of every step of two epochs."""
    mode, ranks, data = MODES[name]
    run = folder / f"run-{name}"
    shutil.rmtree(run, ignore_errors=True)
    arguments = [
        f"+experiment={options['experiment']}", f"features={mode}", f"features.codec={options['codec']}",
        f"run.dir={run}", f"run.name={name}", f"run.data_root={folder / data}", "run.threads=1",
        f"stages=[{'features,' * (mode == 'cached')}train]", "trainer.epochs=2", "trainer.log_every=1",
        "trainer.validate_every=0", "trainer.save_every=1000000", f"trainer.global_batch_size={options['batch']}",
        f"data.num_workers={options['workers']}", f"features.queue_depth={options['depth']}", "tracking.mode=disabled",
    ]
    command = [sys.executable]
    if ranks > 1:
        launcher = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
        command += [launcher, "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    done = subprocess.run([*command, str(ROOT / "launch" / "train_drafter.py"), *arguments], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def median(rows: list[dict[str, Any]], epoch: int) -> float:
    """Seconds of a step."""
    return statistics.median(row["seconds"] for row in rows[1:] if row["epoch"] == epoch)


def wait_share(rows: list[dict[str, Any]], epoch: int) -> float:
    """Share of the time of an epoch's steps."""
    chosen = [row for row in rows[1:] if row["epoch"] == epoch]
    return sum(row["seconds"] * row["wait_share"] for row in chosen) / sum(row["seconds"] for row in chosen)


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if not given.keys() <= DEFAULTS.keys() or not given.get("directory"):
        raise SystemExit(f"usage: python benchmarks/feature_modes.py directory=FOLDER, of {', '.join(DEFAULTS)}")
    main(DEFAULTS | given)
