"""benchmarks/gpu.py as far as it goes without a GPU: its arguments, its counts, and a tiny step on the CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import SharedWeights

ROOT = Path(__file__).resolve().parents[3]
TINY = ["target=tiny", "sequences=2", "tokens=40", "anchors=6", "length=3", "layers=2", "rank=4"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    found = subprocess.run([*script, *TINY], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count(".\n") == 1 and "needs a CUDA device" in found.stderr


@pytest.mark.parametrize(("argument", "message"), [
    ("anchor=3", "unknown anchor"), ("target=70b", "target=70b must be one of"), ("tokens=many", "many"),
    ("cases=fast/flex", "case fast/flex must be one of"), ("cases=triton", "case triton must be one of"),
])
def test_wrong_arguments_are_named(gpu: Any, argument: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        gpu.parse([argument])


def test_help_is_the_usage(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gpu.parse(["--help"])
    assert left.value.code == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in gpu.DEFAULTS)


@pytest.mark.parametrize("target", ["4b", "8b"])
def test_shapes_build_a_drafter(gpu: Any, target: str) -> None:
    """Without its memory: parameters on the meta device, counted."""
    shape = gpu.make_shape(gpu.parse([f"target={target}"]))
    with torch.device("meta"):
        shared = torch.empty(shape.vocab_size, shape.hidden_size)
        drafter = build_drafter(shape, SharedWeights(shared, shared, ""))
    count = sum(parameter.numel() for parameter in drafter.parameters())
    assert 0.5e9 < count < 1.5e9


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_counted_flop_of_the_backbone(gpu: Any, head: str) -> None:
    """Against PyTorch's own counter, which also counts the pairs that the CPU's attention masks out."""
    options = gpu.parse([*TINY, f"head={head}"])
    shape = gpu.make_shape(options)
    batch = gpu.make_batch(options, shape, torch.float32)
    lm_head = torch.randn(shape.vocab_size, shape.hidden_size)
    drafter = build_drafter(shape, SharedWeights(lm_head, lm_head, ""))
    with FlopCounterMode(display=False) as counter:
        output = drafter(batch)
        (output.hidden.sum() + (output.transition.sum() if output.transition is not None else 0.0)).backward()
    flop = gpu.model_flop(shape, batch)
    gates = flop["sequential_head"] if head in ("gated", "rnn") else 0.0
    if gates:  # less the product over the vocabulary, which is the objective's
        gates -= 6.0 * shape.vocab_size * float(batch.blocks.mask.sum()) * shape.markov_rank
    backbone = flop["context_projection"] + flop["layers"] + flop["attention"] + gates
    assert 0.9 < counter.get_total_flops() / backbone < 1.6


def test_a_tiny_step_on_the_cpu(gpu: Any) -> None:
    result = gpu.run_case(gpu.parse([*TINY, "steps=3", "warmup=1", "zero=1"]), "chunked/chunked")
    assert result["loss_last"] < result["loss_first"]
    assert result["slots"] > 20 and result["seconds"] > 0 and 0 < result["utilisation"]
    assert set(result["parts"]) >= {"forward", "backward", "optimizer"}
