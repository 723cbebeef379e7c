"""Features on disk: exact, checked, resumable, refused when they are not what they should be."""

import builtins
import errno
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_data import sample, with_features

from deepspec import artifacts
from deepspec.data import feature_codec as codecs, feature_format, feature_records, feature_shards, feature_store
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample
from deepspec.data.feature_format import BadFeatures, StoreHeader, estimate_bytes, require_disk
from deepspec.data.feature_shards import FeatureWriter, clean_shards, finished_samples, join_index
from deepspec.data.feature_store import FeatureStore
from deepspec.data.features.__main__ import main as features_main
from deepspec.errors import InputRefused, UserError

HEADER = StoreHeader("target", "renderer", "responses", (1, 3), 96, "bf16", "float32")


def items(count: int = 6, width: int = 96) -> list[FeatureSample]:
    return [
        with_features(sample(f"s{index}", [0] * 4 + [1] * (3 + index) + [0, 1, 1], first=index), width=width,
                      seed=index)
        for index in range(count)
    ]


def write(folder: Path, samples: list[FeatureSample], header: StoreHeader = HEADER, shard_bytes: int = 9000,
          rank: int = 0) -> FeatureWriter:
    writer = FeatureWriter(folder, header, shard_bytes=shard_bytes, rank=rank)
    for item in samples:
        writer.write(item.sample, "train", item.features, item.last_hidden)
    writer.close()
    return writer


def finish(folder: Path, samples: list[FeatureSample], header: StoreHeader = HEADER) -> FeatureStore:
    manifest = artifacts.begin(folder, "features", "f", facts={"header": asdict(header)})
    shards = join_index(folder, [item.sample.sample_id for item in samples], set())
    artifacts.complete(folder, manifest, ["index.jsonl"], {"shards": shards})
    return FeatureStore(folder)


def store(folder: Path, samples: list[FeatureSample], header: StoreHeader = HEADER, **options: Any) -> FeatureStore:
    write(folder, samples, header, **options)
    return finish(folder, samples, header)


@pytest.mark.parametrize("codec,dtype,error", [
    ("fp32", torch.float32, 0.0), ("bf16", torch.bfloat16, 2**-8), ("int8", torch.float32, 1 / 200),
    ("fp8-e4m3", torch.float32, 1 / 15), ("lossless", torch.bfloat16, 2**-8),
])
def test_what_is_read_is_what_was_written(tmp_path: Path, codec: str, dtype: torch.dtype, error: float) -> None:
    samples = items()
    found = store(tmp_path, samples, replace(HEADER, codec=codec))
    assert len(found) == len(samples)
    for index, item in enumerate(samples):
        read = found.read(index)
        assert read.sample.sample_id == item.sample.sample_id and read.sample.domain == "chat"
        assert torch.equal(read.sample.input_ids, item.sample.input_ids)
        assert torch.equal(read.sample.loss_mask, item.sample.loss_mask)
        assert read.features.dtype == read.last_hidden.dtype == dtype
        rows = valid_anchors(item.sample.loss_mask)
        scale = float(item.features.abs().max())
        assert float((read.features - item.features).abs().max()) <= error * scale
        assert float((read.last_hidden - item.last_hidden)[rows].abs().max()) <= error * scale
        others = torch.ones(len(item.features), dtype=torch.bool)
        others[rows] = False
        assert not read.last_hidden[others].any()


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_dtype_asked_for_is_the_stored_number_rounded_once(tmp_path: Path, codec: str) -> None:
    found = store(tmp_path, items(), replace(HEADER, codec=codec))
    for dtype in (torch.bfloat16, torch.float32):
        stored, asked = found.read(3), found.read(3, dtype)
        assert asked.features.dtype == asked.last_hidden.dtype == dtype
        assert torch.equal(asked.features, stored.features.to(dtype))
        assert torch.equal(asked.last_hidden, stored.last_hidden.to(dtype))


def test_bf16_is_read_without_a_copy(tmp_path: Path) -> None:
    found = store(tmp_path, items())
    read, record = found.read(4, torch.bfloat16), found.records[4]
    mapped = found._maps[record.shard]
    section = found.header.layout(record.tokens, record.label_rows).features
    assert read.features.data_ptr() == mapped.ctypes.data + record.offset + section.offset
    read.features.zero_()  # a mistake, but one that does not reach the disk
    found._maps.clear()
    assert found.read(4).features.any()


def test_reading_ahead_gives_the_same_and_reports_damage(tmp_path: Path) -> None:
    found = store(tmp_path, items(), replace(HEADER, codec="int8"))
    order = [5, 0, 3, 3, 1]
    for index, ahead in zip(order, found.read_ahead(order, torch.bfloat16)):
        alone = found.read(index, torch.bfloat16)
        assert ahead.sample.sample_id == alone.sample.sample_id and torch.equal(ahead.features, alone.features)
    record = found.records[3]
    found._maps.clear()
    with open(tmp_path / f"{record.shard}.bin", "r+b") as handle:
        handle.seek(record.offset + 300)
        handle.write(b"\1\2\3")
    with pytest.raises(InputRefused, match="checksum of sample 's3' differs"):
        found.read_ahead(order)


