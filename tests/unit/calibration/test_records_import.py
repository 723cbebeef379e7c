"""Records of engines in service: three formats, what they must say, and what is refused by name; drift from them."""

import json
import types
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspec.calibration import Calibration, ConfidenceRecords, Fold, RecordsOrigin, calibrate, sigmoid
from deepspec.calibration.drift import drift_report, lines
from deepspec.calibration.imports import FORMAT, load_records, record_files, save_lines
from deepspec.config.schema import CalibrationConfig, Config
from deepspec.errors import InputRefused
from deepspec.planning import preflight
from deepspec.planning.preflight import required
from deepspec.stages import calibrate as stage, pipeline

SHA = "d" * 64
LENGTH = 4
EXPECTED = {"block_length": LENGTH, "drafter_sha256": SHA, "sampling_temperature": 1.0, "thinking": False,
            "confidence_head": "joint"}


def records_of(scale=1.0, shift=0.0, blocks=8000, seed=0, conversations=80, temperature=1.0, **origin):
    """Blocks whose token k survives with probability sigmoid(z / scale + shift)."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 1.5, size=(blocks, LENGTH)).astype(np.float32)
    kept = random.random((blocks, LENGTH)) < sigmoid(logits / scale + shift)
    names = np.array([f"c{seed}-{i % conversations:04d}" for i in range(blocks)])
    made = RecordsOrigin(LENGTH, SHA, temperature, (1.0,) * LENGTH, thinking=False, **origin)
    return ConfidenceRecords(made, logits, np.cumprod(kept, axis=1).sum(axis=1), np.full(blocks, LENGTH),
                             np.full((blocks, LENGTH), np.nan, np.float32), names, np.full(blocks, "chat"))


def write_shards(folder: Path, records: ConfidenceRecords, count: int = 3, stem: str = "sts") -> Path:
    """As SGLang 0.5.23 writes them: STEM.NUMBER.pt with float32 logits and prefix_mask."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(records)), count)):
        mask = (np.arange(LENGTH) < records.accepted[rows][:, None]).astype(np.float32)
        torch.save({"logits": torch.from_numpy(records.logits[rows]), "prefix_mask": torch.from_numpy(mask)},
                   folder / f"{stem}.{number}.pt")
    return folder


def test_lines_and_npz_come_back_as_they_were(tmp_path):
    records = records_of(blocks=50)
    save_lines(tmp_path / "r.jsonl", records)
    records.save(tmp_path / "r.npz")
    for name in ("r.jsonl", "r.npz"):
        loaded = load_records(tmp_path / name, EXPECTED)
        for column in ("logits", "accepted", "drafted", "conversation", "domain"):
            assert (getattr(loaded, column) == getattr(records, column)).all(), (name, column)
        assert loaded.origin.drafter_sha256 == SHA and loaded.origin.thinking is False


@pytest.mark.parametrize("field, value, reason", [
    ("verification", "scheduled", "a scheduler chose"), ("temperatures", [1.0, 1.2, 1.0, 1.0], "applied"),
    ("drafter_sha256", "e" * 64, "another drafter"), ("sampling_temperature", 0.6, "other settings"),
    ("thinking", True, "other settings"), ("confidence_head", "refit", "other settings"),
])
@pytest.mark.parametrize("name", ["r.jsonl", "r.npz"])
def test_records_that_would_bias_the_fit_are_refused_by_name(tmp_path, field, value, reason, name):
    records = records_of(blocks=40)
    origin = replace(records.origin, **{field: tuple(value) if isinstance(value, list) else value})
    made = replace(records, origin=origin)
    made.save(tmp_path / name) if name.endswith("npz") else save_lines(tmp_path / name, made)
    with pytest.raises(InputRefused, match=f"{field} is .*{reason}"):
        load_records(tmp_path / name, EXPECTED)


def test_another_block_length_is_refused(tmp_path):
    save_lines(tmp_path / "r.jsonl", records_of(blocks=40))
    with pytest.raises(InputRefused, match="block_length is 4, needed is 7"):
        load_records(tmp_path / "r.jsonl", EXPECTED | {"block_length": 7})


def test_drafts_cut_by_a_scheduler_show_even_if_the_file_says_full(tmp_path):
    records = records_of(blocks=400)
    cut = np.where(sigmoid(records.logits[:, 0]) < 0.6, 1, LENGTH)
    save_lines(tmp_path / "r.jsonl", replace(records, drafted=cut, accepted=np.minimum(records.accepted, cut)))
    with pytest.raises(InputRefused, match="drafted is below 4 in .* a scheduler shortened"):
        load_records(tmp_path / "r.jsonl", EXPECTED)


