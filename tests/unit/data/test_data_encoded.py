"""Stored states travel undecoded to the device that needs them, and give the same pack as decoding at once."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_data_feature_store import HEADER, finish, items, write

from deepspec.data import encoded, feature_codec as codecs
from deepspec.data.batch import TrainingBatch
from deepspec.data.collate import collate
from deepspec.data.feature_store import FeatureStore
from deepspec.data.padding import pad
from deepspec.training.packs import _map_tensors, to_device

CODECS = ("fp32", "bf16", "int8", "fp8-e4m3", "lossless")
CPU = torch.device("cpu")


def stored(folder: Path, codec: str) -> FeatureStore:
    header = replace(HEADER, codec=codec)
    write(folder, items(), header)
    return finish(folder, items(), header)


def pack(samples: list, **options: bool) -> TrainingBatch:
    return collate(samples, num_anchors=2, draft_length=3, seed=1, epoch=0, **options)


def same(left: TrainingBatch, right: TrainingBatch) -> None:
    for name in ("input_ids", "positions", "features", "last_hidden"):
        one, two = getattr(left, name), getattr(right, name)
        assert one.dtype == two.dtype and torch.equal(one, two), name
    assert left.document_starts == right.document_starts
    assert torch.equal(left.blocks.target_rows, right.blocks.target_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_a_pack_is_the_same_wherever_it_is_decoded(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    store, order = stored(tmp_path, codec), [4, 0, 3]
    at_once = pack(store.read_ahead(order, dtype))
    into_the_pack = pack(store.read_stored(order, dtype))
    later = pack(store.read_stored(order, dtype), decode=False)
    assert into_the_pack.states is None and later.states is not None and later.features.shape == (14 + 10 + 13, 0)
    assert later.states.features.data.element_size() == {"int8": 1, "fp8-e4m3": 1, "fp32": 4}.get(codec, 2)
    same(into_the_pack, at_once)
    same(to_device(later, CPU), at_once)
    same(to_device(pad(later, tokens=50, blocks=9), CPU), pad(at_once, tokens=50, blocks=9))


@pytest.mark.parametrize("codec", CODECS)
def test_stored_samples_are_views_of_the_file(tmp_path: Path, codec: str) -> None:
    store = stored(tmp_path, codec)
    (item,), shard = store.read_stored([2]), store._map(store.records[2].shard)
    data, before = item.states.features.data, item.decoded().features.clone()
    inside = shard.ctypes.data <= data.data_ptr() < shard.ctypes.data + len(shard)
    assert inside == (codec != "lossless"), "lossless has to be unpacked, the others are not copied"
    data.view(torch.uint8)[0, 0, 1] ^= 1  # copy on write: the file does not see it
    assert not torch.equal(item.decoded().features, before)
    assert torch.equal(FeatureStore(tmp_path).read(2).features, before)


def test_every_tensor_of_a_pack_moves(tmp_path: Path) -> None:
    later = pack(stored(tmp_path, "int8").read_stored([1, 2], torch.float32), decode=False)
    moved = _map_tensors(later, lambda tensor: tensor.to("meta"))
    assert moved.states is not None
    for part in (moved.states.features, moved.states.last_hidden):
        assert {part.data.device.type, part.scales.device.type} == {"meta"}
        assert part.rows is None or part.rows.device.type == "meta"
        assert part.decode().device.type == "meta" and part.decode().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", codecs.SCALED)
def test_the_path_of_a_gpu_gives_the_numbers_of_the_cpu(codec: str, dtype: torch.dtype) -> None:
    data, scales = codecs.encode(torch.randn(50, 3, 192) * 10, codec)
    here, there = (torch.empty(50, 3, 192, dtype=dtype) for _ in range(2))
    codecs.decode_into(data, scales, codec, here)
    codecs._unscale_whole(data, scales, codec, there)
    assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_room_in_huge_pages_is_a_tensor_like_any_other(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "_LARGE", 1)
    parts = [torch.randint(-9, 9, (rows, 2, 40)).to(torch.float32).to(dtype) for rows in (30, 0, 7)]
    whole = encoded._concatenated(parts)
    assert whole.dtype == dtype and whole.is_contiguous() and whole.shape == (37, 2, 40)
    assert torch.equal(whole.float(), torch.cat([part.float() for part in parts]))
    kept = whole[3:].clone()
    view = whole[3:]
    del whole
    gc.collect()
    assert torch.equal(view.float(), kept.float()), "memory lives as long as a view of it"