def test_loss_masks_come_without_the_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = items()
    found = store(tmp_path, samples)
    monkeypatch.setattr(FeatureStore, "read", lambda *_: pytest.fail("the whole record was read"))
    for index, item in enumerate(samples):
        assert torch.equal(found.loss_mask(index), item.sample.loss_mask)
        assert found.records[index].label_rows == len(valid_anchors(item.sample.loss_mask))


def test_a_damaged_loss_mask_is_found(tmp_path: Path) -> None:
    found = store(tmp_path, items())
    record = found.records[2]
    offset = record.offset + found.header.layout(record.tokens, record.label_rows).mask.offset
    found._maps.clear()
    with open(tmp_path / f"{record.shard}.bin", "r+b") as handle:
        handle.seek(offset)
        handle.write(b"\1\1")
    with pytest.raises(InputRefused, match="loss mask of sample 's2' differs.*repair"):
        found.loss_mask(2)


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_the_estimate_is_what_is_written(tmp_path: Path, codec: str) -> None:
    header = replace(HEADER, codec=codec, hidden_size=256)
    samples = items(20, width=256)
    store(tmp_path, samples, header, shard_bytes=40000)
    written = sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != "manifest.json")
    assert abs(estimate_bytes(header, [item.sample for item in samples]) / written - 1) < 0.05


def test_a_full_disk_is_refused_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 80, 20))
    with pytest.raises(InputRefused, match="about 1.5 MB but .* has 20 B free.*codec=int8.*mode=online"):
        require_disk(tmp_path / "not" / "yet", 1_500_000)
    require_disk(tmp_path, 20)


def test_a_disk_that_fills_up_leaves_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = items()
    real, room = builtins.open, 30000

    class Full:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def write(self, payload: bytes) -> int:
            nonlocal room
            room -= len(payload)
            if room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._handle.write(payload)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._handle, name)

    def limited(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        handle = real(path, mode, *rest, **options)
        return Full(handle) if str(path).endswith(".bin.tmp") else handle

    monkeypatch.setattr(builtins, "open", limited)
    with pytest.raises(UserError, match="disk is full after [1-9] samples.*start the same command again"):
        write(tmp_path, samples)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    done = finished_samples(tmp_path)
    assert 0 < len(done) < len(samples)
    write(tmp_path, [item for item in samples if item.sample.sample_id not in done])
    assert finish(tmp_path, samples).read(5).sample.sample_id == "s5"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_unusable_numbers_name_sample_and_layer_at_write(tmp_path: Path, value: float) -> None:
    writer = FeatureWriter(tmp_path, HEADER, shard_bytes=10**6)
    good, bad = items(2)
    bad.features[3, 96 + 5] = value
    writer.write(good.sample, "train", good.features, good.last_hidden)
    with pytest.raises(BadFeatures, match="sample 's1', layer 3: .*token 3, channel 5"):
        writer.write(bad.sample, "train", bad.features, bad.last_hidden)
    bad.features[3, 96 + 5] = 0
    bad.last_hidden[4, 0] = value
    with pytest.raises(BadFeatures, match="'s1', last_hidden"):
        writer.write(bad.sample, "train", bad.features, bad.last_hidden)
    writer.close()
    assert finished_samples(tmp_path) == {"s0"}
    assert len(finish(tmp_path, [good])) == 1


def test_unusable_numbers_are_found_at_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = items(2)
    samples[1].features[0, 0] = float("nan")
    with monkeypatch.context() as patched:
        patched.setattr(feature_records, "check_finite", lambda *_: None)
        found = store(tmp_path, samples)
    found.read(0)
    with pytest.raises(InputRefused, match="sample 's1', layer 1"):
        found.read(1)


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 9])
def test_fewer_rows_than_tokens_are_never_stored(tmp_path: Path, rows: int) -> None:
    item = items(1)[0]
    assert len(item.sample.input_ids) == 10
    writer = FeatureWriter(tmp_path, HEADER, shard_bytes=10**6)
    with pytest.raises(BadFeatures, match="'s0' has 10 tokens.*prefix caching"):
        writer.write(item.sample, "train", item.features[:rows], item.last_hidden[:rows])
    writer.close()
    assert finished_samples(tmp_path) == set()


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-100])
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1:])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_damage_names_the_file_and_the_command(tmp_path: Path, how: str) -> None:
    samples = items()
    store(tmp_path, samples)
    damage(tmp_path / "shard-00000-00000.bin", how)
    with pytest.raises(InputRefused, match="shard-00000-00000.bin.*deepspec.data.features repair") as refusal:
        found = FeatureStore(tmp_path)
        for index in range(len(found)):
            found.read(index)
    assert str(tmp_path) in str(refusal.value)
    assert features_main(["verify", str(tmp_path)]) == 3
    assert features_main(["repair", str(tmp_path), "--remove"]) == 0
    with pytest.raises(InputRefused, match="unfinished"):
        FeatureStore(tmp_path)
    done = finished_samples(tmp_path)
    assert 0 < len(done) < len(samples)
    write(tmp_path, [item for item in samples if item.sample.sample_id not in done])
    found = finish(tmp_path, samples)
    assert [found.read(index).sample.sample_id for index in range(6)] == [f"s{index}" for index in range(6)]
    assert features_main(["verify", str(tmp_path)]) == 0


