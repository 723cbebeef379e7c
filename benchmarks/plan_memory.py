"""The plan's bytes per rank against what training really takes, for several shapes, ZeRO stages and numbers of ranks.

    PYTHONPATH=. python benchmarks/plan_memory.py [CASE ...]

A case is named as in CASES; all but ``offloaded`` without an argument. Each starts the deepspeed launcher, trains a
step of two packs on random hidden states, and compares rank 0's peak of resident memory, less that before the drafter
was built, with the plan's sum for the same options. Samples are made anew at every read, as from a store.

Prints one JSON line per case: predicted and measured bytes, their ratio, and the parts of the prediction; exits with 1
when one is off by more than 10 %. With offload the plan is a lower bound: DeepSpeed's own buffers in main memory are
not counted (``offloaded`` was predicted at 0.73 of what it took). Linux and a CPU only (VmHWM); on a GPU,
metrics.jsonl has peak_memory_bytes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Freed tensors leave the process at once, so that resident memory is what is in use.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "262144")

import torch  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.config.compose import compose_config  # noqa: E402
from deepspec.config.schema import Config  # noqa: E402
from deepspec.data.batch import FeatureSample, Sample  # noqa: E402
from deepspec.data.sources import SampleInfo  # noqa: E402
from deepspec.drafters.registry import build_drafter, shape_from  # noqa: E402
from deepspec.drafters.types import SharedWeights  # noqa: E402
from deepspec.planning.packs import plan_packs  # noqa: E402
from deepspec.planning.peak import rank_bytes  # noqa: E402
from deepspec.planning.samples import SampleLength  # noqa: E402
from deepspec.planning.sizes import count_parameters  # noqa: E402
from deepspec.targets.spec import TargetSpec  # noqa: E402
from deepspec.training.identity import run_identity  # noqa: E402
from deepspec.training.packs import Packer  # noqa: E402
from deepspec.training.trainer import DrafterTrainer  # noqa: E402

TOLERANCE = 0.10
TOKENS, PROMPT = 512, 64
CASES: dict[str, dict[str, Any]] = {  # the target's sizes, the drafter's, and how it is trained
    "deep": {"hidden": 512, "inner": 2048, "vocab": 8000, "layers": 2, "anchors": 96, "micro": 2, "stage": 0,
             "ranks": 1, "precision": "fp32"},
    "wide_vocabulary": {"hidden": 384, "inner": 1024, "vocab": 60000, "layers": 1, "anchors": 64, "micro": 1,
                        "stage": 2, "ranks": 2, "precision": "bf16"},
    "long": {"hidden": 384, "inner": 1024, "vocab": 8000, "layers": 2, "anchors": 128, "micro": 4, "stage": 3,
             "ranks": 2, "precision": "fp32"},
    "offloaded": {"hidden": 512, "inner": 2048, "vocab": 8000, "layers": 2, "anchors": 64, "micro": 2, "stage": 3,
                  "ranks": 2, "precision": "bf16", "offload": True},
}


class RandomSource:
    """Samples of random hidden states, made when they are read."""

    def __init__(self, count: int, width: int, taps: int, vocab: int) -> None:
        self.width, self.taps, self.vocab = width, taps, vocab
        self.samples = [SampleInfo(f"sample-{index}", "chat", TOKENS) for index in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices``."""
        rows = []
        for index in indices:
            torch.manual_seed(index)
            sample = Sample(f"sample-{index}", "chat", torch.randint(0, self.vocab - 1, (TOKENS,)),
                            torch.arange(TOKENS) >= PROMPT)
            rows.append(FeatureSample(sample, torch.randn(TOKENS, self.taps * self.width),
                                      torch.randn(TOKENS, self.width)))
        return rows


def configure(case: dict[str, Any], run_dir: Path) -> Config:
    """The options of a case, composed as a user's would be."""
    heads = case["hidden"] // 64
    options = [
        "+experiment=tiny", f"engine=zero{case['stage']}" + ("_offload" if case.get("offload") else ""),
        f"run.dir={run_dir}", f"target.shape.hidden_size={case['hidden']}",
        f"target.shape.intermediate_size={case['inner']}", f"target.shape.num_heads={heads}",
        f"target.shape.num_kv_heads={heads // 2}", "target.shape.head_dim=64",
        f"target.shape.vocab_size={case['vocab']}", f"drafter.num_layers={case['layers']}", "tracking=disabled",
        f"trainer.num_anchors={case['anchors']}", f"trainer.micro_batch_size={case['micro']}",
        f"trainer.global_batch_size={2 * case['micro'] * case['ranks']}", "trainer.max_steps=1",
        f"trainer.precision={case['precision']}", "trainer.async_save=false", "trainer.save_every=1000",
        "objective.chunk_megabytes=64", "run.threads=1", *case.get("options", ()),
    ]
    return compose_config(options)


