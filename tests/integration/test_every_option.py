"""An option that nothing reads cannot exist.

Every leaf of the schema must have an effect, or a reader that acts on it:

* Effects are tried for the leaves of ``TRIED``: with another value the plan's text, what the engine, the optimizer or
  the schedule is made with, the place of the data, or a training step of a tiny drafter (weights, metrics, files) is
  another one, or the target is refused when it loads. The dumped configuration and hashes of whole groups are none.
* Readers are found by the type checker, for what needs servers, benchmarks or other runs to show an effect. With the
  options taken out of the schema it reports each place that reads one, in whatever branch, and it knows
  ``trainer.num_anchors`` from another class's ``num_anchors``. Places that only judge values (planning/validate*,
  preflight*, jobs) do not count, nor does what turns whole groups into dictionaries.

A read is evidence because a value is read to be used: one that is read into a name and left there is reported by
flake8, code that cannot be reached by the tests of its own module. It is weaker than an effect, hence the list.
"""

import ast
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Iterator, Optional, get_args, get_origin, get_type_hints

import pytest
import torch

from deepspec.config.compose import compose_config
from deepspec.config.paths import features_dir, prompts_dir, responses_dir
from deepspec.config.schema import Config, is_autoregressive
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.errors import UserError
from deepspec.planning.plan import make_plan, render
from deepspec.planning.validate import validate
from deepspec.targets.spec import TargetSpec, check_shape
from deepspec.training.engine import _make_optimizer, build_config
from deepspec.training.identity import run_identity
from deepspec.training.packs import Packer
from deepspec.training.schedule import make_schedule
from deepspec.training.trainer import DrafterTrainer
from tests.conftest import ROOT

sys.path.append(str(ROOT / "tests" / "unit" / "training"))
from tiny_training import VOCABULARY, WIDTH, TinySource, shared_weights  # noqa: E402

pytestmark = pytest.mark.slow
ERROR = re.compile(r'^(\S+?\.py):\d+:.* error: .*"(\w+)" has no attribute "(\w+)"')
JUDGES = re.compile(r"deepspec/planning/(validate|preflight|jobs|require)\w*\.py$")
BASE = ["+experiment=tiny", "target.shape={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_layers: 4, "
        "num_heads: 4, num_kv_heads: 2, head_dim: 8, vocab_size: 96}", "target.feature_layers=[0,2]",
        "target.mask_token_id=95", "drafter.block_size=4", "drafter.markov_rank=8", "trainer.num_anchors=6",
        "trainer.global_batch_size=4", "trainer.micro_batch_size=2", "trainer.max_steps=2", "trainer.save_every=1",
        "trainer.async_save=false", "data.max_length=64", "data.num_workers=0", "tracking=disabled", "engine=zero0"]
