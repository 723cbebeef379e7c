"""Embedding, LM head and final norm alone: the same numbers and the same identity as the whole target."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import FAMILIES, FEATURES, ROWS, random_ids, save_tiny

from deepspec.config.schema import TargetConfig, TargetShape
from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.head import TargetHead, load_head
from deepspec.targets.load import load_target
from deepspec.targets.shallow import FirstLayers


def options(folder: Path, **changes: object) -> TargetConfig:
    template = folder / "template.jinja"
    template.write_text("{{ messages }}")
    values = {"name": "tiny", "path": str(folder), "dtype": "float32", "feature_layers": list(FEATURES),
              "mask_token_id": 4, "chat_template": str(template)}
    return TargetConfig(**(values | changes))  # type: ignore[arg-type]


def head_of(folder: Path, **changes: object) -> TargetHead:
    return load_head(options(folder, **changes), device="cpu", cache_dir=folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_the_whole_target_without_its_layers(tmp_path: Path, family: str, dtype: str) -> None:
    save_tiny(tmp_path, family, shard_size="60KB")
    head = head_of(tmp_path, dtype=dtype)
    whole = load_target(options(tmp_path, dtype=dtype), device="cpu", cache_dir=tmp_path)
    assert head.fingerprint == whole.fingerprint
    assert head.spec == whole.spec and head.feature_layers == whole.feature_layers
    assert torch.equal(head.embed_weight, whole.embed_weight)
    assert torch.equal(head.lm_head_weight, whole.lm_head_weight)
    raw: list[torch.Tensor] = []
    hook = whole.layers[-1].register_forward_hook(lambda _m, _a, output: raw.append(
        (output[0] if isinstance(output, tuple) else output)[0]))
    own = whole.encode(random_ids(20), [20])
    hook.remove()
    if not whole.family.streams:
        assert torch.equal(head.final_norm(raw[0]), own.last_hidden)
    logits, known = whole.logits(own.last_hidden), whole.tokenizer_size
    assert torch.equal(head.logits(own.last_hidden)[:, :known], logits[:, :known])


def test_another_weight_anywhere_is_another_fingerprint(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    before = head_of(tmp_path).fingerprint
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(tensors, file, {"format": "pt"})
    assert head_of(tmp_path).fingerprint != before


def test_quantised_layers_do_not_matter_but_count(tmp_path: Path) -> None:
    """fp8 weights with scales, which no machine without the right GPU can load."""
    save_tiny(tmp_path)
    plain, file = head_of(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = head_of(tmp_path)
    assert torch.equal(head.lm_head_weight, plain.lm_head_weight)
    assert head.fingerprint != plain.fingerprint
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] *= 2
    save_file(tensors, file, {"format": "pt"})
    assert head_of(tmp_path).fingerprint != head.fingerprint


def test_refuses_what_does_not_fit(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(InputRefused, match="hidden_size is 64 but target.shape.hidden_size says 128"):
        head_of(tmp_path, shape=TargetShape(hidden_size=128))
    with pytest.raises(ConfigError, match="layer 3 is the last"):
        head_of(tmp_path, feature_layers=[0, 3])
    with pytest.raises(ConfigError, match=f"has {ROWS} rows"):
        head_of(tmp_path, mask_token_id=ROWS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputRefused, match="has no tensor 'model.norm.weight'"):
        head_of(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_tell_which_layer_states_are_of(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    whole = load_target(options(tmp_path, feature_layers=[0, 1, 2]), device="cpu", cache_dir=tmp_path)
    ids = random_ids(90)
    states = whole.encode(ids, [90]).features.split(whole.spec.hidden_size, dim=1)
    noise = 0.05 * torch.randn(90, whole.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    first = FirstLayers(options(tmp_path, feature_layers=[1, 2]), tmp_path, 4)
    for layer, told in ((0, "layer 0"), (1, None), (2, "layer 2")):
        assert first.layer_of(ids, states[layer] * (1 + noise)) == told
    zeroth = FirstLayers(options(tmp_path, feature_layers=[0]), tmp_path, 4)
    embedded = whole.embed_weight[ids] * whole.spec.embed_scale
    assert zeroth.layer_of(ids, embedded) == "the embedding" and zeroth.layer_of(ids, states[0]) is None


def test_layers_that_cannot_be_loaded_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path)
    first = FirstLayers(options(tmp_path, feature_layers=[7]), tmp_path, 40)
    assert first.layer_of(random_ids(9), torch.zeros(9, 64)) is None and "would take 10 layers" in caplog.text
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    first = FirstLayers(options(tmp_path), tmp_path, 4)
    assert first.layer_of(random_ids(9), torch.zeros(9, 64)) is None and "cannot be loaded here" in caplog.text
