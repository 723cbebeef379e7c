"""The same numbers whatever the ranks, accumulation, packs and ZeRO stage: gradients, logged values, resumed runs."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "unit" / "training")]

from tiny_training import SHAPE, TinySource, tiny_config, tiny_drafter  # noqa: E402

from deepspec.objective import Denominators  # noqa: E402
from deepspec.training.metrics import objective_row  # noqa: E402
from deepspec.training.module import TrainingModule  # noqa: E402
from deepspec.training.packs import Packer  # noqa: E402
from tests.integration.test_training import SCRIPT, environ, model, outcome, rows  # noqa: E402

pytestmark = pytest.mark.slow
STAGES = (0, 1, 2, 3)
WITHOUT_ANCHORS = (1, 4, 10, 15)
WINDOW = "count=16,window=16,global_batch_size=16,unsupervised=1+4+10+15"
ONE = "micro_batch_size=1"
PACKED = "pack_tokens=64,pack_anchors=12"
ARRANGEMENTS = {  # ranks -> (ZeRO stages, options); micro-batches of m make 16 / (ranks * m) accumulation steps
    1: [((0,), "micro_batch_size=1"), ((0,), "micro_batch_size=2"), (STAGES, "micro_batch_size=4"),
        ((0,), "micro_batch_size=16"), ((0, 3), PACKED)],
    2: [(STAGES, "micro_batch_size=1"), (STAGES, "micro_batch_size=2"), ((1, 3), "micro_batch_size=4"),
        (STAGES, PACKED)],
    4: [(STAGES, "micro_batch_size=1"), ((0, 3), "micro_batch_size=2"), (STAGES, "micro_batch_size=4"), ((2,), PACKED)],
    16: [((2,), "micro_batch_size=1")],
}
HEADS = ("gated", "rnn", "none")


def forked(ranks: int, *jobs: str, ok: bool = True) -> str:
    """Run jobs on ``ranks`` processes that share one start."""
    result = subprocess.run([sys.executable, str(SCRIPT), f"--fork={ranks}", *jobs], env=environ(),
                            capture_output=True, text=True, timeout=570)
    output = result.stdout + result.stderr
    assert (result.returncode == 0) == ok, output[-5000:]
    return output


def name_of(ranks: int, stage: int, options: str) -> str:
    return f"{ranks}x-{stage}-{options.replace('=', '').replace(',', '-')}"


CASES = [(ranks, stage, options) for ranks, entries in ARRANGEMENTS.items() for stages, options in entries
         for stage in stages]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients of every arrangement, runs with few or bad samples, and a run stopped on two ranks."""
    base = tmp_path_factory.mktemp("exactness")
    jobs: dict[int, list[str]] = {ranks: [] for ranks in ARRANGEMENTS}
    for ranks, stage, options in CASES:
        jobs[ranks].append(f"gradient:{stage}:{base}/{name_of(ranks, stage, options)}:{WINDOW},{options}")
    few = "count=10,held_out=10,global_batch_size=8,micro_batch_size=1,max_steps=4"
    bad = "micro_batch_size=1,save_every=2,max_bad_steps=3"
    jobs[1] += [
        f"train:0:{base}/whole:micro_batch_size=1", f"train:0:{base}/few-1:{few}",
        *(f"gradient:{stage}:{base}/alone-{stage}:window=1,count=2" for stage in STAGES),
        f"decode:0:{base}/decoded-1-0",
        *(f"train:{stage}:{base}/{name}-{stage}{options}" for stage in (2, 3)
          for name, options in (("offloaded", ":offload=zero3_offload"), ("kept", ""))),
    ]
    jobs[2] += [
        *(f"gradient:3:{base}/head-{head}:{WINDOW},micro_batch_size=2,head={head}" for head in HEADS),
        *(f"gradient:{stage}:{base}/pair-{stage}:count=2,window=0+1,micro_batch_size=1,unsupervised=1"
          for stage in STAGES),
        *(f"gradient:{stage}:{base}/nothing-{stage}:count=3,window=0+1+2,micro_batch_size=1,unsupervised=0+1+2"
          for stage in STAGES),
        *(f"train:{stage}:{base}/plain-{stage}:head=none,confidence_weight=0,activation_checkpointing=true,max_steps=3"
          for stage in STAGES),
        *(f"train:{stage}:{base}/once-{stage}:{bad},max_steps=6,spoil=3,until=4" for stage in STAGES),
        *(f"train:{stage}:{base}/always-{stage}:{bad},max_steps=6,spoil=3" for stage in (0, 2, 3)),
        *(f"train:{stage}:{base}/stopped-{stage}:term=7" for stage in (1, 3)),
        *(f"decode:{stage}:{base}/decoded-2-{stage}" for stage in STAGES),
    ]
    jobs[4] += [
        *(f"train:{stage}:{base}/few-4-{stage}:{few}" for stage in STAGES),
        *(f"train:{stage}:{base}/fewer-{stage}:count=2,held_out=1,global_batch_size=4,micro_batch_size=1,max_steps=3"
          for stage in (0, 3)),
        f"decode:3:{base}/decoded-4-3:micro_batch_size=1",
    ]
    for ranks, listed in jobs.items():
        (base / f"output-{ranks}.txt").write_text(forked(ranks, *listed))
    return base


