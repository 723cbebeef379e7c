"""Cached and online features give the same numbers; what does not belong to the run is refused by name."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_data import MASK, ROWS, sample, save_target

from deepspec import artifacts
from deepspec.config.schema import TargetConfig
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import Sample
from deepspec.data.feature_format import StoreHeader
from deepspec.data.feature_shards import FeatureWriter, join_index
from deepspec.data.sources import CachedFeatures, Expected, OnlineFeatures, encode_samples, token_batches
from deepspec.errors import InputRefused
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target


def documents() -> list[Sample]:
    return [sample(f"s{index}", [0] * (3 + index) + [1] * 9, first=40 * index, domain="code") for index in range(4)]


def load(folder: Path, seed: int = 0) -> FrozenTarget:
    config = TargetConfig(name="tiny", path=str(save_target(folder, seed)), dtype="float32", feature_layers=[0, 2],
                          mask_token_id=MASK)
    return load_target(config, device="cpu", cache_dir=folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load(tmp_path_factory.mktemp("target"))


def cache(folder: Path, target: FrozenTarget, codec: str = "fp32") -> Path:
    header = StoreHeader(target.fingerprint, "renderer", "responses", target.feature_layers, 64, codec, "float32")
    manifest = artifacts.begin(folder, "features", "f", facts={"header": asdict(header)})
    writer = FeatureWriter(folder, header, shard_bytes=10**5)
    for item in encode_samples(target, documents()):
        writer.write(item.sample, "train", item.features, item.last_hidden)
    writer.close()
    shards = join_index(folder, [item.sample_id for item in documents()], set())
    artifacts.complete(folder, manifest, ["index.jsonl"], {"shards": shards})
    return folder


@pytest.mark.parametrize("codec,error", [("fp32", 1e-6), ("bf16", 0.01), ("int8", 0.02)])
def test_cached_and_online_agree(tmp_path: Path, target: FrozenTarget, codec: str, error: float) -> None:
    cached = CachedFeatures(cache(tmp_path, target, codec), dtype=torch.float32)
    online = OnlineFeatures(target, documents(), token_budget=30)
    assert cached.samples == online.samples and len(cached) == len(online) == 4
    assert cached.samples[1].domain == "code" and cached.samples[1].length == 13
    for one, two in zip(cached.get([2, 0, 3]), online.get([2, 0, 3])):
        assert one.sample.sample_id == two.sample.sample_id
        rows = valid_anchors(one.sample.loss_mask)
        for left, right in ((one.features, two.features), (one.last_hidden[rows], two.last_hidden[rows])):
            assert float((left - right).abs().max() / right.abs().max()) <= error


def test_documents_say_what_the_samples_do(tmp_path: Path, target: FrozenTarget) -> None:
    cached, online = CachedFeatures(cache(tmp_path, target)), OnlineFeatures(target, documents())
    assert len(cached.documents) == len(online.documents) == 4
    for index in (3, 0):
        one, two = cached.documents[index], online.documents[index]
        assert (one.sample_id, one.domain, len(one.input_ids)) == (two.sample_id, two.domain, len(two.input_ids))
        assert torch.equal(one.loss_mask, two.loss_mask)
        assert cached.samples[index].anchors == len(valid_anchors(one.loss_mask))


def test_features_are_the_outputs_of_the_layers(target: FrozenTarget) -> None:
    (item,) = encode_samples(target, documents()[:1])
    logits = target.logits(item.last_hidden)
    assert item.features.shape == (12, 128) and logits.shape == (12, ROWS)
    seen = []
    hook = target.layers[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    encode_samples(target, documents()[:1])
    hook.remove()
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert torch.equal(item.features[:, 64:], output.reshape(12, 64))


def test_a_cast_is_asked_for(tmp_path: Path, target: FrozenTarget) -> None:
    folder = cache(tmp_path, target, "bf16")
    assert CachedFeatures(folder).get([0])[0].features.dtype == torch.bfloat16
    assert CachedFeatures(folder, dtype=torch.float32).get([0])[0].last_hidden.dtype == torch.float32
    assert OnlineFeatures(target, documents(), dtype=torch.bfloat16).get([1])[0].features.dtype == torch.bfloat16


@pytest.mark.parametrize("expected,field", [
    (Expected(target_fingerprint="0" * 64), "target_fingerprint"),
    (Expected(layers=(0, 3)), r"layers=\[0, 2\], but this run needs layers=\[0, 3\]"),
    (Expected(renderer_hash="other"), "renderer_hash=renderer, .* renderer_hash=other"),
    (Expected(responses_fingerprint="x"), "responses_fingerprint"),
    (Expected(convention="layer i = input of decoder layer i"), "convention"),
])
def test_other_features_are_refused_by_field_and_values(tmp_path: Path, target: FrozenTarget, expected: Expected,
                                                        field: str) -> None:
    with pytest.raises(InputRefused, match=field):
        CachedFeatures(cache(tmp_path, target), expected=expected)


def test_an_override_is_possible_and_says_so(tmp_path: Path, target: FrozenTarget,
                                             caplog: pytest.LogCaptureFixture) -> None:
    expected = Expected(target_fingerprint="0" * 64, layers=(0, 2))
    found = CachedFeatures(cache(tmp_path, target), expected=expected, allow=frozenset({"target_fingerprint"}))
    assert len(found) == 4
    assert any("Used anyway" in message for message in caplog.messages)


def test_other_weights_of_the_same_shape_are_refused_and_a_moved_model_is_not(tmp_path: Path,
                                                                              target: FrozenTarget) -> None:
    folder = cache(tmp_path / "cache", target)
    other, moved = load(tmp_path / "other", seed=1), load(tmp_path / "moved")
    assert other.spec == target.spec
    CachedFeatures(folder, expected=Expected(moved.fingerprint, moved.feature_layers))
    with pytest.raises(InputRefused, match=f"target_fingerprint={target.fingerprint}.*{other.fingerprint}"):
        CachedFeatures(folder, expected=Expected(other.fingerprint, other.feature_layers))


def test_batches_keep_the_order_and_the_budget() -> None:
    assert token_batches([5, 5, 5, 30, 1], 10) == [[0, 1], [2], [3], [4]]
    assert token_batches([], 10) == []