def test_logits_of_a_folded_head_are_unfolded(tmp_path):
    records, fold = records_of(blocks=60), Fold(2.0, -0.5)
    served = replace(records, logits=fold.apply(records.logits).astype(np.float32),
                     origin=replace(records.origin, fold=(2.0, -0.5), source="vllm"))
    served.save(tmp_path / "r.npz")
    save_lines(tmp_path / "r.jsonl", served)
    for name in ("r.npz", "r.jsonl"):
        loaded = load_records(tmp_path / name, EXPECTED)
        assert np.abs(loaded.logits - records.logits).max() < 1e-5 and loaded.origin.fold == (1.0, 0.0)
    with pytest.raises(InputRefused, match=r"fold is \(2.0, -0.5\)"):
        ConfidenceRecords.load(tmp_path / "r.npz")


def test_shards_of_sglang(tmp_path, caplog):
    records = records_of(blocks=3000, temperature=0.0)
    folder = write_shards(tmp_path / "shards", records, count=12)
    loaded = load_records(folder, EXPECTED | {"sampling_temperature": 0.0})
    assert (loaded.logits == records.logits).all() and (loaded.accepted == records.accepted).all()  # 10 and 11 last
    assert loaded.origin.source == "sglang" and "drafter_sha256" in caplog.text and "no conversations" in caplog.text
    sizes = np.unique(loaded.conversation, return_counts=True)[1]
    assert len(sizes) > 40 and sizes.max() == 64
    assert len(load_records(folder / "sts.0.pt", EXPECTED | {"sampling_temperature": 0.0})) == 250


def test_shards_judge_greedily_and_say_so(tmp_path):
    folder = write_shards(tmp_path / "shards", records_of(blocks=200))
    with pytest.raises(InputRefused, match="sampling_temperature is 0.0, needed is 1.0.*most likely"):
        load_records(folder, EXPECTED)


def test_origin_beside_the_shards_is_held_against_the_run(tmp_path):
    folder = write_shards(tmp_path / "shards", records_of(blocks=200))
    (folder / "origin.json").write_text(json.dumps({"drafter_sha256": "e" * 64}))
    with pytest.raises(InputRefused, match="drafter_sha256 is 'eeee"):
        load_records(folder, EXPECTED | {"sampling_temperature": 0.0})


@pytest.mark.parametrize("spoil, message", [
    (lambda f: (f / "sts.0.pt").write_bytes(b"torn"), "is not a shard"),
    (lambda f: torch.save({"logits": torch.zeros(3, 5), "prefix_mask": torch.zeros(3, 5)}, f / "sts.1.pt"),
     "sts.1.pt has blocks of 5 draft tokens, the shards before it of 4"),
    (lambda f: torch.save({"logits": torch.zeros(1, 4), "prefix_mask": torch.tensor([[1.0, 0, 1, 0]])}, f / "sts.1.pt"),
     "behind a rejected one"),
    (lambda f: torch.save({"logits": torch.zeros(3, 4)}, f / "sts.1.pt"), "is not a shard"),
    (lambda f: torch.save({"logits": torch.full((3, 4), float("nan")), "prefix_mask": torch.zeros(3, 4)},
                          f / "sts.1.pt"), r"sts.1.pt: logits of block 0 are not finite \(3 of 3"),
    (lambda f: torch.save({"logits": torch.zeros(2, 4), "prefix_mask": torch.full((2, 4), 0.5)}, f / "sts.1.pt"),
     "other than 0 and 1"),
    (lambda f: torch.save({"logits": torch.zeros(4), "prefix_mask": torch.zeros(4)}, f / "sts.2.pt"), "equal tables"),
    (lambda f: [torch.save({"logits": torch.zeros(0, 4), "prefix_mask": torch.zeros(0, 4)}, f / f"sts.{n}.pt")
                for n in range(3)], "no block in them"),
    (lambda f: (f / "origin.json").write_text("{"), "not JSON"),
    (lambda f: (f / "origin.json").write_text("[]"), "not a JSON object"),
    (lambda f: (f / "origin.json").write_text('{"fold": [0, 0]}'), "temperature above 0"),
])
def test_broken_shards_are_refused(tmp_path, spoil, message):
    folder = write_shards(tmp_path / "shards", records_of(blocks=200))
    spoil(folder)
    with pytest.raises(InputRefused, match=message):
        load_records(folder, EXPECTED | {"sampling_temperature": 0.0})


