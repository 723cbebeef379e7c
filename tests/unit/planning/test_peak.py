"""Peak memory of a rank: the plan's activations are what autograd keeps, its buckets those of the engine."""

import importlib.util
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from deepspec.config.schema import Config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.objective import Denominators
from deepspec.planning import peak
from deepspec.planning.packs import plan_packs
from deepspec.planning.plan import make_plan, render
from deepspec.planning.samples import SampleLength
from deepspec.planning.sizes import count_parameters
from deepspec.training.engine import _BUCKET_ELEMENTS
from deepspec.training.module import TrainingModule
from deepspec.training.packs import Packer

ROOT = Path(__file__).resolve().parents[3]
LENGTH = SampleLength(950.0, 665.0, "given")


def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "benchmarks" / "plan_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept_bytes(module: TrainingModule, batch: Any) -> int:
    """Bytes of all storages that autograd keeps for backward, besides weights and the batch itself."""
    own = [*module.parameters(), module.shared.embed, module.shared.lm_head,
           *(value for value in vars(batch).values() if isinstance(value, torch.Tensor))]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = module(batch, Denominators(1.0, 1.0, 1.0))
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("sizes", [
    {"hidden": 128, "inner": 512, "layers": 1, "anchors": 64, "micro": 1},
    {"hidden": 128, "inner": 256, "layers": 3, "anchors": 32, "micro": 2},
    {"hidden": 256, "inner": 512, "layers": 2, "anchors": 16, "micro": 2},
])
def test_activations_are_what_autograd_keeps(sizes: dict[str, int], tmp_path: Path) -> None:
    """Within 10 %, objective's gradients included: bytes of tensors, so that no allocator has a say."""
    benchmark = load_benchmark()
    case = {"vocab": 500, "stage": 0, "ranks": 1, "precision": "fp32"} | sizes
    config = benchmark.configure(case, tmp_path)
    shape = shape_from(benchmark.target_spec(config), config.target, config.drafter)
    weights = torch.randn(500, sizes["hidden"])
    source = benchmark.RandomSource(sizes["micro"], sizes["hidden"], len(config.target.feature_layers), 500)
    packer = Packer(source, shape, config.trainer, config.objective, seed=0, num_workers=0)
    batch = packer.pack(packer.window(range(sizes["micro"]), 0).steps[0], 0)
    drafter = build_drafter(shape, SharedWeights(weights, weights.clone(), "random"))
    kept = kept_bytes(TrainingModule(drafter, config.objective), batch)
    planned = benchmark.predict(config, case)
    gradients = planned["objective"] - min(config.objective.chunk_megabytes * 2**20,
                                           3 * sizes["anchors"] * sizes["micro"] * 7 * 500 * 4)
    assert planned["activations"] + gradients == pytest.approx(kept, rel=0.1)


def test_buckets_are_the_engines() -> None:
    assert peak.BUCKET_ELEMENTS == _BUCKET_ELEMENTS


def test_collectives_by_stage() -> None:
    one, large = 10_000_000, 600_000_000
    assert peak.collective_bytes(one, "fp32", 0, 1) == 0 and peak.collective_bytes(one, "fp32", 0, 2) == 4 * one
    assert peak.collective_bytes(large, "bf16", 1, 1) == 2 * peak.BUCKET_ELEMENTS
    assert peak.collective_bytes(large, "bf16", 2, 8) == 6 * peak.BUCKET_ELEMENTS, "reduced in fp32"
    assert peak.collective_bytes(large, "bf16", 3, 8) == peak.collective_bytes(large, "bf16", 2, 8)
    assert peak.gathered_bytes(large, "bf16", 3, 8) == 2 * large
    assert peak.gathered_bytes(large, "bf16", 2, 8) == peak.gathered_bytes(large, "fp32", 3, 1) == 0


