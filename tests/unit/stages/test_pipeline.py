"""A stage is up to date only while all that decides its result is unchanged."""

from pathlib import Path
from typing import Callable

import pytest

from deepspec import artifacts
from deepspec.config.compose import compose_config
from deepspec.config.schema import STAGES, BenchmarkConfig, Config, training_seed
from deepspec.errors import InputRefused, UserError
from deepspec.stages import pipeline
from deepspec.training.identity import require_same, start_hash


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return compose_config(["+experiment=tiny", f"run.dir={tmp_path}/run", f"run.data_root={tmp_path}/data"])


def set_mask_token(config: Config) -> None:
    config.target.mask_token_id = 5


def set_checkpoint(config: Config) -> None:
    config.export.checkpoint = "step-50"


def set_weights(config: Config) -> None:
    config.export.weights = "ema"


def set_average(config: Config) -> None:
    config.trainer.ema_decay = 0.99


AFTER_TRAINING = ("confidence", "calibrate", "profile", "evaluate", "export")


@pytest.mark.parametrize("change, stages", [
    (set_mask_token, ("train",)), (set_average, ("train",)), (set_checkpoint, AFTER_TRAINING),
    (set_weights, AFTER_TRAINING),
])
def test_options_that_decide_a_stage(config: Config, change: Callable[[Config], None], stages: tuple[str, ...]) -> None:
    before = {stage: pipeline.fingerprint(config, stage) for stage in stages}
    change(config)
    assert all(pipeline.fingerprint(config, stage) != before[stage] for stage in stages)


def test_a_seed_of_training_alone_leaves_prompts_answers_and_features(config: Config) -> None:
    before = {stage: pipeline.decided_by(config, stage) for stage in STAGES}
    config.trainer.seed = config.run.seed
    assert {stage: pipeline.decided_by(config, stage) for stage in STAGES} == before, "the same training by name"
    config.trainer.seed = 1
    changed = [stage for stage in STAGES if pipeline.decided_by(config, stage) != before[stage]]
    assert changed == ["train"], "later stages follow from the weights"
    assert training_seed(config) == 1
    config.run.seed = 7
    assert pipeline.decided_by(config, "prompts") != before["prompts"] and training_seed(config) == 1


def test_an_edited_benchmark_is_evaluated_again(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "a"}\n')
    config.evaluate.benchmarks = [BenchmarkConfig("b", str(path))]
    before = pipeline.fingerprint(config, "evaluate")
    assert pipeline.fingerprint(config, "evaluate") == before
    path.write_text('{"prompt": "b"}\n')
    assert pipeline.fingerprint(config, "evaluate") != before


def test_an_edited_chat_template_is_another_target_and_a_moved_one_is_not(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_text("one")
    config.target.chat_template = str(path)
    before = pipeline.responses_dir(config)
    path.write_text("two")
    assert pipeline.responses_dir(config) != before
    moved = tmp_path / "b.jinja"
    moved.write_text("one")
    config.target.chat_template = str(moved)
    assert pipeline.responses_dir(config) == before


def test_other_first_weights_are_another_training(config: Config, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    config.drafter.init_from = str(tmp_path)
    before, first = pipeline.fingerprint(config, "train"), start_hash(str(tmp_path))
    weights.write_bytes(b"two")
    assert pipeline.fingerprint(config, "train") != before
    assert start_hash(str(tmp_path)) != first and start_hash(None) is None


def test_a_stage_whose_file_is_gone_runs_again(config: Config) -> None:
    directory = pipeline.run_dir(config) / "export"
    manifest = artifacts.begin(directory, "export", "f")
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    artifacts.complete(directory, manifest, ["config.json", "model.safetensors"])
    artifacts.atomic_write_json(pipeline.run_dir(config) / pipeline.RUN_MANIFEST, {"stages": {"export": {
        "status": "complete", "fingerprint": pipeline.fingerprint(config, "export"),
        "outputs": pipeline.output_hashes(config, "export")}}})
    assert pipeline.up_to_date(config, "export")
    (directory / "model.safetensors").unlink()
    assert not pipeline.up_to_date(config, "export")


def test_a_target_saved_again_in_its_folder_is_looked_at_again(config: Config, tmp_path: Path) -> None:
    config.target.source, config.target.path = "hf", str(tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    before = pipeline.fingerprint(config, "train")
    weights.write_bytes(b"other")
    assert pipeline.fingerprint(config, "train") != before


def test_a_finished_run_is_not_taken_for_a_warm_started_one() -> None:
    with pytest.raises(InputRefused, match="start.warm_start: False in the checkpoint, True now"):
        require_same({"start.warm_start": False}, {"start.warm_start": True}, Path("step-1"))
    require_same({}, {"start.warm_start": True}, Path("step-1"))  # written before this was recorded


def test_another_best_checkpoint_is_another_result_of_training(config: Config) -> None:
    folder = Path(config.run.dir) / "checkpoints"
    (folder / "step-4").mkdir(parents=True)
    (folder / "step-4/manifest.json").write_text("{}")
    (folder / "latest").write_text("step-4\n")
    before = pipeline.fingerprint(config, "evaluate")
    (folder / "best").write_text("step-4\n")
    after = pipeline.fingerprint(config, "evaluate")
    (folder / "best").write_text("step-2\n")
    assert len({before, after, pipeline.fingerprint(config, "evaluate")}) == 3


def test_validations_decide_training_only_where_they_may_end_it(config: Config) -> None:
    without = pipeline.fingerprint(config, "train")
    config.trainer.validate_every += 3
    assert pipeline.fingerprint(config, "train") == without
    config.trainer.early_stopping_patience = 2
    before = pipeline.fingerprint(config, "train")
    config.trainer.validate_every += 3
    assert len({without, before, pipeline.fingerprint(config, "train")}) == 3


def test_another_evaluation_is_simulated_again(config: Config) -> None:
    """The simulation stands beside the evaluation's figures."""
    before = pipeline.fingerprint(config, "simulate")
    artifacts.atomic_write_json(pipeline.run_dir(config) / "evaluation.json", {"settings": {}})
    assert pipeline.fingerprint(config, "simulate") != before


def test_without_confidence_records_the_temperature_decides_the_simulation(config: Config) -> None:
    config.drafter.confidence_head = False
    before = pipeline.fingerprint(config, "simulate")
    config.confidence.temperature = 0.5
    assert pipeline.fingerprint(config, "simulate") != before


def test_a_full_disk_does_not_hide_the_first_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(config: Config, stage: str, **values: object) -> None:
        if values["status"] == "failed":
            raise OSError(28, "No space left on device")

    def fail(config: Config) -> None:
        raise UserError("Could not save step-7")

    monkeypatch.setattr(pipeline, "_record", record)
    monkeypatch.setattr(pipeline, "fingerprint", lambda config, stage: "")
    monkeypatch.setattr("deepspec.stages.report.run", fail)
    with pytest.raises(UserError, match="Could not save step-7"):
        pipeline._run_stage(config, "report", forced=True)


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff\xfe", b"{}", b'{"stages": []}',
                                     b'{"stages": {"train": 3}}'])
def test_a_damaged_manifest_of_a_run_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputRefused, match=r"manifest\.json is .*Delete that file and run again"):
        pipeline.read_run(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"status": "complete"}'])
def test_a_record_without_its_facts_is_not_up_to_date(config: Config, content: str) -> None:
    path = Path(config.run.dir)
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text('{"stages": {"report": %s}}' % content)
    assert not pipeline.up_to_date(config, "report")
