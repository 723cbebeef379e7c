"""Every wrong value is refused with the key, the value and what is allowed; every shipped experiment passes."""

from typing import Any, Callable

import pytest

from deepspec.config.compose import CONF_DIR
from deepspec.config.schema import BenchmarkConfig, Config, SourceConfig
from deepspec.errors import ConfigError
from deepspec.planning.validate import validate

EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_shipped_experiments_are_valid(composed: Callable[..., Config], experiment: str) -> None:
    validate(composed(f"+experiment={experiment}"))


@pytest.mark.parametrize("key, value, said", [
    ("stages", ["trian"], "Did you mean 'train'"), ("stages", ["export", "train"], "in the order"),
    ("run.name", "a b", "run.name='a b'"), ("run.seed", -1, "run.seed=-1"),
    ("run.seed", 2**32, "range of all generators"),
    ("target.source", "hub", "target.source='hub'"), ("target.dtype", "float16", "bfloat16, float32"),
    ("target.feature_layers", [1, 1, 3], "strictly ascending"), ("target.feature_layers", [3, 1], "strictly ascending"),
    ("target.feature_layers", [], "at least one"), ("target.feature_layers", [1, 7], "without the last layer 7"),
    ("target.feature_layers", [1, 8], "below target.shape.num_layers=8"), ("target.feature_layers", [-1, 2], "from 0"),
    ("target.mask_token_id", 10**6, "below target.shape.vocab_size="), ("target.mask_token_id", -1, "at least 0"),
    ("target.shape.num_kv_heads", 3, "a divisor of"),
    ("drafter.block_size", 1, "at least 2"), ("drafter.head", "vanila", "Did you mean 'vanilla'"),
    ("drafter.markov_rank", 0, "at least 1"), ("drafter.num_layers", 0, "at least 1"),
    ("drafter.algorithm", "dflash", "has no heads"), ("drafter.algorithm", "eagle", "one of dspark"),
    ("objective.ce_weight", -0.1, "at least 0"), ("objective.decay", 0.0, "above 0"),
    ("objective.tv_weight", float("nan"), "finite"), ("objective.implementation", "fused", "auto, eager, chunked"),
    ("data.held_out_fraction", 1.0, "below 1"), ("data.max_length", 1, "at least 2"),
    ("responses.backend", "servers", "Did you mean 'server'"), ("responses.top_p", 0.0, "above 0"),
    ("responses.servers", ["localhost:8000"], "URLs ending in /v1"), ("responses.error_limit", 2.0, "at most 1"),
    ("responses.truncated", "cut", "keep, drop"), ("features.mode", "disk", "cached, online"),
    ("features.codec", "bfloat16", "bf16, int8, fp8-e4m3, lossless, fp32"), ("features.token_budget", 0, "at least 1"),
    ("trainer.micro_batch_size", 3, "must be a multiple of"), ("trainer.precision", "fp16", "bf16, fp32"),
    ("trainer.attention", "sdpa", "auto, chunked, flex"), ("drafter.sliding_window", 0, "at least 1"),
    ("trainer.max_steps", 0, "at least 1"), ("optimizer.lr", 0.0, "above 0"), ("optimizer.betas", [0.9], "two numbers"),
    ("optimizer.warmup_ratio", 1.5, "at most 1"), ("engine.zero_stage", 4, "0, 1, 2 or 3"),
    ("target.path", "/models/own", "add target.source=hf"), ("optimizer.schedule", "wds", "Did you mean 'wsd'"),
    ("optimizer.decay_ratio", 0.1, "schedule=wsd, but it is cosine"),
    ("trainer.early_stopping_patience", 3, "needs trainer.validate_every, which is 0"),
    ("trainer.early_stopping_threshold", 0.1, "no effect without trainer.early_stopping_patience"),
    ("trainer.early_stopping_threshold", -0.1, "at least 0"),
    ("tracking.mode", "on", "auto, online, offline, disabled"), ("confidence.refit_fraction", 1.0, "below 1"),
    ("calibration.fit_fraction", 0.0, "above 0"), ("calibration.grid_max", 0.05, "above 0.1"),
    ("profile.verify_lengths", [-1], "at least 0"), ("profile.num_reqs", [], "non-empty"),
    ("stages", [], "some of prompts"), ("run.name", "..", "folder of its own"), ("run.name", "a/../../b", "of its own"),
    ("run.dir", "", "a folder"), ("run.dir", "~/r", "written out"), ("run.data_root", "", "a folder"),
    ("target.revision", "abc", "Remove target.rev"),
    ("data.sources", [SourceConfig("files", "jsonl")], "data.sources.0.path=PATH"),
    ("data.sources", [SourceConfig("math", "embedded", "math", cap=0)], "at least 1"),
    ("engine.deepspeed", {"train_batch_size": 3}, "decided by trainer.global_batch_size"),
    ("tracking.timeout_seconds", 0.0, "above 0"), ("evaluate.benchmarks", [], "non-empty"),
    ("evaluate.benchmarks", [BenchmarkConfig("a", "held_out", limit=0)], "at least 1"),
    ("evaluate.temperatures", [], "non-empty"), ("evaluate.modes", [], "non-empty"),
    ("evaluate.benchmarks", [BenchmarkConfig("a", "b.jsonl"), BenchmarkConfig("a", "c.jsonl")], "without repetition"),
    ("evaluate.temperatures", [1.0, 1.0], "without repetition"), ("evaluate.modes", ["none", "none"], "without rep"),
    ("profile.max_batch_tokens", 1, "large enough for two cells"),
    ("export.checkpoint", "last", "latest, best or step-N"),
    ("evaluate.modes", ["fix"], "evaluate.modes='fix'"), ("evaluate.temperatures", [-1.0], "at least 0"),
    ("export.formats", ["spectulators"], "Did you mean 'speculators'"), ("export.formats", [], "some of"),
    ("export.formats", ["zlab_dflash"], "1\\+N DFlash"), ("export.dtype", "float16", "bfloat16, float32"),
])
def test_wrong_values_are_named(composed: Callable[..., Config], key: str, value: Any, said: str) -> None:
    config = composed("+experiment=tiny")
    *path, name = key.split(".")
    owner: Any = config
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    with pytest.raises(ConfigError, match=said):
        validate(config)