# Leaves whose effect is tried: another value, after whatever else has to be set for both values.
TRIED: dict[str, tuple[str, ...]] = {key: tuple(values) for key, *values in (
    ("run.name", "other"), ("run.seed", "7"), ("run.data_root", "elsewhere"), ("stages", "[train,export]"),
    ("target.name", "other"), ("target.path", "other", "target.source=hf", "target.path=x"),
    ("target.source", "hf", "target.path=x"),
    ("target.revision", "abc", "target.source=hf", "target.path=x"),
    ("target.dtype", "bfloat16"), ("target.feature_layers", "[0,1]"), ("target.mask_token_id", "94"),
    ("target.thinking", "true"), ("target.shape.model_type", "llama"),
    *((f"target.shape.{name}", value) for name, value in (
        ("hidden_size", "32"), ("intermediate_size", "64"), ("num_layers", "5"), ("num_heads", "2"),
        ("num_kv_heads", "1"), ("head_dim", "16"), ("vocab_size", "128"))),
    ("drafter.num_layers", "1"), ("drafter.block_size", "5"), ("drafter.sample_from_anchor", "false"),
    ("drafter.head", "gated"), ("drafter.markov_rank", "4"), ("drafter.confidence_head", "false"),
    ("drafter.confidence_with_markov", "false"), ("drafter.intermediate_size", "48"), ("drafter.sliding_window", "2"),
    ("objective.ce_weight", "0.5"), ("objective.tv_weight", "0.1"), ("objective.confidence_weight", "0.1"),
    ("objective.ce_labels", "target"), ("objective.decay", "1.0"), ("objective.confidence_detach", "true"),
    ("trainer.seed", "9"), ("trainer.epochs", "9", "trainer.max_steps=null"), ("trainer.max_steps", "1"),
    ("trainer.global_batch_size", "6"), ("trainer.micro_batch_size", "1"), ("trainer.num_anchors", "3"),
    ("trainer.pack_tokens", "128"), ("trainer.pack_anchors", "9", "trainer.pack_tokens=128"),
    ("trainer.pad_packs", "true", "trainer.pack_tokens=128", "trainer.pack_anchors=9"),
    ("trainer.precision", "bf16"), ("trainer.log_every", "2"), ("trainer.save_every", "5"), ("trainer.keep_last", "1"),
    ("trainer.keep_best", "false"), ("trainer.ema_decay", "0.5"), ("trainer.activation_checkpointing", "true"),
    ("optimizer.lr", "1e-2"), ("optimizer.betas", "[0.5,0.9]"), ("optimizer.eps", "1e-3"),
    ("optimizer.weight_decay", "0.1"), ("optimizer.warmup_ratio", "0.9"), ("optimizer.min_lr_ratio", "0.5"),
    ("optimizer.max_grad_norm", "0.01"), ("optimizer.backbone_lr_multiplier", "0.5"),
    ("optimizer.head_lr_multiplier", "0.5"), ("optimizer.confidence_lr_multiplier", "0.5"),
    ("engine.zero_stage", "2"), ("+engine.deepspeed.wall_clock_breakdown", "true"),
    ("data.max_prompts", "99"), ("data.held_out_fraction", "0.5"), ("data.min_held_out", "3"),
    ("data.max_length", "48"), ("data.num_workers", "3"), ("data.near_duplicate_threshold", "0.5"),
    ("data.near_duplicate_num_perm", "64"), ("responses.max_tokens", "7"), ("responses.temperature", "0.1"),
    ("responses.top_p", "0.1"), ("responses.top_k", "5"), ("responses.truncated", "drop"),
    ("responses.thinking_share", "0.5"), ("features.codec", "bf16"), ("features.mode", "online"),
    ("features.shard_megabytes", "1"), ("features.path", "store"),
    ("features.queue_depth", "9", "features=disaggregated"), ("target.ranks", "2", "features=disaggregated"),
    ("export.dtype", "bfloat16"), ("export.formats", "[deepspec,speculators]"),
)}
STEPS = ("drafter", "objective", "trainer", "optimizer", "run", "target")  # groups that a training step is tried for
SAME_STEP = {"trainer.activation_checkpointing"}  # exact: only the plan may change


def is_group(kind: Any) -> bool:
    """Whether a field holds options of its own, alone or in a list."""
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    return hasattr(inner, "__dataclass_fields__")


def classes(cls: Any = Config) -> Iterator[Any]:
    """All dataclasses of the schema."""
    yield cls
    for kind in get_type_hints(cls).values():
        if is_group(kind):
            yield from classes(get_args(kind)[0] if get_origin(kind) is list else kind)


def leaves(cls: Any) -> set[str]:
    """Fields that are options rather than groups."""
    return {name for name, kind in get_type_hints(cls).items() if not is_group(kind)}


def without_leaves(source: str) -> str:
    """The schema's source, its options taken out."""
    tree = ast.parse(source)
    known = {cls.__name__: leaves(cls) for cls in set(classes())}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in known:
            node.body = [part for part in node.body if not (
                isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                and part.target.id in known[node.name])] or [ast.Pass()]
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], set[str]]:
    """Files that read an option, by its class and name."""
    folder = tmp_path_factory.mktemp("schema")
    shadows: list[str] = []
    for path in sorted((ROOT / "deepspec" / "config").glob("schema*.py")):
        shadow = folder / path.name
        shadow.write_text(without_leaves(path.read_text(encoding="utf-8")), encoding="utf-8")
        shadows += ["--shadow-file", str(path.relative_to(ROOT)), str(shadow)]
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "options"),
               "--soft-error-limit=-1", "--no-pretty", "--hide-error-context", *shadows, "deepspec"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    found: dict[tuple[str, str], set[str]] = {}
    for line in result.stdout.splitlines():
        match = ERROR.match(line)
        if match and not JUDGES.search(match[1]):
            found.setdefault((match[2], match[3]), set()).add(match[1])
    return found


def tried_leaves() -> set[tuple[str, str]]:
    """``TRIED`` by class and name."""
    found = set()
    for key in TRIED:
        cls: Any = Config
        *groups, name = key.lstrip("+").split(".")
        if groups[-1:] == ["deepspeed"]:
            groups, name = ["engine"], "deepspeed"
        for group in groups:
            cls = get_type_hints(cls)[group]
        found.add((cls.__name__, name))
    return found


def test_every_option_is_read_or_has_an_effect(readers: dict[tuple[str, str], set[str]]) -> None:
    every = {(cls.__name__, name) for cls in classes() for name in leaves(cls)}
    assert len(every) > 250
    neither = sorted(".".join(one) for one in every - readers.keys() - tried_leaves())
    assert not neither, f"read by nothing but checks of values, and no effect: {neither}"