def test_zero_3_gathers_a_stack_of_experts_beyond_its_limit(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=qwen3_4b", "drafter=dspark_v4", "export.formats=[deepspec]",
                      "drafter.intermediate_size=2048")
    stack = 256 * 2048 * 2560  # one of the three matrices of a stage's experts
    counts = count_parameters(config)
    rank = peak.rank_bytes(config, counts, plan_packs(config, LENGTH), 3, 64)
    assert counts.trainable > 9 * stack
    assert rank.gathered == 2 * (peak.GATHERED_ELEMENTS + stack)


def test_objective_and_collectives_are_never_there_together(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=qwen3_4b")
    counts = count_parameters(config)
    packs = plan_packs(config, LENGTH)
    rank = peak.rank_bytes(config, counts, packs, 2, 8)
    step = rank.step
    assert rank.peak == (rank.state.total + step.frozen + step.target + step.batch + step.activations
                         + max(step.objective, rank.collectives))
    tight = replace(rank, update=10**12)
    assert tight.peak == rank.state.total + step.frozen + step.target + step.batch + 10**12


def test_offloading_moves_state_to_main_memory(composed: Callable[..., Config]) -> None:
    config, away = composed("+experiment=qwen3_4b"), composed("+experiment=qwen3_4b", "engine=zero3_offload")
    counts, packs = count_parameters(config), plan_packs(config, LENGTH)
    here, there = (peak.rank_bytes(one, counts, packs, 3, 4) for one in (config, away))
    assert here.host == 0 and there.host == there.state.optimizer + there.state.gradients
    assert here.peak - there.peak == there.host, "activations are larger than the update of a quarter"
    assert "in main memory" in render(make_plan(away)) and "in main memory" not in render(make_plan(config))


@pytest.mark.parametrize("overrides", [["budget=overnight"], ["budget=paper"]])
def test_the_largest_batch_fits_and_the_next_does_not(composed: Callable[..., Config], overrides: list[str]) -> None:
    config = composed("+experiment=qwen3_4b", *overrides)
    counts, room = count_parameters(config), 70e9
    largest = peak.largest_batch(config, counts, LENGTH, 2, 8, room)
    assert largest is not None
    sizes = peak._sizes(config, 8)
    for size in (largest, *(one for one in sizes if one > largest)):
        trial = replace(config, trainer=replace(config.trainer, **peak._scaled(config, size)))
        taken = peak.rank_bytes(trial, counts, plan_packs(trial, LENGTH), 2, 8).peak
        assert (taken <= room) == (size == largest)
    assert peak.largest_batch(config, counts, LENGTH, 2, 8, 1e9) is None
    packed = config.trainer.pack_tokens is not None
    assert largest % config.data.max_length == 0 if packed else config.trainer.global_batch_size // 8 % largest == 0


def test_target_ranks_are_in_the_plan(composed: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = composed("+experiment=qwen3_8b", "features=disaggregated", "target.ranks=2")
    plan = make_plan(config)
    assert (plan.ranks, plan.target_ranks) == (6, 2)
    weights = 2 * plan.parameters.target
    assert weights < plan.target_rank_bytes < 1.5 * weights
    assert "each of the 2 target ranks" in render(plan)
    assert plan.step.target == 0, "trainers hold none of it"


def test_every_zero_stage_has_a_line_with_what_fits(composed: Callable[..., Config]) -> None:
    text = render(make_plan(composed("+experiment=qwen3_8b")))
    table = text[text.index("Peak per rank"):text.index("Work")].splitlines()
    assert [line.split()[0] for line in table[2:6]] == ["0", "1", "2", "3"]
    assert [line.endswith("*") for line in table[2:6]] == [False, False, True, False], "the experiment's own stage"
    assert all(name in table[1] for name in peak.ACCELERATOR_GB)


def test_a_rank_is_described_by_fields_that_are_bytes() -> None:
    """``predict`` of the benchmark adds them up."""
    assert {field.name for field in fields(peak.RankBytes)} == {
        "state", "step", "gathered", "collectives", "update", "host"}