def test_a_changed_index_is_refused(tmp_path: Path) -> None:
    store(tmp_path, items())
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"s1"', b'"s9"'))
    with pytest.raises(InputRefused, match="index.jsonl.*changed"):
        FeatureStore(tmp_path)
    assert features_main(["verify", str(tmp_path)]) == 3


@pytest.mark.parametrize("change, said", [
    ({"codec": "int4"}, "codec='int4'"), ({"codec": None}, "codec=None"), ({"layers": None}, "layers=None"),
    ({"layers": []}, "layers=."), ({"layers": ["1"]}, "layers="), ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": "96"}, "hidden_size='96'"), ({"new": 1}, "header has new"),
    ({"store_version": 1}, "store_version 1"), (None, "store_version None"),
])
def test_a_manifest_that_describes_no_store_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    store(tmp_path, items(2))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["facts"]["header"] = manifest["facts"]["header"] | change if change else "text"
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputRefused, match=said):
        FeatureStore(tmp_path)
    assert features_main(["inspect", str(tmp_path)]) == features_main(["verify", str(tmp_path)]) == 3


@pytest.mark.parametrize("shards", [None, [], {"shard-00000-00000": 3}])
def test_a_manifest_without_shards_is_refused(tmp_path: Path, shards: Any) -> None:
    store(tmp_path, items(2))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["facts"]["shards"] = shards
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputRefused, match="does not describe a feature store: shards="):
        FeatureStore(tmp_path)
    assert features_main(["inspect", str(tmp_path)]) == features_main(["verify", str(tmp_path)]) == 3


def test_verify_refuses_what_is_no_store(tmp_path: Path) -> None:
    assert features_main(["verify", str(tmp_path)]) == 3
    with pytest.raises(SystemExit) as usage:
        features_main(["verify"])
    assert usage.value.code == 2
    artifacts.begin(tmp_path, "responses", "f")
    with pytest.raises(InputRefused, match="unfinished"):
        FeatureStore(tmp_path)


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    samples = items()
    writer = FeatureWriter(tmp_path, HEADER, shard_bytes=9000)
    for item in samples[:5]:
        writer.write(item.sample, "train", item.features, item.last_hidden)
    # No close: the process is gone. A rename without its list, and a list without its data, may be left as well.
    (tmp_path / "shard-00007-00000.bin").write_bytes(b"half")
    (tmp_path / "shard-00008-00000.json").write_text(json.dumps(
        {"header": {}, "bytes": 3, "sha256": "", "records": [{"sample_id": "ghost"}]}))
    clean_shards(tmp_path, HEADER)
    done = finished_samples(tmp_path)
    assert done == {"s0", "s1", "s2", "s3"}
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("shard-0000[78]*"))
    write(tmp_path, [item for item in samples if item.sample.sample_id not in done])
    found = finish(tmp_path, samples)
    assert torch.equal(found.read(4).features, samples[4].features.bfloat16())


def test_a_resume_removes_damaged_and_foreign_shards(tmp_path: Path) -> None:
    samples = items()
    write(tmp_path, samples)
    names = feature_shards.shard_names(tmp_path)
    assert len(names) == 3
    damage(tmp_path / f"{names[0]}.bin", "flipped")
    assert clean_shards(tmp_path, HEADER, rank=0, world_size=2) == 1
    assert clean_shards(tmp_path, replace(HEADER, layers=(1, 2)), rank=0, world_size=1) == 2
    assert finished_samples(tmp_path) == set()


def test_ranks_write_side_by_side_and_the_index_keeps_the_order(tmp_path: Path) -> None:
    samples = items()
    write(tmp_path, samples[::2], rank=1)
    write(tmp_path, samples[1::2], rank=0)
    found = finish(tmp_path, samples)
    assert [record.sample_id for record in found.records] == [item.sample.sample_id for item in samples]


def test_a_missing_sample_is_reported(tmp_path: Path) -> None:
    samples = items()
    write(tmp_path, samples[:-1])
    with pytest.raises(UserError, match="1 of 6 samples are in no shard, the first is 's5'"):
        join_index(tmp_path, [item.sample.sample_id for item in samples], set())
    join_index(tmp_path, [item.sample.sample_id for item in samples], {"s5"})


def test_many_shards_do_not_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_store, "_OPEN_SHARDS", 2)
    samples = items()
    found = store(tmp_path, samples, shard_bytes=1)
    assert [found.read(index).sample.sample_id for index in (0, 3, 5, 0)] == ["s0", "s3", "s5", "s0"]
    assert len(found._maps) == 2


def test_sizes_are_written_for_people() -> None:
    assert [feature_format.human_bytes(value) for value in (12, 1500, 38e12, 38e15)] == [
        "12 B", "1.5 kB", "38.0 TB", "38000.0 TB",
    ]
