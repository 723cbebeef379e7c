"""features=hybrid in one process: filled in the first epoch, read afterwards, whatever happens in between."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_training_stage import losses, make_config, root  # noqa: F401  (a fixture)

from deepspec import artifacts
from deepspec.config.paths import features_dir
from deepspec.data.feature_shards import read_shard, shard_names
from deepspec.data.hybrid import GrowingStore
from deepspec.data.sources import CachedFeatures
from deepspec.errors import InputRefused
from deepspec.stages import features, hybrid, train
from deepspec.targets.frozen import FrozenTarget

SAMPLES = 12


def hybrid_config(root: Path, run: str, codec: str, mode: str = "hybrid", **trainer):  # noqa: F811
    config = make_config(root, run, **({"global_batch_size": 2, "max_steps": None, "epochs": 2} | trainer))
    config.features.mode, config.features.codec = mode, codec
    config.features.shard_megabytes = 0.01  # two samples or so
    return config


@pytest.fixture
def encoded(monkeypatch) -> Counter:
    """How often the target has seen a document of each first tokens."""
    seen: Counter = Counter()
    original = FrozenTarget.encode

    def counted(self, input_ids, lengths, **options):
        if options.get("features", True):
            seen.update(tuple(part[:12].tolist()) for part in input_ids.split(list(lengths)))
        return original(self, input_ids, lengths, **options)

    monkeypatch.setattr(FrozenTarget, "encode", counted)
    return seen


def stored_ids(directory: Path) -> list[str]:
    return [record["sample_id"] for name in shard_names(directory) for record in read_shard(directory, name)["records"]]


def test_trains_like_a_cache_and_computes_every_sample_once(root, encoded):  # noqa: F811
    hybrid_run = hybrid_config(root, "hybrid", "int8", validate_every=2)
    train.run(hybrid_run)
    assert len(encoded) == SAMPLES and set(encoded.values()) == {1}
    directory = features_dir(hybrid_run)
    assert artifacts.is_complete(directory) and sorted(stored_ids(directory)) == sorted(f"p{i}" for i in range(SAMPLES))
    cached_run = hybrid_config(root, "cached-twin", "int8", "cached", validate_every=2)
    train.run(cached_run)  # of the same store
    assert losses(root / "hybrid") == losses(root / "cached-twin"), "the first epoch trains on what is stored"
    for name in ("validation.jsonl",):
        texts = [(root / run / name).read_text() for run in ("hybrid", "cached-twin")]
        assert texts[0] == texts[1]
    encoded.clear()
    again = hybrid_config(root, "hybrid-again", "int8", validate_every=2)
    train.run(again)
    assert not encoded and losses(root / "hybrid-again") == losses(root / "hybrid")


def test_store_is_that_of_the_features_stage(root, tmp_path):  # noqa: F811
    config = hybrid_config(root, "like-stage", "bf16", epochs=1)
    train.run(config)
    ours = {name: CachedFeatures(features_dir(config), split=name) for name in ("train", "held_out")}
    config.features.mode = "cached"
    directory = features_dir(config)
    manifest = artifacts.read_manifest(directory)
    directory.rename(tmp_path / "moved")
    features.run(config)
    assert artifacts.read_manifest(directory).fingerprint == manifest.fingerprint
    for name, source in ours.items():
        source.store.directory = tmp_path / "moved"
        theirs = CachedFeatures(directory, split=name)
        assert [info.sample_id for info in theirs.samples] == [info.sample_id for info in source.samples]
        for one, two in zip(source.get(range(len(source))), theirs.get(range(len(theirs)))):
            assert torch.equal(one.sample.input_ids, two.sample.input_ids)
            torch.testing.assert_close(one.features, two.features, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("stop_after", (1, 3))
def test_continues_where_it_was_killed(root, stop_after, encoded, monkeypatch, caplog):  # noqa: F811
    """Samples of shards that were not finished are computed again, before the second epoch; no other ones are."""
    caplog.set_level(logging.INFO)
    codec, run = {1: "lossless", 3: "fp8-e4m3"}[stop_after], f"killed-{stop_after}"
    whole = hybrid_config(root, f"whole-{stop_after}", codec, "cached", save_every=1)
    config = hybrid_config(root, run, codec, save_every=1)
    directory = features_dir(config)
    for path in directory.glob("*") if directory.exists() else ():
        path.unlink()

    class Killed(BaseException):
        pass

    original = train.DrafterTrainer._optimizer_step

    def dying(self, loaded, requests):
        if self.step == stop_after:
            raise Killed
        return original(self, loaded, requests)

    monkeypatch.setattr(train.DrafterTrainer, "_optimizer_step", dying)
    with pytest.raises(Killed):
        train.run(config)
    monkeypatch.setattr(train.DrafterTrainer, "_optimizer_step", original)
    assert not artifacts.is_complete(directory)
    kept = stored_ids(directory)
    encoded.clear()
    train.run(config)
    assert sum(encoded.values()) == SAMPLES - len(kept) and set(encoded.values()) == {1}
    ids = stored_ids(directory)
    assert sorted(ids) == sorted(f"p{i}" for i in range(SAMPLES)) and artifacts.is_complete(directory)
    train.run(whole)
    assert losses(root / run) == pytest.approx(losses(root / f"whole-{stop_after}"), rel=1e-4)


def test_stops_before_the_epoch_is_over_and_another_run_goes_on(root, encoded):  # noqa: F811
    config = hybrid_config(root, "short", "fp8-e4m3", max_steps=2, validate_every=0)
    config.target.feature_layers = [0, 1]
    train.run(config)
    kept = stored_ids(features_dir(config))
    assert kept and not artifacts.is_complete(features_dir(config)), "what was computed is kept"
    encoded.clear()
    other = hybrid_config(root, "goes-on", "fp8-e4m3")
    other.target.feature_layers = [0, 1]
    train.run(other)
    assert sum(encoded.values()) == SAMPLES - len(kept)
    assert artifacts.is_complete(features_dir(config))


def test_a_damaged_byte_is_noticed(root, tmp_path):  # noqa: F811
    config = hybrid_config(root, "damaged", "bf16")
    directory = features_dir(config)
    if not artifacts.is_complete(directory):
        train.run(config)
    manifest = artifacts.read_manifest(directory)
    header = CachedFeatures(directory).store.header
    name = shard_names(directory)[0]
    for path in directory.glob(f"{name}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / f"{name}.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / f"{name}.bin").write_bytes(data)

    class NoWriter:
        pass

    store = GrowingStore(tmp_path, header, NoWriter())
    with pytest.raises(InputRefused, match="checksum of sample"):
        for record in read_shard(tmp_path, name)["records"]:
            store.read(record["sample_id"], torch.float32)
    assert manifest.status == "complete"


def test_metrics_of_both_epochs_are_there(root):  # noqa: F811
    rows = [json.loads(line) for line in (root / "hybrid/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0] * 4 + [1] * 4
    assert hybrid.store_is_finished(hybrid_config(root, "hybrid", "int8"))