def test_the_shard_a_server_was_writing_when_it_ended_is_left_out(tmp_path, caplog):
    folder = write_shards(tmp_path / "shards", records_of(blocks=300))
    write_shards(folder, records_of(blocks=300, seed=1), stem="other")
    whole = (folder / "sts.2.pt").read_bytes()
    (folder / "sts.2.pt").write_bytes(whole[:len(whole) // 2])
    assert len(load_records(folder, EXPECTED | {"sampling_temperature": 0.0})) == 500
    assert "sts.2.pt is torn and left out" in caplog.text
    (folder / "other.1.pt").write_bytes(b"")  # not the last of its server: not explained by an end
    with pytest.raises(InputRefused, match="other.1.pt is not a shard.*move it away"):
        load_records(folder, EXPECTED | {"sampling_temperature": 0.0})


def test_shards_by_the_stem_that_the_server_was_given(tmp_path):
    folder = write_shards(tmp_path / "shards", records_of(blocks=300))
    write_shards(folder, records_of(blocks=90, seed=1), stem="other")
    loaded = load_records(folder / "sts", EXPECTED | {"sampling_temperature": 0.0})
    assert len(loaded) == 300
    assert [path.name for path in record_files(folder / "sts")] == ["sts.0.pt", "sts.1.pt", "sts.2.pt"]
    (folder / "origin.json").write_text("{}")
    assert record_files(folder / "other")[-1].name == "origin.json" and len(record_files(folder)) == 7
    assert not record_files(folder / "st") and not record_files(tmp_path / "absent" / "sts")


def test_a_shard_that_would_run_code_is_not_unpickled(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    torch.save({"logits": types.SimpleNamespace(), "prefix_mask": torch.zeros(1, 4)}, folder / "sts.0.pt")
    with pytest.raises(InputRefused, match="is not a shard"):
        load_records(folder, EXPECTED)


@pytest.mark.parametrize("line, message", [
    ('{"logits": [1, 2], "accepted": 0}', ":2: logits must be 4"),
    ('{"logits": [1, 2, 3, 4], "accepted": 5}', ":2: accepted=5"),
    ('{"logits": [1, 2, 3, "x"], "accepted": 1}', "must be numbers"), ('[1]\n{}', ":2 is not JSON"),
    ('{"logits": [1, 2, 3, 4], "accepted": 3, "drafted": 2}', "drafted=2"), ("", "no block"),
])
def test_broken_lines_are_refused_with_their_number(tmp_path, line, message):
    header = json.dumps({"format": FORMAT} | asdict(records_of(blocks=1).origin))
    path = tmp_path / "r.jsonl"
    path.write_text(header + "\n" + line)
    with pytest.raises(InputRefused, match=message):
        load_records(path, EXPECTED)


def test_a_torn_last_line_and_an_unknown_file(tmp_path, caplog):
    save_lines(tmp_path / "r.jsonl", records_of(blocks=20))
    text = (tmp_path / "r.jsonl").read_text()
    (tmp_path / "r.jsonl").write_text(text[:-30])
    assert len(load_records(tmp_path / "r.jsonl", EXPECTED)) == 19 and "torn" in caplog.text
    for name, message in (("r.csv", "no file of confidence records"), ("empty", "has no shard")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(InputRefused, match=message):
            load_records(tmp_path / name, EXPECTED)


@pytest.fixture(scope="module")
def before() -> Calibration:
    return calibrate(records_of(scale=2.0, seed=1), CalibrationConfig(bootstrap=50), refit_fraction=0.0)


@pytest.mark.parametrize("now, action", [
    ({"scale": 2.0, "seed": 2}, "none"), ({"scale": 0.6, "seed": 3}, "recalibrate"),
    ({"scale": 2.0, "shift": -1.0, "seed": 4}, "train"),
])
def test_drift_says_what_to_do(before, now, action):
    report = drift_report(before, records_of(**now), draws=200)
    assert report["verdict"]["action"] == action, report["verdict"]
    assert report["blocks"] == 8000 and len(report["positions"]) == LENGTH and action in lines(report)[-1]
    json.dumps(report)


def test_change_of_acceptance_counts_the_noise_of_both_sides(before):
    old, new = records_of(scale=2.0, seed=1), records_of(scale=2.0, seed=5)
    alone = drift_report(before, new, draws=400)["accepted_per_block"]["change_ci95"]
    both = drift_report(before, new, reference=old, draws=400)["accepted_per_block"]["change_ci95"]
    assert both[1] - both[0] > 1.15 * (alone[1] - alone[0]) and both[0] < 0 < both[1]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Config:
    config = Config()
    config.run.dir, config.target.thinking, config.drafter.block_size = str(tmp_path), False, LENGTH
    config.calibration.bootstrap = 20
    monkeypatch.setattr(stage, "chosen_checkpoint", lambda config: Path("step-1"))
    monkeypatch.setattr(stage, "drafter_sha256", lambda checkpoint, weights: SHA)
    (tmp_path / "confidence").mkdir()
    records_of(scale=2.0, seed=1).save(tmp_path / "confidence" / "records.npz")
    config.confidence.refit = False
    stage.run(config)
    return config


def test_stage_reports_drift_and_recalibrates_on_service(run, tmp_path, caplog):
    first = Calibration.load(tmp_path / "calibration.json")
    save_lines(tmp_path / "service.jsonl", records_of(scale=0.6, seed=3, source="vllm"))
    run.calibration.records = str(tmp_path / "service.jsonl")
    run.calibration.recalibrate = False
    with caplog.at_level("INFO"):
        stage.run(run)
    drift = json.loads((tmp_path / "drift.json").read_text())
    assert drift["verdict"]["action"] == "recalibrate" and drift["source"] == "vllm"
    assert Calibration.load(tmp_path / "calibration.json") == first
    run.calibration.recalibrate = True
    stage.run(run)
    second = Calibration.load(tmp_path / "calibration.json")
    assert second.source == "vllm" and second.temperatures[0] < 0.8 < first.temperatures[0]
    stage.run(run)  # against the new one there is nothing left to do
    assert json.loads((tmp_path / "drift.json").read_text())["verdict"]["action"] == "none"


def test_another_sampling_temperature_is_no_drift(run, tmp_path, caplog):
    greedy = write_shards(tmp_path / "shards", records_of(scale=2.0, seed=7))
    run.calibration.records, run.confidence.temperature = str(greedy), 0.0
    run.calibration.recalibrate = False
    with pytest.raises(InputRefused, match="sampling temperature 1, and these records are of 0.*fit_confidence.py"):
        stage.run(run)
    assert not (tmp_path / "drift.json").exists()
    run.calibration.recalibrate = True
    stage.run(run)  # a calibration of greedy decoding, for want of one before
    assert "no drift report" in caplog.text and not (tmp_path / "drift.json").exists()
    assert Calibration.load(tmp_path / "calibration.json").sampling_temperature == 0.0
    write_shards(greedy, records_of(scale=0.3, seed=8))
    stage.run(run)
    drift = json.loads((tmp_path / "drift.json").read_text())
    assert drift["verdict"]["action"] == "recalibrate" and drift["excess"] > 2 * drift["excess_reference"]
    assert f"after {drift['excess_reference']:.4f} when they were fitted" in drift["verdict"]["reason"]


def test_a_look_at_drift_is_never_up_to_date(tmp_path, monkeypatch):
    config = Config()
    config.run.dir = str(tmp_path)
    config.calibration.records = str(write_shards(tmp_path / "shards", records_of(blocks=60)))
    (tmp_path / "calibration.json").write_text("{}")
    monkeypatch.setattr(pipeline, "fingerprint", lambda config, name: "same")
    pipeline._record(config, "calibrate", status="complete", fingerprint="same",
                     outputs=pipeline.output_hashes(config, "calibrate"))
    assert pipeline.up_to_date(config, "calibrate")
    config.calibration.recalibrate = False
    assert not pipeline.up_to_date(config, "calibrate")


def test_records_for_another_temperature_are_another_input(tmp_path):
    config = Config()
    config.calibration.records = str(write_shards(tmp_path / "shards", records_of(blocks=60)))
    before = pipeline.decided_by(config, "calibrate")
    config.confidence.temperature = 0.0
    assert pipeline.decided_by(config, "calibrate") != before


def test_records_of_the_head_that_is_not_in_use_are_refused(run, tmp_path):
    from deepspec.artifacts import begin, complete

    manifest = begin(tmp_path / "confidence", "confidence", "f", facts={"drafter_sha256": SHA, "chosen": "refit"})
    complete(tmp_path / "confidence", manifest, ["records.npz"])
    with pytest.raises(InputRefused, match="confidence_head is 'joint', needed is 'refit'"):
        stage.run(run)


def test_records_of_service_need_no_records_of_the_run():
    config = Config()
    assert required(config, "calibrate") == ("confidence",)
    config.calibration.records = "somewhere.npz"
    assert required(config, "calibrate") == ("train",)


def test_missing_files_are_found_before_anything_starts(tmp_path):
    config = Config()
    config.calibration.records = config.confidence.prompts = str(tmp_path / "absent.jsonl")
    for name, key in (("calibrate", "calibration.records"), ("confidence", "confidence.prompts")):
        with pytest.raises(InputRefused, match=key):
            preflight._records(config, [name])
        preflight._records(config, ["train"])
    (tmp_path / "absent.jsonl").write_text("{}")
    preflight._records(config, ["confidence", "calibrate"])


def test_edited_records_are_another_input(tmp_path):
    config = Config()
    before = pipeline.decided_by(config, "calibrate")
    config.calibration.records = str(write_shards(tmp_path / "shards", records_of(blocks=60)))
    first = pipeline.decided_by(config, "calibrate")
    write_shards(tmp_path / "shards", records_of(blocks=60, seed=1))
    assert before != first != pipeline.decided_by(config, "calibrate")
    config.calibration.method = "beta"
    assert pipeline.decided_by(config, "confidence") == pipeline.decided_by(Config(), "confidence")
