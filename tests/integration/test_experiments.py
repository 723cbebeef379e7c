"""Every experiment plans from its own file, and its tiny twin goes through every stage on a random target."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit" / "targets"))

from tiny_targets import ROWS, save_tiny  # noqa: E402

from deepspec import distributed  # noqa: E402
from deepspec.artifacts import read_manifest  # noqa: E402
from deepspec.config.compose import compose_config, options  # noqa: E402
from deepspec.config.paths import features_dir  # noqa: E402
from deepspec.planning.estimate import make_plan  # noqa: E402
from deepspec.planning.plan import render  # noqa: E402
from deepspec.planning.validate import validate  # noqa: E402
from deepspec.stages.pipeline import run_stages  # noqa: E402

STAGES = ("prompts", "responses", "features", "train", "confidence", "calibrate", "profile", "evaluate", "export",
          "report")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
         "vocab_size": ROWS, "parameters": None, "active_parameters": None}
V4 = {"drafter.intermediate_size=16", "drafter.v4={num_heads: 4, head_dim: 16, q_lora_rank: 16, o_groups: 2, "
      "o_lora_rank: 8, rope_head_dim: 8, num_experts: 4, experts_per_token: 2}"}
FAMILY = {  # of the tiny target, by experiment; sizes of its own
    "qwen3_30b_a3b": ("qwen3_moe", {}), "gemma4_12b": ("gemma4_unified", {"full_head_dim": 32}),
    "gpt_oss_20b": ("gpt_oss", {}), "llama3_1b": ("llama", {}), "llama3_8b": ("llama", {}), "llama3_70b": ("llama", {}),
    "deepseek_v4_flash": ("deepseek_v4", {"intermediate_size": 32, "num_kv_heads": 1, "head_dim": 32}),
    "deepseek_v4_pro": ("deepseek_v4", {"intermediate_size": 32, "num_kv_heads": 1, "head_dim": 32}),
}
LARGE = sorted(set(options("experiment")) - {"tiny", "smollm2_135m"})  # these two are small themselves
SMALL = (
    "budget=tiny", "engine=zero1", "responses=in_process", "features=cached", "data=files", "tracking=disabled",
    "target.dtype=float32", f"target.mask_token_id={ROWS - 1}", "target.thinking=null", "drafter.markov_rank=8",
    "data.max_prompts=9", "data.min_held_out=4", "data.held_out_fraction=0.3", "data.max_length=64",
    "responses.max_tokens=10", "features.codec=fp32", "trainer.max_steps=3", "trainer.global_batch_size=4",
    "trainer.micro_batch_size=2", "trainer.num_anchors=6", "trainer.pack_tokens=256", "trainer.pack_anchors=24",
    "confidence.max_new_tokens=6", "confidence.max_blocks=40", "confidence.batch_size=4", "confidence.epochs=1",
    "calibration.min_samples=4", "calibration.bootstrap=5", "profile.num_reqs=[1,2]", "profile.verify_lengths=[0,2]",
    "profile.kv_lengths=[16]", "profile.samples_per_cell=3", "profile.warmup=0", "profile.prefill_tokens=[8]",
    "evaluate.max_new_tokens=4", "evaluate.batch_size=4", "evaluate.bootstrap=20", "evaluate.baseline_untrained=false",
    "evaluate.check_greedy=1",
)


def twin(experiment: str, root: Path) -> list[str]:
    """Overrides that make ``experiment`` small, for the tiny target that is written under ``root``."""
    family, sizes = FAMILY.get(experiment, ("qwen3", {}))
    target = root / family
    if not target.is_dir():
        save_tiny(target, family)
    layers = [1, 2, 3] if experiment.startswith("deepseek_v4") else [0, 2]
    overrides = [f"+experiment={experiment}", *SMALL, f"target.path={target}", f"target.feature_layers={layers}",
                 f"run.dir={root}/runs/{experiment}", f"run.data_root={root}/data",
                 f"data.sources.0.path={root}/prompts.jsonl"]
    overrides += [f"target.shape.{name}={'null' if value is None else value}"
                  for name, value in (SIZES | sizes).items()]
    return overrides + sorted(V4 if experiment.startswith("deepseek_v4") else {"drafter.num_layers=1"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("experiments")
    names = ("ox", "fox", "dog", "jump", "quick", "lazy", "brown", "over", "the", "one", "two", "six")
    rows = [{"prompt": f"the {name} {index} and {other}", "id": f"p{index}"}
            for index, (name, other) in enumerate(zip(names, reversed(names)))]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("experiment", LARGE)
def test_an_experiment_plans_without_weights(experiment: str) -> None:
    """Memory, disk and hours from the configuration alone, whose sizes are those of the target it names."""
    config = compose_config([f"+experiment={experiment}"])
    validate(config)
    plan = make_plan(config)
    text = render(plan)
    assert plan.target == experiment and plan.parameters.target > 5e8 and plan.workload.steps > 0
    experts = experiment in ("qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v4_flash", "deepseek_v4_pro")
    assert (plan.parameters.target_active < 0.25 * plan.parameters.target) == experts == ("of it active" in text)
    assert all(word in text for word in ("Memory per rank", "H100", "Disk", "Parameters"))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", LARGE)
def test_the_tiny_twin_goes_through_every_stage(
    experiment: str, root: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    # DeepSpeed keeps process groups of the first engine in its modules: one process, one group, for all twins.
    monkeypatch.setattr(distributed, "shutdown", lambda: None)
    config = compose_config(twin(experiment, root))
    validate(config)
    run_stages(config, STAGES)
    run = root / "runs" / experiment
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert 1.0 <= evaluation["macro"]["acceptance_length"] <= config.drafter.block_size + 1
    assert len(json.loads((run / "calibration.json").read_text())["temperatures"]) == config.drafter.block_size
    manifest = read_manifest(run / "export")
    assert manifest is not None and manifest.status == "complete" and (run / "report.html").stat().st_size > 10000
    exported = json.loads((run / "export" / "config.json").read_text())
    assert exported["target_layer_ids" if "target_layer_ids" in exported else "dspark_target_layer_ids"] == list(
        config.target.feature_layers)
    if experiment.startswith("deepseek_v4"):  # other features than any other family's under the same layer ids
        store = read_manifest(features_dir(config))
        assert store is not None and "mean of its residual streams" in json.dumps([store.facts, store.config])