def test_global_batch_divides_over_ranks(composed: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("+experiment=tiny")
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 8, 2
    validate(config)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="2 x 3 ranks = 6. Nearest: 6"):
        validate(config)


@pytest.mark.parametrize("overrides, said", [
    (("optimizer.schedule=wsd", "optimizer.decay_ratio=0"), "above 0"),
    (("optimizer.schedule=wsd", "optimizer.decay_ratio=0.9", "optimizer.warmup_ratio=0.2"), "at most 1"),
    (("optimizer.schedule=constant", "optimizer.min_lr_ratio=0.1"), "never falls"),
    (("trainer.validate_every=5", "trainer.early_stopping_patience=0"), "at least 1"),
    (("trainer.validate_every=5", "trainer.early_stopping_patience=2", "trainer.keep_best=false"), "keep_best"),
])
def test_schedules_and_early_stopping(composed: Callable[..., Config], overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(composed("+experiment=tiny", *overrides))
    validate(composed("+experiment=tiny", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.3",
                      "trainer.validate_every=5", "trainer.early_stopping_patience=2"))


def test_compiled_layers_need_whole_parameters(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=tiny", "trainer.compile=true", "engine.zero_stage=2")
    validate(config)
    config.engine.zero_stage = 3
    with pytest.raises(ConfigError, match="trainer.compile=true does not work with engine.zero_stage=3"):
        validate(config)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("algorithm", ["dflash", "eagle3", "mtp"])
def test_the_drafter_is_the_only_difference(composed: Callable[..., Config], experiment: str, algorithm: str) -> None:
    served = algorithm == "mtp" and composed(f"+experiment={experiment}").features.mode == "server"
    config = composed(f"+experiment={experiment}", f"drafter={algorithm}", *["features=cached"] * served)
    validate(config)
    assert config.drafter.algorithm == algorithm
    layers, last = config.target.feature_layers, config.target.shape.num_layers - 1
    if algorithm == "mtp":
        assert layers == [last]
    else:  # DeepSeek-V4's own drafters read its last layers; engines of other families cannot capture the last one
        assert (last in layers) == experiment.startswith("deepseek_v4")


@pytest.mark.parametrize("overrides, said", [
    (("drafter=mtp", "target.feature_layers=[1,4]"), r"it must be \[7\]"),
    (("drafter=eagle3", "target.feature_layers=[1,7]"), "without the last layer 7"),
    (("drafter=eagle3", "drafter.sample_from_anchor=false"), "must be true with drafter.algorithm=eagle3"),
    (("drafter=eagle3", "drafter.sliding_window=64"), "chooses its context itself"),
    (("drafter=eagle3", "drafter.head=vanilla"), "has no heads"),
    (("drafter=eagle3", "drafter.unroll=0"), "at least 1"), (("drafter.unroll=3",), "drafts a block in one pass"),
    (("drafter=mtp", "export.formats=[deepspec,speculators]"), "made of deepspec with"),
    (("drafter=eagle3", "export.formats=[specforge]"), "made of deepspec, speculators with"),
    (("objective.ce_labels=soft",), "data, target"),
    (("drafter=eagle3", "objective.implementation=triton"), "no kernel for objective.ce_labels=target"),
])
def test_what_autoregressive_drafters_cannot_be(composed: Callable[..., Config], overrides: tuple[str, ...],
                                                said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(composed("+experiment=tiny", *overrides))


def test_no_head_is_a_one_line_ablation(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=tiny")
    config.drafter.head = "none"
    validate(config)


@pytest.mark.parametrize("overrides", [
    ("+experiment=smollm2_135m", "budget=1h"), ("+experiment=tiny", "drafter.block_size=2"),
    ("+experiment=tiny", "drafter.sample_from_anchor=false"), ("+experiment=qwen3_8b", "drafter.block_size=5"),
])
def test_a_grid_for_longer_blocks_is_no_obstacle(composed: Callable[..., Config], overrides: tuple[str, ...]) -> None:
    validate(composed(*overrides))


def test_confidence_needs_held_out_prompts(composed: Callable[..., Config]) -> None:
    config = composed("+experiment=tiny", "data.min_held_out=0", "data.held_out_fraction=0")
    with pytest.raises(ConfigError, match="data.min_held_out=0.*reads held-out prompts"):
        validate(config)
    config.stages = ["prompts", "responses", "features", "train"]
    validate(config)
