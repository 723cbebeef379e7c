"""Loading: whole folders give the model that was saved, damaged ones are refused by name."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import FEATURES, random_ids, save_tiny, tiny_tokenizer

from deepspec.config.schema import TargetConfig, TargetShape
from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.folder import INDEX, SINGLE
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target, locate


def _config(folder: Path, **changes: object) -> TargetConfig:
    values = {"name": "tiny", "path": str(folder), "dtype": "float32", "feature_layers": list(FEATURES),
              "mask_token_id": 4}
    return TargetConfig(**(values | changes))


def _load(folder: Path, **changes: object) -> FrozenTarget:
    return load_target(_config(folder, **changes), device="cpu", cache_dir=folder.parent / "cache")


@pytest.mark.parametrize("family, shard_size", [("qwen3", "5GB"), ("qwen3", "100KB"), ("qwen3_tied", "5GB"),
                                                ("qwen3_tied", "100KB"), ("llama", "100KB")])
def test_every_layout_gives_the_weights_that_were_saved(tmp_path: Path, family: str, shard_size: str) -> None:
    model = save_tiny(tmp_path, family, shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size != "5GB")
    target = _load(tmp_path)
    assert torch.equal(target.embed_weight, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head_weight, model.get_output_embeddings().weight)
    assert (target.lm_head_weight.data_ptr() == target.embed_weight.data_ptr()) == (family == "qwen3_tied")
    ids = random_ids(9)
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :, :target.tokenizer_size]
    logits = target.logits(target.encode(ids, [9]).last_hidden)[:, :target.tokenizer_size]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert target.feature_layers == FEATURES and target.mask_token_id == 4


def test_dtype_and_options(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert _load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="target.dtype='float8'"):
        _load(tmp_path, dtype="float8")
    bare = load_target(TargetConfig(name="tiny", path=str(tmp_path), dtype="float32"), device="cpu", cache_dir=tmp_path,
                       features=False)
    assert bare.feature_layers == () and bare.encode(random_ids(2), [2]).features.shape == (2, 0)
    with pytest.raises(InputRefused, match="num_layers is 4 but target.shape.num_layers says 5"):
        _load(tmp_path, shape=TargetShape(num_layers=5))


def _shards(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard_size="100KB")
    victim = sorted(set(_shards(tmp_path).values()))[1]
    (tmp_path / victim).unlink()
    with pytest.raises(InputRefused, match=f"{victim} is missing.*tensors, the first"):
        _load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int, shard_size: str) -> None:
    save_tiny(tmp_path, shard_size=shard_size)
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(InputRefused, match=f"{victim.name} is (not a whole|truncated)"):
        _load(tmp_path)


def test_an_index_that_names_an_absent_key(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard_size="100KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputRefused, match=f"'model.layers.9.mlp.up_proj.weight' is in {shard}"):
        _load(tmp_path)


def test_weights_that_would_be_random_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["lm_head.weight"]  # though the model is not tied
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputRefused, match="has no weights for 1 tensors of tiny, among them lm_head.weight"):
        _load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(InputRefused, match="(?s)tiny in .* cannot be loaded|another shape"):
        _load(tmp_path)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="has no config.json"):
        _load(tmp_path)
    save_tiny(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(InputRefused, match="no weights to load"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputRefused, match="config.json is not readable"):
        _load(tmp_path)


def test_paths_and_revisions(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="is a folder. Set target.revision=null"):
        _load(tmp_path, revision="main")
    with pytest.raises(ConfigError, match="is not a folder on this machine"):
        _load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="target.source='ftp'"):
        _load(tmp_path, source="ftp")


def test_an_unreachable_hub_is_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputRefused, match="deepspec-tests/absent .*could not be downloaded") as caught:
        locate(_config(tmp_path, path="deepspec-tests/absent"), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_needs_a_chat_template(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template.*target.chat_template"):
        _load(tmp_path)
    with pytest.raises(ConfigError, match="target.chat_template=.*is not a file"):
        _load(tmp_path, chat_template=str(tmp_path / "absent.jinja"))
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    tokenizer = _load(tmp_path, chat_template=str(template)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(InputRefused, match="[Tt]okenizer of tiny"):
        _load(tmp_path)


def test_loading_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        _load(tmp_path)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "" and not caplog.records


def test_the_tokenizer_is_the_folders_own(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert _load(tmp_path).tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