def target_spec(config: Config) -> TargetSpec:
    """What a real target of these sizes would say of itself."""
    options = vars(config.target.shape)
    known = {name: value for name, value in options.items() if name in TargetSpec.__dataclass_fields__}
    return TargetSpec(**known, rms_norm_eps=1e-6, rope_theta=1e4)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: not Linux")


def measure(config: Config) -> dict[str, int]:
    """Peak bytes of this rank's training over those before it."""
    sizes, width = config.target.shape, config.target.shape.hidden_size
    shape = shape_from(target_spec(config), config.target, config.drafter)
    source = RandomSource(4 * config.trainer.global_batch_size, width, len(config.target.feature_layers),
                          sizes.vocab_size)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts anew
    shared = SharedWeights(torch.randn(sizes.vocab_size, width), torch.randn(sizes.vocab_size, width), "random")
    packer = Packer(source, shape, config.trainer, config.objective, seed=0, num_workers=config.data.num_workers)
    identity = run_identity(config, shape, target="random", data="random")
    trainer = DrafterTrainer(build_drafter(shape, shared), packer, config, identity=identity)
    trainer.save = lambda: None  # type: ignore[method-assign]  # host memory of a write is planned apart
    trainer.run()
    return {"peak": _status("VmHWM") - before, "end": _status("VmRSS") - before}


def predict(config: Config, case: dict[str, Any]) -> dict[str, int]:
    """The plan's parts for the same options."""
    parameters = count_parameters(config)
    packs = plan_packs(config, SampleLength(TOKENS, TOKENS - PROMPT, "given"))
    found = rank_bytes(config, parameters, packs, case["stage"], case["ranks"])
    # Main memory is the device of a CPU, so that what is offloaded counts, too.
    return {**{name: getattr(found.state, name) for name in ("parameters", "gradients", "optimizer")},
            **vars(found.step), **{name: getattr(found, name) for name in ("gathered", "collectives", "update")},
            "sum": found.peak + found.host}


def child(name: str, folder: Path) -> None:
    """One rank of a case; rank 0 writes what it took."""
    case = CASES[name]
    config = configure(case, folder / "run")
    torch.set_num_threads(1)
    distributed.init()
    small = {"hidden": 128, "inner": 256, "vocab": 1000, "anchors": 8, "micro": 1}
    measure(configure(case | small, folder / "before"))  # libraries load code and make workspaces at first use
    found = measure(config)
    if distributed.is_main():
        (folder / "measured.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.shutdown()


def launch(name: str) -> dict[str, Any]:
    """Run the case ``name`` under the launcher and compare."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(case["ranks"]),
                   "--master_port", str(distributed.free_port()), str(Path(__file__).resolve()), f"child={name}",
                   f"folder={work}"]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DS_ACCELERATOR": "cpu"})
        if result.returncode:
            raise SystemExit(f"{name} failed:\n{(result.stdout + result.stderr)[-4000:]}")
        measured = json.loads((Path(work) / "measured.json").read_text(encoding="utf-8"))
        os.environ["WORLD_SIZE"] = str(case["ranks"])
        predicted = predict(configure(case, Path(work) / "run"), case)
        del os.environ["WORLD_SIZE"]
    return {"case": name, "options": case, "predicted": predicted["sum"], "measured": measured["peak"],
            "ratio": round(predicted["sum"] / measured["peak"], 3), "parts": predicted, "after": measured["end"]}


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    given = dict(item.split("=", 1) for item in sys.argv[1:] if "=" in item and not item.startswith("--"))
    if "child" in given:
        child(given["child"], Path(given["folder"]))
        return
    names = [item for item in sys.argv[1:] if not item.startswith("--")]
    names = names or [name for name in CASES if name != "offloaded"]
    unknown = set(names) - CASES.keys()
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    wrong = 0
    for name in names:
        found = launch(name)
        print(json.dumps(found), flush=True)
        wrong += abs(found["ratio"] - 1) > TOLERANCE
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
