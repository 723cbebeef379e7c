"""Looking into a store, finding every damaged byte and the sample it belongs to, making just those again."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Iterator, Sequence

import pytest
import torch
from tiny_data import chat, sample, save_target, tiny_config, with_features

from deepspec import artifacts
from deepspec.config import paths
from deepspec.data.batch import FeatureSample
from deepspec.data.feature_format import StoreHeader
from deepspec.data.feature_shards import FeatureWriter, join_index, read_shard, shard_names
from deepspec.data.feature_store import FeatureStore
from deepspec.data.features import remake
from deepspec.data.features.__main__ import main
from deepspec.data.features.check import Catalog, find_damage, read_catalog
from deepspec.data.features.repair import Remaker, repair
from deepspec.data.jsonl import dump_row
from deepspec.errors import InputRefused, UserError
from deepspec.stages import features as features_stage, prompts as prompts_stage, responses as responses_stage

HEADER = StoreHeader("target", "renderer", "responses", (1, 3), 96, "int8", "float32")
NAMES = [f"s{index}" for index in range(8)]


def items() -> list[FeatureSample]:
    return [with_features(sample(name, [0] * 4 + [1] * (3 + index), domain="code" if index % 2 else "chat"), width=96,
                          seed=index) for index, name in enumerate(NAMES)]


def write_store(folder: Path, codec: str = "int8") -> None:
    header = replace(HEADER, codec=codec)
    manifest = artifacts.begin(folder, "features", "f", facts={"header": header.to_json()})
    writer = FeatureWriter(folder, header, shard_bytes=8000)
    for index, item in enumerate(items()):
        writer.write(item.sample, "held_out" if index == 3 else "train", item.features, item.last_hidden)
    writer.close()
    shards = join_index(folder, NAMES, set())
    artifacts.complete(folder, manifest, ["index.jsonl"], {
        "shards": shards, "quarantined": [], "bytes": sum(shard["bytes"] for shard in shards.values())})


class Fake:
    """Makes the samples of ``write_store`` and remembers which."""

    def __init__(self, catalog: Catalog) -> None:
        self.made: list[str] = []

    def order(self) -> list[str]:
        return NAMES

    def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
        self.made += sample_ids
        for item in items():
            if item.sample.sample_id in sample_ids:
                yield ("held_out" if item.sample.sample_id == "s3" else "train"), item


def never(catalog: Catalog) -> Remaker:
    raise AssertionError("nothing was damaged")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 0xFF]))


@pytest.mark.parametrize("codec", ["int8", "fp8-e4m3", "lossless", "bf16"])
def test_one_flipped_byte_costs_one_sample_and_repair_brings_every_byte_back(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str) -> None:
    write_store(tmp_path, codec)
    before = content(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    record = FeatureStore(tmp_path).records[2]
    flip(tmp_path / f"{record.shard}.bin", record.offset + 200)
    assert main(["verify", str(tmp_path)]) == 3
    assert f"{tmp_path}/{record.shard}.bin: SHA-256 differs; 1 samples: 's2'" in caplog.text
    fake = Fake(read_catalog(tmp_path))
    done = repair(tmp_path, lambda _: fake)
    assert fake.made == ["s2"] and done.samples == 1 and content(tmp_path) == before
    assert repair(tmp_path, never).damage == []


def cut(folder: Path) -> None:
    path = folder / f"{shard_names(folder)[0]}.bin"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_data(folder: Path) -> None:
    (folder / f"{shard_names(folder)[1]}.bin").unlink()


def drop_list(folder: Path) -> None:
    (folder / f"{shard_names(folder)[1]}.json").unlink()


def change_list(folder: Path) -> None:
    path = folder / f"{shard_names(folder)[0]}.json"
    path.write_bytes(path.read_bytes().replace(b'"s1"', b'"s9"'))


def tear_list(folder: Path) -> None:
    path = folder / f"{shard_names(folder)[0]}.json"
    path.write_bytes(path.read_bytes()[:100])


def change_index(folder: Path) -> None:
    path = folder / "index.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"s1"', b'"s9"'))


def drop_index_and_a_list(folder: Path) -> None:
    (folder / "index.jsonl").unlink()
    tear_list(folder)


@pytest.mark.parametrize("damage,remade", [
    (cut, True), (drop_data, True), (drop_list, False), (change_list, False), (tear_list, False), (change_index, False),
    (drop_index_and_a_list, True),
])
def test_every_kind_of_damage_is_found_and_mended(tmp_path: Path, damage: object, remade: bool) -> None:
    write_store(tmp_path)
    before = content(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    assert main(["verify", str(tmp_path)]) == 3
    fake = Fake(read_catalog(tmp_path))
    repair(tmp_path, lambda _: fake)
    assert bool(fake.made) == remade and len(fake.made) < len(NAMES)
    assert main(["verify", str(tmp_path)]) == 0
    found, after = FeatureStore(tmp_path), content(tmp_path)
    assert [record.sample_id for record in found.records] == NAMES
    assert [record.split for record in found.records].index("held_out") == 3
    for index, item in enumerate(items()):
        assert torch.equal(found.read(index).sample.input_ids, item.sample.input_ids)
    if damage is not drop_index_and_a_list:  # whose samples land in a shard of their own
        assert after == before


def test_a_repair_that_is_cut_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path)
    before = content(tmp_path)
    first, second = shard_names(tmp_path)[:2]
    for name in (first, second):
        flip(tmp_path / f"{name}.bin", 50)

    class Dies(Fake):
        def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
            if self.made:
                raise KeyboardInterrupt
            yield from super().remake(sample_ids)

    with pytest.raises(KeyboardInterrupt):
        repair(tmp_path, Dies)
    with pytest.raises(InputRefused, match="unfinished"):
        FeatureStore(tmp_path)
    assert [item.file for item in find_damage(read_catalog(tmp_path))] == [second]
    repair(tmp_path, Fake)
    assert content(tmp_path) == before


def test_a_sample_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    drop_data(tmp_path)

    class Forgetful(Fake):
        def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
            return (pair for pair in super().remake(sample_ids) if pair[1].sample.sample_id != sample_ids[-1])

    lost = read_shard(tmp_path, shard_names(tmp_path)[1])["records"][-1]["sample_id"]
    with pytest.raises(UserError, match=f"sample '{lost}' could not be made again"):
        repair(tmp_path, Forgetful)
    assert not list(tmp_path.glob(".*"))


def test_a_store_under_construction_is_left_to_extraction(tmp_path: Path) -> None:
    manifest = artifacts.begin(tmp_path, "features", "f", facts={"header": HEADER.to_json()})
    assert manifest.status == "incomplete"
    with pytest.raises(InputRefused, match="unfinished.*extract_features"):
        repair(tmp_path, never)


def test_inspect_says_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_store(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = {line[:10].strip(): line[11:] for line in caplog.records[-1].message.split("\n")}
    size = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    tokens = sum(len(item.sample.input_ids) for item in items())
    assert shown["samples"].startswith(f"8 (held_out 1 (10 tokens), train 7 ({tokens - 10} tokens)), {tokens} tokens")
    assert shown["domains"] == "chat 4 (40 tokens), code 4 (44 tokens)" and shown["codec"] == "int8"
    assert f"{size / tokens:.0f} per token ({size / tokens / 576:.1%} of 576" in shown["bytes"]
    assert shown["layers"].startswith("1, 3 (layer i = output") and shown["target"].startswith("unknown")
    assert shown["damaged"].startswith("no file")
    drop_data(tmp_path)
    main(["inspect", str(tmp_path)])
    assert f"{shard_names(tmp_path)[1]}.bin: 0 bytes, expected" in caplog.text


def test_the_real_target_makes_damaged_samples_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b"".join(dump_row(chat(f"say {index}", id=f"p{index}")) for index in range(8)))
    config = tiny_config(tmp_path / "data", save_target(tmp_path / "target"), prompts)
    config.features.codec, config.features.token_budget = "bf16", 100000
    for stage in (prompts_stage, responses_stage, features_stage):
        stage.run(config)
    folder = paths.features_dir(config)
    stored = FeatureStore(folder)
    before = [stored.read(index) for index in range(len(stored))]
    record = stored.records[1]
    flip(folder / f"{record.shard}.bin", record.offset + 5)
    assert main(["verify", str(folder)]) == 3
    assert main(["repair", str(folder)]) == 0
    found = FeatureStore(folder)
    for index, item in enumerate(before):
        read = found.read(index)
        assert read.sample.sample_id == item.sample.sample_id
        assert torch.equal(read.sample.input_ids, item.sample.input_ids)
        assert torch.allclose(read.features.float(), item.features.float(), rtol=2**-7, atol=1e-3)
    # Another model in the same place is refused, and says so before anything is written.
    flip(folder / f"{record.shard}.bin", record.offset + 5)
    other = save_target(tmp_path / "other", seed=1)
    assert main(["repair", str(folder), "--target", str(other)]) == 3
    assert "is not the target that made" in caplog.text
    (paths.responses_dir(config) / "manifest.json").unlink()
    with pytest.raises(InputRefused, match="Responses not found"):
        remake.from_target(read_catalog(folder))


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "deepspec.data.features", "verify", str(tmp_path)],
                          capture_output=True, text=True)
    assert done.returncode == 3 and "is not a feature store" in done.stdout and "Traceback" not in done.stderr


def test_json_of_a_record_survives(tmp_path: Path) -> None:
    write_store(tmp_path, "lossless")
    row = json.loads((tmp_path / "index.jsonl").read_text().splitlines()[0])
    assert len(row["coded"]) == 2 and len(row["xxh3"]) == 16