def plain(head: str = "vanilla") -> tuple[dict, dict]:
    """Gradient and logged row of the window in one pack, by autograd alone: no engine, no ranks, no accumulation."""
    config = tiny_config(Path("unused"), micro_batch_size=16, global_batch_size=16)
    shape = replace(SHAPE, head=head)
    if head == "none":
        shape = replace(shape, markov_rank=0, confidence_with_markov=False)
    packer = Packer(TinySource(16, unsupervised=WITHOUT_ANCHORS), shape, config.trainer, config.objective, seed=5)
    module = TrainingModule(tiny_drafter(shape), config.objective)
    window = packer.window(range(16), 0)
    weights = packer.weights(window)
    (batch,) = packer.packs(window)
    loss, sums = module(batch, Denominators(weights.ce, weights.tv, weights.confidence))
    loss.backward()
    gradients = {name: p.grad for name, p in module.drafter.named_parameters()}
    return gradients, objective_row({key: value.reshape(-1).tolist() for key, value in sums.items()}, config.objective)


def distance(one: dict, other: dict) -> float:
    """``||dg|| / ||g||`` of the whole gradient."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(one[name].double().square().sum()) for name in one)) ** 0.5


@pytest.fixture(scope="module")
def reference() -> tuple[dict, dict]:
    return plain()


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_gradient_and_logged_values_are_those_of_one_process(base, reference, case):
    folder = base / name_of(*case)
    assert distance(reference[0], load_file(folder / "gradient.safetensors")) <= 1e-6
    assert json.loads((folder / "row.json").read_text()) == pytest.approx(reference[1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("head", HEADS)
def test_other_heads_are_as_exact(base, head):
    gradients, row = plain(head)
    assert distance(gradients, load_file(base / f"head-{head}/gradient.safetensors")) <= 1e-6
    assert json.loads((base / f"head-{head}/row.json").read_text()) == pytest.approx(row, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_anchors_adds_exact_zeros(base, stage):
    alone, pair = (load_file(base / f"{name}-{stage}/gradient.safetensors") for name in ("alone", "pair"))
    assert distance(alone, pair) <= 2e-7, "not bit for bit: matrix products round by the alignment of their inputs"
    nothing = load_file(base / f"nothing-{stage}/gradient.safetensors")
    assert all(int(value.count_nonzero()) == 0 and bool(value.isfinite().all()) for value in nothing.values())


@pytest.mark.parametrize("stage", STAGES)
def test_ten_samples_on_four_ranks_are_each_counted_once(base, stage):
    one, four = base / "few-1", base / f"few-4-{stage}"
    assert [row["samples"] for row in rows(four)] == [8, 10, 18, 20]
    assert [row["loss"] for row in rows(four)] == pytest.approx([row["loss"] for row in rows(one)], abs=1e-5)
    (left,), (right,) = rows(one, "validation.jsonl"), rows(four, "validation.jsonl")
    assert sum(part["num_samples"] for part in right["domains"].values()) == right["num_samples"] == 10
    assert right["acceptance_length_proxy"] == pytest.approx(left["acceptance_length_proxy"], rel=1e-5)
    assert right["loss"] == pytest.approx(left["loss"], rel=1e-5)


@pytest.mark.parametrize("stage", (0, 3))
def test_a_dataset_smaller_than_the_world(base, stage):
    assert outcome(base / f"fewer-{stage}") == {"step": 3, "stopped": False, "trained": True}
    assert [row["samples"] for row in rows(base / f"fewer-{stage}")] == [2, 4, 6]


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_term_and_a_head_that_are_off(base, stage):
    found = rows(base / f"plain-{stage}")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in rows(base / "plain-0")], abs=1e-5)
    head = "confidence_head.proj.weight"
    assert torch.equal(model(base / f"plain-{stage}", 3)[head],
                       dict(tiny_drafter(replace(SHAPE, head="none", markov_rank=0, confidence_with_markov=False))
                            .named_parameters())[head]), "a head whose loss has weight 0 must not move"


@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(base, stage):
    found = rows(base / f"once-{stage}")
    assert [row["skipped_steps"] for row in found] == [0, 0, 0, 1, 1, 1]
    assert all(row["loss"] is not None for row in found), "the loss itself was finite"
    assert all(bool(torch.isfinite(value).all()) for value in model(base / f"once-{stage}", 6).values())
    before, after = model(base / f"once-{stage}", 4, "engine/optimizer.safetensors"), model(base / f"once-{stage}", 6)
    assert all(bool(torch.isfinite(value).all()) for value in before.values())
    assert after.keys() == dict(tiny_drafter().named_parameters()).keys()


def test_the_samples_of_a_bad_gradient_are_named(base):
    output = (base / "output-2.txt").read_text()
    assert "step skipped on all ranks: a gradient of the window with sample-" in output


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_bad_steps_in_a_row_end_the_run_with_its_last_checkpoint_whole(base, stage):
    run = base / f"always-{stage}"
    assert outcome(run)["error"].startswith("3 steps in a row had a loss or gradient that is not finite")
    assert (run / "checkpoints/latest").read_text().strip() == "step-4"
    kept = model(run, 4)
    assert all(bool(torch.isfinite(value).all()) for value in kept.values())
    good = model(base / f"once-{stage}", 4)  # the same three steps, then one that was skipped
    assert all(torch.equal(kept[name], good[name]) for name in kept)


@pytest.fixture(scope="module")
def resumed(base: Path) -> Path:
    """The runs that two ranks left, continued on one and on four ranks and at other stages."""
    targets = {1: [(1, 3), (3, 0)], 4: [(1, 2), (3, 0), (3, 3)]}
    for ranks, moves in targets.items():
        for before, after in moves:
            shutil.copytree(base / f"stopped-{before}", base / f"moved-{before}-{ranks}-{after}")
        forked(ranks, *(f"train:{after}:{base}/moved-{before}-{ranks}-{after}:{PACKED if after == 2 else ONE}"
                        for before, after in moves))
    return base


@pytest.mark.parametrize("move", ["1-1-3", "3-1-0", "1-4-2", "3-4-0", "3-4-3"])
def test_saved_on_two_ranks_resumed_on_one_and_on_four(resumed, move):
    stopped = outcome(resumed / f"stopped-{move[0]}")
    assert stopped["stopped"] and 0 < stopped["step"] < 10
    assert outcome(resumed / f"moved-{move}")["step"] == 10
    found, whole = rows(resumed / f"moved-{move}"), rows(resumed / "whole")
    assert [row["step"] for row in found] == list(range(1, 11))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in whole], abs=1e-5)
    one, two = model(resumed / "whole", 10), model(resumed / f"moved-{move}", 10)
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)


@pytest.mark.parametrize("stage", (2, 3))
def test_offloading_the_optimizer_changes_no_number(base, stage):
    """conf/engine/zero3_offload.yaml's options, verbatim; DeepSpeed takes them on the CPU too."""
    assert [row["loss"] for row in rows(base / f"offloaded-{stage}")] == pytest.approx(
        [row["loss"] for row in rows(base / f"kept-{stage}")], abs=1e-6)


@pytest.mark.parametrize("where", ["2-0", "2-1", "2-2", "2-3", "4-3"])
def test_real_decoding_is_the_same_on_any_number_of_ranks(base, where):
    (alone,) = json.loads((base / "decoded-1-0/decoded.json").read_text())
    everyone = json.loads((base / f"decoded-{where}/decoded.json").read_text())
    assert len(everyone) == int(where[0]) and alone["rounds"] > 5
    assert all(row == alone for row in everyone)
