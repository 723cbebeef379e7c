"""Caches in the layouts of DeepSpec, SpecForge and speculators become the same store, or are refused by name."""

from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from foreign_caches import IDS, LAYERS, MAKERS, Row, deepspec_cache, make_rows, specforge_cache, speculators_cache
from tiny_data import MASK, save_target

from deepspec import artifacts
from deepspec.config.schema import TargetConfig
from deepspec.data.anchors import valid_anchors
from deepspec.data.feature_store import FeatureStore
from deepspec.data.features.__main__ import main
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    config = TargetConfig(name="tiny", path=str(folder), dtype="float32", feature_layers=list(LAYERS),
                          mask_token_id=MASK)
    return load_target(config, device="cpu", cache_dir=folder)


@pytest.fixture(scope="module")
def rows(target: FrozenTarget) -> list[Row]:
    return make_rows(target)


def run(kind: str, source: Path, store: Path, folder: Optional[Path], *more: str) -> int:
    known = ["--target", str(folder), "--dtype", "float32"] if folder else []
    return main(["import", kind, str(source), str(store), *IDS[kind], *known, "--codec", "bf16", "--held-out", "0.4",
                 *more])


@pytest.mark.parametrize("kind", MAKERS)
def test_a_cache_becomes_a_store(tmp_path: Path, rows: list[Row], target: FrozenTarget, folder: Path,
                                 kind: str) -> None:
    source, store = MAKERS[kind](tmp_path / "cache", rows), tmp_path / "store"
    assert run(kind, source, store, folder) == 0
    found = FeatureStore(store)
    assert found.header.layers == LAYERS and found.header.target_fingerprint == target.fingerprint
    assert [record.sample_id for record in found.records] == [f"{kind}-{index:08d}" for index in (0, 1, 2, 3, 5)]
    assert {record.split for record in found.records} == {"train", "held_out"}
    for index, row in enumerate([*rows[:4], rows[5]]):
        read = found.read(index)
        assert torch.equal(read.sample.input_ids, row.ids) and torch.equal(read.sample.loss_mask, row.mask.bool())
        anchors = valid_anchors(row.mask)
        for left, right in ((read.features, row.features), (read.last_hidden[anchors], row.last[anchors])):
            assert float((left.float() - right).norm() / right.norm()) < 2**-7
    assert main(["verify", str(store)]) == 0


@pytest.mark.parametrize("kind", MAKERS)
def test_a_damaged_import_is_repaired_from_the_cache(tmp_path: Path, rows: list[Row], folder: Path, kind: str) -> None:
    source, store = MAKERS[kind](tmp_path / "cache", rows), tmp_path / "store"
    assert run(kind, source, store, folder) == 0
    before = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    path = store / "shard-00000-00000.bin"
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["verify", str(store)]) == 3 and main(["repair", str(store)]) == 0
    assert {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()} == before


def test_an_import_continues_after_a_kill(tmp_path: Path, rows: list[Row], folder: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspec.data.features.from_deepspec import DeepSpecCache

    source, original = deepspec_cache(tmp_path / "cache", rows), DeepSpecCache.read
    assert run("deepspec", source, tmp_path / "whole", folder, "--shard-megabytes", "0") == 0

    def dies(self: DeepSpecCache, index: int) -> Any:
        if index == 3:
            raise KeyboardInterrupt
        return original(self, index)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DeepSpecCache, "read", dies)
        run("deepspec", source, tmp_path / "store", folder, "--shard-megabytes", "0")
    assert run("deepspec", source, tmp_path / "store", folder, "--shard-megabytes", "0") == 0
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("[!m]*") if path.is_file()}
                for name in ("store", "whole"))
    assert one == two and len(one) == 11
    assert run("deepspec", source, tmp_path / "store", folder, "--shard-megabytes", "0") == 3  # it is there already


def test_without_a_target_the_store_says_that_nothing_was_compared(tmp_path: Path, rows: list[Row],
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert run("deepspec", deepspec_cache(tmp_path / "cache", rows), tmp_path / "store", None) == 0
    assert FeatureStore(tmp_path / "store").header.target_fingerprint == "unchecked"
    assert "Not compared with any target" in caplog.text
    assert run("speculators", speculators_cache(tmp_path / "other", rows), tmp_path / "store2", None) == 2
    assert "before the final norm: give --target" in caplog.text


@pytest.mark.parametrize("kind", MAKERS)
def test_the_cache_of_another_model_is_refused(tmp_path: Path, rows: list[Row], kind: str,
                                               caplog: pytest.LogCaptureFixture) -> None:
    other = save_target(tmp_path / "other", seed=1)
    assert run(kind, MAKERS[kind](tmp_path / "cache", rows), tmp_path / "store", other) == 3
    assert f"sample '{kind}-00000000': lm_head(last_hidden) differs from the logits" in caplog.text
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind,wrong", [("specforge", "1,3"), ("specforge", "0,1"), ("speculators", "0,2"),
                                        ("speculators", "2,3")])