def test_readers_are_told_apart(readers: dict[tuple[str, str], set[str]]) -> None:
    """What the test above rests on: judges do not count, and classes are not mixed up."""
    assert ("TargetShape", "model_type") not in readers, "only checks of values read it; its effect is in TRIED"
    assert "deepspec/training/packs.py" in readers["TrainerConfig", "num_anchors"]
    assert ("ExportConfig", "num_anchors") not in readers
    assert ("SweepConfig", "stop_on_failure") in readers


def spec_of(config: Config) -> TargetSpec:
    """What a target of the configured sizes would say of itself."""
    known = {field.name for field in fields(TargetSpec)}
    return TargetSpec(**{name: value for name, value in vars(config.target.shape).items() if name in known},
                      rms_norm_eps=1e-6, rope_theta=1e4)


def step(config: Config, run_dir: Path) -> str:
    """Two training steps of a tiny drafter: its weights, the metrics and the files that they leave."""
    config = replace(config, run=replace(config.run, dir=str(run_dir)))
    shape = shape_from(spec_of(config), config.target, config.drafter)
    torch.manual_seed(0)
    drafter = build_drafter(shape, shared_weights(), confidence_detach=config.objective.confidence_detach,
                            activation_checkpointing=config.trainer.activation_checkpointing)
    seed = config.run.seed if config.trainer.seed is None else config.trainer.seed
    packer = Packer(TinySource(), shape, config.trainer, config.objective, seed=seed)
    identity = run_identity(config, shape, target="target", data="data")
    scores = iter([2.0, 1.0])
    trainer = DrafterTrainer(drafter, packer, config, identity=identity,
                             validate=lambda engine, step, *averaged: next(scores, 0.0))
    trainer.run()
    weights = hashlib.sha256(b"".join(value.detach().float().numpy().tobytes()
                                      for value in trainer.engine.module.drafter.state_dict().values())).hexdigest()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    clock = re.compile("second|_share|memory")
    kept = [{name: value for name, value in row.items() if not clock.search(name)} for row in rows]
    files = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())
    return json.dumps([weights, kept, files])


def outcome(config: Config, base: Config, run_dir: Optional[Path]) -> dict[str, str]:
    """Everything an option may change here. ``run_dir``: also train."""
    stage = {name: str(made(config)) for name, made in (
        ("prompts", prompts_dir), ("responses", responses_dir), ("features", features_dir))}
    schedule = make_schedule(10, config.optimizer)
    optimizer = _make_optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}], config.optimizer, 0)
    found = {
        "plan": render(make_plan(config)), **stage, "schedule": str([schedule.factor(place) for place in range(10)]),
        "engine": json.dumps(build_config(config.trainer, config.optimizer, config.engine, 1)),
        "optimizer": str({name: value for name, value in optimizer.defaults.items()}) + str(optimizer.__dict__.get(
            "max_norm")),
    }
    try:
        check_shape(spec_of(base), config.target.shape)
        found["target"] = "accepted"
    except UserError as error:
        found["target"] = str(error)
    if run_dir is not None:
        found["step"] = step(config, run_dir)
    return found


def trained(key: str, config: Config) -> bool:
    """Whether a step with this option can be made with the tiny source (whose sizes are fixed)."""
    sizes = config.target.shape.vocab_size == VOCABULARY and config.target.shape.hidden_size == WIDTH
    return key.split(".")[0] in STEPS and sizes and config.features.mode == "cached" and not is_autoregressive(
        config.drafter.algorithm)


@pytest.fixture(scope="module")
def baselines() -> dict[tuple[str, ...], dict[str, str]]:
    """Outcomes without a change, by what had to be set for both values; each is made once."""
    return {}


@pytest.mark.parametrize("key", TRIED)
def test_another_value_has_an_effect(key: str, baselines: dict[tuple[str, ...], dict[str, str]], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, *needs = TRIED[key]
    monkeypatch.setenv("WORLD_SIZE", "3" if "features=disaggregated" in needs else "1")
    base = compose_config([*BASE, *needs])
    config = compose_config([*BASE, *needs, f"{key}={value}"])
    validate(config)
    train = trained(key, config) and trained(key, base)
    known = (*needs, "trained" if train else "")
    if known not in baselines:
        baselines[known] = outcome(base, base, tmp_path / "before" if train else None)
    before, after = baselines[known], outcome(config, base, tmp_path / "after" if train else None)
    changed = {name for name in before if before[name] != after[name]}
    assert changed, f"{key}={value} changes nothing"
    if key in SAME_STEP:
        assert changed == {"plan"}


def test_without_a_change_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise anything would look like an effect; and what only W&B reads has none here."""
    monkeypatch.chdir(tmp_path)
    base, other = compose_config(BASE), compose_config([*BASE, "tracking.project=other"])
    assert outcome(base, base, tmp_path / "one") == outcome(other, base, tmp_path / "two")
