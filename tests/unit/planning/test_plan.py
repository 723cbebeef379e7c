"""A plan needs nothing but options, and its numbers are those of the published checkpoints."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from deepspec.config import paths
from deepspec.config.schema import Config, SourceConfig
from deepspec.planning import memory, rows, samples, work
from deepspec.planning.plan import duration, make_plan, render, size
from deepspec.planning.sizes import count_parameters


@pytest.fixture
def qwen3_4b(composed: Callable[..., Config], tmp_path: Path) -> Config:
    config = composed("+experiment=qwen3_4b")
    config.run.dir, config.run.data_root = f"{tmp_path}/run", f"{tmp_path}/data"
    return config


def test_parameters_of_the_published_drafter(qwen3_4b: Config) -> None:
    counts = count_parameters(qwen3_4b)
    assert counts.trainable == 615_221_249 and counts.frozen == 777_912_320
    assert (counts.layers, counts.fc, counts.norms, counts.head, counts.confidence) == (
        504_654_080, 32_768_000, 5_120, 77_791_232, 2_817)


@pytest.mark.parametrize("change, part, value", [
    ({"head": "gated"}, "head", 77_791_232 + 256 * (2560 + 256) + 256),
    ({"head": "rnn"}, "head", 77_791_232 + 768 * (2560 + 512) + 768),
    ({"confidence_with_markov": False}, "confidence", 2_561), ({"head": "none"}, "head", 0),
    ({"head": "none"}, "confidence", 2_561),
])
def test_heads_are_counted(qwen3_4b: Config, change: dict[str, Any], part: str, value: int) -> None:
    qwen3_4b.drafter = replace(qwen3_4b.drafter, **change)
    assert getattr(count_parameters(qwen3_4b), part) == value


def test_counts_equal_a_built_drafter(composed: Callable[..., Config]) -> None:
    import torch

    from deepspec.drafters.registry import build_drafter, shape_from
    from deepspec.drafters.types import SharedWeights
    from deepspec.targets.spec import TargetSpec

    config = composed("+experiment=tiny")
    sizes = config.target.shape
    known = {name: value for name, value in vars(sizes).items() if name in TargetSpec.__dataclass_fields__}
    spec = TargetSpec(**known, rms_norm_eps=1e-6, rope_theta=1e4)
    matrix = torch.zeros(sizes.vocab_size, sizes.hidden_size)
    shape = shape_from(spec, config.target, config.drafter)
    model = build_drafter(shape, SharedWeights(matrix, matrix, ""))
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(config).trainable


def test_cache_bytes(qwen3_4b: Config) -> None:
    assert samples.cache_bytes_per_token(qwen3_4b) / 30_720 < 0.52, "the default"
    qwen3_4b.features.codec = "bf16"
    assert samples.cache_bytes_per_token(qwen3_4b) == 30_720
    load = work.workload(qwen3_4b, count_parameters(qwen3_4b))
    assert load.prompts == 1_300_000 and 0.9 < load.cache_bytes / (1_300_000 * 950 * 30_720) < 1.0
    qwen3_4b.features.codec = "lossless"
    assert "as lossless (assumed: 69% of bf16)" in render(make_plan(qwen3_4b))
    qwen3_4b.features.mode = "online"
    assert work.workload(qwen3_4b, count_parameters(qwen3_4b)).cache_bytes == 0


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8-e4m3", "lossless", "fp32"])
def test_cache_bytes_are_the_stores(qwen3_4b: Config, codec: str) -> None:
    from deepspec.data.feature_codec import layout

    qwen3_4b.features.codec = codec
    stored = layout(codec, tokens=803, label_rows=499, layers=5, width=2560).size
    planned = samples.cache_bytes_per_sample(qwen3_4b, samples.SampleLength(803, 500, ""))
    assert abs(planned - samples.RECORD_LINES - stored) < 64


def test_lengths_are_measured_where_responses_exist(qwen3_4b: Config) -> None:
    directory = paths.responses_dir(qwen3_4b)
    directory.mkdir(parents=True)
    rows = [{"turns": [{"prompt_ids": [1] * 10, "response_ids": [2] * 20},
                       {"prompt_ids": [1] * 35, "response_ids": [2] * 5}]}] * 3
    (directory / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = samples.expected_length(qwen3_4b)
    assert (length.tokens, length.answer) == (40, 25) and "mean of 3 rows" in length.source
    qwen3_4b.data.max_length = 30
    assert samples.measured_length(directory / "responses.jsonl", 30) == samples.SampleLength(
        30, 15, f"mean of 3 rows of {directory / 'responses.jsonl'}")
    (directory / "responses.jsonl").write_text("not json\n")
    assert samples.expected_length(qwen3_4b).source == "assumed"


def test_zero_divides_what_each_stage_divides() -> None:
    for ranks in (2, 4, 8):
        whole = memory.state_bytes(8_000_000, "bf16", 0, ranks)
        first, second, third = (memory.state_bytes(8_000_000, "bf16", stage, ranks) for stage in (1, 2, 3))
        assert whole == memory.StateBytes(0, ranks, 16_000_000, 32_000_000, 96_000_000)
        assert (first.optimizer, first.gradients) == (whole.optimizer // ranks, whole.gradients)
        assert (second.gradients, second.parameters) == (whole.gradients // ranks, whole.parameters)
        assert third.total == whole.total // ranks
    assert memory.state_bytes(1_000, "fp32", 0, 1).total == 16_000


def test_steps_follow_epochs_and_limit(qwen3_4b: Config) -> None:
    load = work.workload(qwen3_4b, count_parameters(qwen3_4b))
    assert load.samples_per_epoch == 1_235_000 and load.steps == 10 * 2_413
    qwen3_4b.trainer.max_steps = 100
    assert work.workload(qwen3_4b, count_parameters(qwen3_4b)).steps == 100


def test_packs_decide_memory_and_time(qwen3_4b: Config) -> None:
    counts, trainer = count_parameters(qwen3_4b), qwen3_4b.trainer
    trainer.num_anchors, trainer.global_batch_size = 128, 512
    trainer.pack_tokens = trainer.pack_anchors = None
    single = work.workload(qwen3_4b, counts)
    assert (single.packs.tokens, single.packs.anchors, single.packs.per_step) == (950, 128, 512)
    trainer.pack_tokens = 8192
    packed = work.workload(qwen3_4b, counts)
    # 8192 / 950 samples go together; 512 of them need 60 packs
    assert (packed.packs.tokens, packed.packs.anchors, packed.packs.per_step) == (8192, 1103, 60)
    one, many = (memory.step_bytes(qwen3_4b, counts, load.packs) for load in (single, packed))
    assert many.batch / one.batch == pytest.approx(8192 / 950) and many.activations > 8 * one.activations
    assert work.stage_flops(qwen3_4b, counts, packed) == work.stage_flops(qwen3_4b, counts, single)
    trainer.pack_anchors = 512  # now the blocks close a pack: 4 samples each
    closed = work.workload(qwen3_4b, counts).packs
    assert (closed.tokens, closed.anchors, closed.per_step) == (8192, 512, 128)
    trainer.pad_packs = True
    padded = work.workload(qwen3_4b, counts)
    assert padded.packs.padding_tokens == 128 * 8192 - 512 * 950 and padded.packs.padding_anchors == 0
    grown = work.stage_flops(qwen3_4b, counts, padded)["train"] / work.stage_flops(qwen3_4b, counts, packed)["train"]
    assert 1.0 < grown < 1.3
    assert padded.packs.text == "128 packs per rank and step, up to 8,192 tokens and 512 blocks each"


def test_ranks_share_the_packs(qwen3_4b: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    qwen3_4b.trainer.pack_tokens, qwen3_4b.trainer.pack_anchors = 4096, None
    assert work.workload(qwen3_4b, count_parameters(qwen3_4b)).packs.per_step == 15
    qwen3_4b.data.num_workers = 2  # two packs wait and one is being made, beside the one at work
    counts, load = count_parameters(qwen3_4b), work.workload(qwen3_4b, count_parameters(qwen3_4b))
    ahead = memory.step_bytes(qwen3_4b, counts, load.packs).batch
    qwen3_4b.data.num_workers = 0
    assert ahead == 4 * memory.step_bytes(qwen3_4b, counts, load.packs).batch


def test_rows_on_disk_beat_the_options(composed: Callable[..., Config], tmp_path: Path) -> None:
    config = composed("+experiment=tiny")
    config.run.data_root = str(tmp_path)
    directory = paths.prompts_dir(config)
    directory.mkdir(parents=True)
    (directory / "prompts.jsonl").write_text("{}\n" * 37)
    assert work.expected_prompts(config) == (37, f"lines of {directory / 'prompts.jsonl'}")


def test_files_with_fewer_rows_than_the_limit(composed: Callable[..., Config], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("+experiment=tiny", f"run.data_root={tmp_path}/data")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' * 39 + '\n{"prompt": "x"}')
    config.data.sources = [SourceConfig(name="own", kind="jsonl", path=str(path))]
    config.data.max_prompts = 100
    assert work.expected_prompts(config) == (40, "40 rows of data.sources[].path")
    config.data.max_prompts = 30
    assert work.expected_prompts(config) == (30, "data.max_prompts")
    config.data.max_prompts = None
    config.data.sources[0].cap = 25
    assert work.expected_prompts(config)[0] == 25
    config.data.sources[0].cap, config.data.max_prompts = None, 10_000
    monkeypatch.setattr(rows, "COUNTED_BYTES", 8)
    monkeypatch.setattr(rows, "SAMPLE_BYTES", 160)
    assert work.expected_prompts(config) == (40, "about 40 rows of data.sources[].path")
    config.data.sources.append(SourceConfig(name="more", kind="embedded", path="math"))
    assert work.expected_prompts(config) == (10_000, "data.max_prompts"), "an embedded source has no end"


def test_rows_of_parquet_files_are_in_their_footer(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, count in (("a", 3), ("b", 4)):
        parquet.write_table(pyarrow.table({"prompt": ["x"] * count}), tmp_path / f"{name}.parquet")
    source = SourceConfig(name="own", kind="parquet", path=str(tmp_path))
    assert rows.source_rows(source) == (7, True)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    assert rows.source_rows(source) is None


def test_a_plan_says_that_the_target_is_not_there(composed: Callable[..., Config], tmp_path: Path) -> None:
    config = composed("+experiment=qwen3_8b", f"run.data_root={tmp_path}")
    assert "is not a folder" not in render(make_plan(config))
    config.target.path = f"{tmp_path}/nowhere"
    assert f"refused: target.path='{tmp_path}/nowhere' is not a folder" in render(make_plan(config))
    config.target.path = str(tmp_path)
    assert "is not a folder" not in render(make_plan(config))


@pytest.mark.parametrize("experiment", ["qwen3_8b", "qwen3_14b", "qwen3_0_6b", "smollm2_135m", "tiny"])
def test_render_says_it_all(composed: Callable[..., Config], experiment: str, tmp_path: Path) -> None:
    text = render(make_plan(composed(f"+experiment={experiment}", f"run.data_root={tmp_path}")))
    for word in ("trainable", "ZeRO", "feature cache", "H200", "B200", "this CPU", "share of peak", "free", "train "):
        assert word in text
    assert text.endswith("\n") and max(map(len, text.splitlines())) < 200


def test_a_plan_says_what_the_job_would_be_refused_for(composed: Callable[..., Config], tmp_path: Path) -> None:
    def text(*extra: str) -> str:
        return render(make_plan(composed("+experiment=qwen3_8b", f"run.data_root={tmp_path}", *extra)))

    whole = "stages=[prompts,responses,features,train]"
    assert "features are not there" in text() and "once the features are made: needs 29.3 TB" in text()
    assert "TOO LITTLE" in text()[text().index("once the features"):]
    assert "responses are not there" in text("features=online") and "once the" not in text("features=online")
    assert "would be refused" not in text(whole) and "missing" not in text(whole)


def test_units() -> None:
    assert [size(value) for value in (5, 1_500, 38.4e12)] == ["5 B", "1.5 kB", "38.4 TB"]
    assert [duration(value) for value in (0.001, 0.5, 30, 24_000)] == ["4 s", "30 min", "30.0 h", "1,000 d"]


def test_planning_needs_no_torch() -> None:
    code = ("import sys; import deepspec.planning.preflight, deepspec.planning.plan, deepspec.planning.validate; "
            "print('torch' in sys.modules, 'transformers' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