def test_layer_ids_of_another_convention_are_refused(tmp_path: Path, rows: list[Row], folder: Path, kind: str,
                                                     wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    source = MAKERS[kind](tmp_path / "cache", rows)
    assert run(kind, source, tmp_path / "store", folder, "--layers", wrong) in (2, 3)
    assert "layer" in caplog.text and not (tmp_path / "store").exists()


def test_last_hidden_states_before_the_norm_are_refused(tmp_path: Path, rows: list[Row], folder: Path,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    wrong = [Row(row.ids, row.mask, row.features, row.raw, row.raw) for row in rows]
    assert run("deepspec", deepspec_cache(tmp_path / "cache", wrong), tmp_path / "store", folder) == 3
    assert "not those after the final norm" in caplog.text


@pytest.mark.parametrize("field,value", [("version", 1), ("hidden_dtype", "float16"), ("index_record_size", 48),
                                         ("target_layer_ids", [-1, 2]), ("num_samples", 7)])
def test_other_kinds_of_deepspec_cache_are_refused(tmp_path: Path, rows: list[Row], folder: Path, field: str,
                                                   value: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = deepspec_cache(tmp_path / "cache", rows, lambda manifest: manifest.update({field: value}))
    assert run("deepspec", source, tmp_path / "store", folder) == 3
    assert {"target_layer_ids": "embedding", "num_samples": "7 records"}.get(field, field) in caplog.text


def test_a_cut_shard_is_refused(tmp_path: Path, rows: list[Row], folder: Path,
                                caplog: pytest.LogCaptureFixture) -> None:
    source = deepspec_cache(tmp_path / "cache", rows)
    path = source / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-9])
    assert run("deepspec", source, tmp_path / "store", folder) == 3
    assert "samples.idx record 5" in caplog.text and "shard-00001.bin" in caplog.text


def shorter(row: Row, tokens: int) -> Row:
    return Row(row.ids, row.mask, row.features[:tokens], row.last[:tokens], row.raw[:tokens])


@pytest.mark.parametrize("kind", ["specforge", "speculators"])
@pytest.mark.parametrize("tokens", [0, 1, 6, 10, 11])
def test_fewer_rows_than_tokens_are_refused(tmp_path: Path, rows: list[Row], folder: Path, kind: str, tokens: int,
                                            caplog: pytest.LogCaptureFixture) -> None:
    given = [rows[0], rows[1], shorter(rows[2], tokens), *rows[3:]]
    assert len(rows[2].ids) == 12
    assert run(kind, MAKERS[kind](tmp_path / "cache", given), tmp_path / "store", folder) == 3
    assert "12 tokens, but hidden states of shape" in caplog.text and "2" in caplog.text


def test_other_token_ids_than_the_dataset_are_refused(tmp_path: Path, rows: list[Row], folder: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    source = speculators_cache(tmp_path / "cache", rows, skip=(1,))
    path = source / "hidden_states" / "hs_2.safetensors"
    (source / "hidden_states" / "hs_3.safetensors").rename(path)
    assert run("speculators", source, tmp_path / "store", folder) == 3
    assert "13 token ids that are not the 12 of row 2" in caplog.text


@pytest.mark.parametrize("kind,name", [("specforge", "rows_0-4/data_1.ckpt"), ("specforge", "rows_0-4/data_3.ckpt.gz"),
                                       ("speculators", "hidden_states/hs_1.safetensors")])
def test_a_torn_file_is_named(tmp_path: Path, rows: list[Row], folder: Path, kind: str, name: str,
                              caplog: pytest.LogCaptureFixture) -> None:
    source = MAKERS[kind](tmp_path / "cache", rows)
    path = source / name
    path.write_bytes(path.read_bytes()[:-700])
    assert run(kind, source, tmp_path / "store", folder) == 3
    assert f"{path} cannot be read" in caplog.text


def test_ids_beyond_the_embedding_and_odd_masks_are_refused(tmp_path: Path, rows: list[Row], folder: Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    ids = rows[2].ids.clone()
    ids[3] = 70000
    given = [*rows[:2], Row(ids, rows[2].mask, rows[2].features, rows[2].last, rows[2].raw), *rows[3:]]
    assert run("deepspec", deepspec_cache(tmp_path / "cache", given), tmp_path / "store", folder) == 3
    assert "sample 'deepspec-00000002': token id 70000" in caplog.text
    mask = rows[2].mask.clone()
    mask[3] = 2
    given[2] = Row(rows[2].ids, mask, rows[2].features, rows[2].last, rows[2].raw)
    assert run("specforge", specforge_cache(tmp_path / "cache2", given), tmp_path / "store", folder) == 3
    assert "loss mask has values other than 0 and 1" in caplog.text


def test_unusable_numbers_are_set_aside_up_to_a_limit(tmp_path: Path, rows: list[Row], folder: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    def broken(row: Row) -> Row:
        features = row.features.clone()
        features[2, 3] = float("nan")
        return Row(row.ids, row.mask, features, row.last, row.raw)

    given = [*rows[:2], broken(rows[2]), *rows[3:]]
    assert run("deepspec", deepspec_cache(tmp_path / "one", given), tmp_path / "store", folder) == 0
    manifest = artifacts.read_manifest(tmp_path / "store")
    assert manifest is not None and manifest.facts["quarantined"] == ["deepspec-00000002"]
    assert len(FeatureStore(tmp_path / "store")) == 4
    given[3] = broken(rows[3])
    assert run("deepspec", deepspec_cache(tmp_path / "two", given), tmp_path / "store2", folder) == 1
    assert "2 samples have unusable hidden states, at most 1 may" in caplog.text


@pytest.mark.parametrize("kind", ["specforge", "speculators"])
def test_folders_of_something_else_are_refused(tmp_path: Path, folder: Path, kind: str,
                                               caplog: pytest.LogCaptureFixture) -> None:
    assert run(kind, tmp_path, tmp_path / "store", folder) == 3
    assert f"it is not a cache of {kind}" in caplog.text.replace("SpecForge", "specforge")
    assert run("deepspec", tmp_path, tmp_path / "store", folder) == 3
    assert "is not the manifest of a DeepSpec cache" in caplog.text
    assert main(["import", kind, str(tmp_path), str(tmp_path / "store"), "--target", str(folder)]) == 2
    assert "give --layers" in caplog.text
