"""Training on stores that were there before the run: imported from each format, or made elsewhere."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "data"))

from foreign_caches import IDS, MAKERS, Row, make_rows  # noqa: E402
from tiny_data import MASK  # noqa: E402
from tiny_data import save_target  # noqa: E402
from tiny_data import ROWS as VOCABULARY  # noqa: E402
from tiny_training import tiny_config  # noqa: E402

from deepspec.artifacts import read_manifest, sha256_file  # noqa: E402
from deepspec.config.paths import features_dir, responses_dir  # noqa: E402
from deepspec.config.schema import Config, TargetConfig, TargetShape  # noqa: E402
from deepspec.config.schema_evaluation import BenchmarkConfig  # noqa: E402
from deepspec.data.features.__main__ import main  # noqa: E402
from deepspec.data.samples import load_samples  # noqa: E402
from deepspec.data.subset import Subset  # noqa: E402
from deepspec.errors import InputRefused  # noqa: E402
from deepspec.planning.preflight import required  # noqa: E402
from deepspec.planning.preflight_features import check_given_prompts, check_given_store  # noqa: E402
from deepspec.planning.samples import expected_length  # noqa: E402
from deepspec.planning.sizes import count_parameters  # noqa: E402
from deepspec.planning.work import expected_prompts, workload  # noqa: E402
from deepspec.stages import features, train  # noqa: E402
from deepspec.stages.confidence import held_out_requests  # noqa: E402
from deepspec.stages.feature_sources import Data, load_data  # noqa: E402
from deepspec.targets.load import load_target  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def run_config(root: Path, folder: Path, store: Optional[Path], **trainer: Any) -> Config:
    config = tiny_config(root / "run", **({"max_steps": 4, "micro_batch_size": 1} | trainer))
    config.run.data_root = str(root / "data")
    config.target = TargetConfig(
        name="tiny", path=str(folder), dtype="float32", feature_layers=[0, 2], mask_token_id=MASK,
        shape=TargetShape("qwen3", 64, 96, 4, 4, 2, 16, VOCABULARY))
    config.features.path, config.features.held_out_fraction = None if store is None else str(store), 0.3
    config.data.max_length = 64
    return config


@pytest.fixture(scope="module")
def rows(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    config = run_config(tmp_path_factory.mktemp("rows"), folder, None)
    return make_rows(load_target(config.target, device="cpu", cache_dir=folder), 20)


def imported(kind: str, root: Path, rows: list[Row], folder: Optional[Path], held_out: str = "0") -> Path:
    known = ["--target", str(folder), "--dtype", "float32"] if folder else []
    source = MAKERS[kind](root / "cache", rows)
    assert main(["import", kind, str(source), str(root / "store"), *IDS[kind], *known, "--held-out", held_out]) == 0
    return root / "store"


def steps(config: Config) -> list[int]:
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("kind", MAKERS)
def test_imports_train_and_resume(tmp_path: Path, rows: list[Row], folder: Path, kind: str,
                                  caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = imported(kind, tmp_path, rows, folder)
    before = {path.name: path.stat().st_mtime_ns for path in store.iterdir() if path.is_file()}
    config = run_config(tmp_path, folder, store, max_steps=2)
    features.run(config)
    assert f"those in {store} are used as they are" in caplog.text
    train.run(config)
    assert steps(config) == [1, 2]
    assert f"was imported from a cache of {kind}" in caplog.text and "neither can be compared" in caplog.text
    assert "19 are held out now, by the hash of their ids" in caplog.text
    assert (tmp_path / "run" / "validation.jsonl").read_text()
    config.trainer.max_steps = 4
    train.run(config)
    assert steps(config) == [1, 2, 3, 4], "continued, not begun again"
    assert {path.name: path.stat().st_mtime_ns for path in store.iterdir() if path.is_file()} == before


def loaded(config: Config, folder: Path) -> Data:
    return load_data(config, load_target(config.target, device="cpu", cache_dir=folder))


def test_longer_samples_than_the_run_makes_are_told(tmp_path: Path, rows: list[Row], folder: Path,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(tmp_path, folder, imported("deepspec", tmp_path, rows, folder))
    loaded(config, folder)
    assert "does not cut" not in caplog.text
    config.data.max_length = 20
    loaded(config, folder)
    assert "samples of up to 29 tokens, which data.max_length=20 does not cut" in caplog.text


def test_the_split_is_the_stores_own_or_made_by_id(tmp_path: Path, rows: list[Row], folder: Path) -> None:
    own = imported("deepspec", tmp_path, rows, folder, held_out="0.3")
    (tmp_path / "other").mkdir()
    none = imported("deepspec", tmp_path / "other", rows, folder, held_out="0")
    theirs, ours = (loaded(run_config(tmp_path, folder, store), folder) for store in (own, none))
    assert isinstance(ours.train, Subset) and not isinstance(theirs.train, Subset)
    for left, right in ((theirs.train, ours.train), (theirs.held_out, ours.held_out)):
        assert [info.sample_id for info in left.samples] == [info.sample_id for info in right.samples]
        assert len(left) > 0
        got = [(item.sample.sample_id, item.sample.input_ids.tolist()) for item in right.get(range(len(right)))]
        assert got == [(item.sample.sample_id, item.sample.input_ids.tolist()) for item in left.get(range(len(left)))]
        assert [int(item.loss_mask.sum()) for item in right.documents] == [
            int(item.loss_mask.sum()) for item in left.documents]
    assert ours.fingerprint != theirs.fingerprint
    everything = run_config(tmp_path, folder, none)
    everything.features.held_out_fraction = 0.0
    assert len(loaded(everything, folder).train) == 19 and len(loaded(everything, folder).held_out) == 0


def test_held_out_samples_serve_the_stages_that_read_prompts(tmp_path: Path, rows: list[Row], folder: Path) -> None:
    config = run_config(tmp_path, folder, imported("speculators", tmp_path, rows, folder, held_out="0.3"))
    config.stages = ["train", "confidence"]
    held_out = loaded(config, folder).held_out
    known = {item.sample.sample_id: item.sample for item in held_out.get(range(len(held_out)))}
    made = load_samples(responses_dir(config), "held_out", 64)
    assert {item.sample_id for item in made} == known.keys()
    for item in made:
        assert torch.equal(item.input_ids, known[item.sample_id].input_ids)
        assert torch.equal(item.loss_mask, known[item.sample_id].loss_mask)
    requests = held_out_requests(config, None)
    assert {request.prompt_ids for request in requests} == {tuple(item.input_ids[:4].tolist()) for item in made}
    config.evaluate.benchmarks = [BenchmarkConfig(name="own", path="held_out")]
    with pytest.raises(InputRefused, match="has only token ids"):
        check_given_prompts(config, ["train", "evaluate"])
    config.stages = ["responses", "train"]
    check_given_prompts(config, ["train", "evaluate"])
    assert responses_dir(config) != features_dir(config) / "responses", "nothing is written into a store that is given"


def test_the_plan_counts_the_store(tmp_path: Path, rows: list[Row], folder: Path) -> None:
    config = run_config(tmp_path, folder, imported("deepspec", tmp_path, rows, folder))
    assert expected_prompts(config) == (19, f"samples of {tmp_path / 'store'}")
    length = expected_length(config)
    kept = [row for index, row in enumerate(rows) if index != 4]
    assert length.tokens == pytest.approx(sum(len(row.ids) for row in kept) / 19)
    assert length.answer == pytest.approx(sum(int(row.mask.sum()) for row in kept) / 19)
    load = workload(config, count_parameters(config))
    assert load.cache_bytes == 0 and load.samples_per_epoch == 13  # 19 less features.held_out_fraction


def test_another_target_is_refused_and_an_unknown_one_needs_trust(tmp_path: Path, rows: list[Row],
                                                                  folder: Path) -> None:
    store = imported("deepspec", tmp_path, rows, folder)
    other = save_target(tmp_path / "other-target", seed=1)
    with pytest.raises(InputRefused, match="target_fingerprint"):
        loaded(run_config(tmp_path, other, store), other)
    (tmp_path / "blind").mkdir()
    blind = run_config(tmp_path, folder, imported("deepspec", tmp_path / "blind", rows, None))
    with pytest.raises(InputRefused, match="without looking at any target.*--target FOLDER"):
        loaded(blind, folder)
    blind.features.allow = ["target_fingerprint"]
    assert len(loaded(blind, folder).train) > 0


def test_looked_at_before_anything_starts(tmp_path: Path, rows: list[Row], folder: Path) -> None:
    store = imported("deepspec", tmp_path, rows, folder)
    config = run_config(tmp_path, folder, store)
    config.drafter.confidence_head = True
    check_given_store(config, ["train"])
    assert features_dir(config) == store
    assert required(config, "features") == () and required(config, "train") == ("features",)
    assert required(config, "confidence") == ("train", "responses")
    for change, message in (
        ({"path": str(tmp_path)}, "is not a feature store. A cache of DeepSpec.*features import FORMAT"),
    ):
        wrong = replace(config, features=replace(config.features, **change))
        with pytest.raises(InputRefused, match=message):
            check_given_store(wrong, ["features", "train"])
    config.target.feature_layers = [0, 1]
    with pytest.raises(InputRefused, match=r"layers \[0, 2\], but target.feature_layers=\[0, 1\]"):
        check_given_store(config, ["train"])
    manifest = store / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "incomplete"}))
    assert read_manifest(store).status == "incomplete"
    with pytest.raises(InputRefused, match="is unfinished"):
        check_given_store(config, ["train"])


def kept(store: Path, split: str, becomes: str) -> None:
    """Leave the first two samples of ``split`` in an index, as of the split ``becomes``."""
    rows = [json.loads(line) for line in (store / "index.jsonl").read_text().splitlines()]
    rows = [row | {"split": becomes} for row in rows if row["split"] == split][:2]
    (store / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["files"]["index.jsonl"] = sha256_file(store / "index.jsonl")
    (store / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("becomes, fraction, said", [
    ("held_out", 0.3, "has no samples to train on, 2 are held out there"),
    ("train", 0.999999, "holds out all 2 samples with features.held_out_fraction=0.999999. Lower it"),
])
def test_a_store_without_training_samples_is_refused(tmp_path: Path, rows: list[Row], folder: Path, becomes: str,
                                                     fraction: float, said: str) -> None:
    store = imported("deepspec", tmp_path, rows, folder)
    kept(store, "train", becomes)
    config = run_config(tmp_path, folder, store)
    config.features.held_out_fraction = fraction
    with pytest.raises(InputRefused, match=said):
        train.run(config)


def test_advice_about_a_given_store_never_says_to_delete_it(tmp_path: Path, rows: list[Row], folder: Path) -> None:
    store = imported("deepspec", tmp_path, rows, folder)
    with pytest.raises(InputRefused, match="target_fingerprint=.*another store as features.path") as refused:
        train.run(run_config(tmp_path, save_target(tmp_path / "other", seed=3), store))
    assert "Delete" not in str(refused.value)


@pytest.mark.parametrize("place, token, said", [
    (2, MASK, "contains token id 3 at position 2, which target.mask_token_id reserves"),
    (1, VOCABULARY, "has token id 576, but the target's embedding has only 576 rows"),
])
def test_token_ids_of_another_tokenizer_are_refused(tmp_path: Path, rows: list[Row], folder: Path, place: int,
                                                    token: int, said: str) -> None:
    others = [replace(row, ids=row.ids.clone().index_fill_(0, torch.tensor([place]), token)) for row in rows]
    config = run_config(tmp_path, folder, imported("deepspec", tmp_path, others, None))
    config.features.allow = ["target_fingerprint"]
    with pytest.raises(InputRefused, match=said):
        train.run(config)
