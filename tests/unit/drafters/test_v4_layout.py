"""Names, shapes, numbers and dtypes of the release, at the released sizes, without a weight."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from v4_cases import v4_drafter, v4_shape

from deepspec.config.compose import compose_config
from deepspec.drafters.config import shape_from_config, shape_to_config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.drafters.v4.names import own_tensors, released_tensors
from deepspec.drafters.v4.release import dequantised, from_release, to_release
from deepspec.errors import InputRefused
from deepspec.export.layout_v4 import dtype_of
from deepspec.planning.sizes import count_parameters
from deepspec.targets.spec import TargetSpec

SIZES: dict[str, dict[str, Any]] = {  # of the targets; parameters as counted from the releases
    "flash": {"hidden": 4096, "layers": 43, "taps": [40, 41, 42], "billions": 19.9, "rank": 256, "experts": 256},
    "pro": {"hidden": 7168, "layers": 61, "taps": [58, 59, 60], "billions": 77.5, "rank": 512, "experts": 384},
}
VOCABULARY = 129280


def config_of(name: str) -> Any:
    of = SIZES[name]
    target = {"model_type": "deepseek_v4", "hidden_size": of["hidden"], "intermediate_size": 2048,
              "num_layers": of["layers"], "num_heads": 64, "num_kv_heads": 1, "head_dim": 512, "vocab_size": VOCABULARY}
    return compose_config([
        "+experiment=qwen3_8b", f"drafter=dspark_v4_{name}", "target.mask_token_id=128799",
        f"target.feature_layers={of['taps']}".replace(" ", ""),
        *(f"target.shape.{key}={value}" for key, value in target.items())])


def spec_of(name: str) -> TargetSpec:
    of = SIZES[name]
    return TargetSpec(model_type="deepseek_v4", hidden_size=of["hidden"], intermediate_size=2048,
                      num_layers=of["layers"], num_heads=64, num_kv_heads=1, head_dim=512, vocab_size=VOCABULARY,
                      rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=1048576)


def table(hidden: int, heads: int, rank: int, groups: int, inner: int, experts: int,
          markov: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The release's tensors, written out: shape and what an unquantised file stores."""
    half, full = "bfloat16", "float32"
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for i in range(3):
        own: dict[str, tuple[tuple[int, ...], str]] = {
            "attn.wq_a.weight": ((rank, hidden), half), "attn.wq_b.weight": ((heads * 512, rank), half),
            "attn.wkv.weight": ((512, hidden), half),
            "attn.wo_a.weight": ((groups * 1024, heads * 512 // groups), half),
            "attn.wo_b.weight": ((hidden, groups * 1024), half), "attn.q_norm.weight": ((rank,), half),
            "attn.kv_norm.weight": ((512,), half), "attn_norm.weight": ((hidden,), half),
            "ffn_norm.weight": ((hidden,), half), "attn.attn_sink": ((heads,), full),
            "ffn.gate.weight": ((experts, hidden), half), "ffn.gate.bias": ((experts,), full),
        }
        for prefix in (*(f"ffn.experts.{e}" for e in range(experts)), "ffn.shared_experts"):
            own |= {f"{prefix}.w1.weight": ((inner, hidden), half), f"{prefix}.w3.weight": ((inner, hidden), half),
                    f"{prefix}.w2.weight": ((hidden, inner), half)}
        for site in ("attn", "ffn"):
            own |= {f"hc_{site}_fn": ((24, 4 * hidden), full), f"hc_{site}_base": ((24,), full),
                    f"hc_{site}_scale": ((3,), full)}
        if i == 0:
            own |= {"main_proj.weight": ((hidden, 3 * hidden), half), "main_norm.weight": ((hidden,), half)}
        if i == 2:
            own |= {"norm.weight": ((hidden,), half), "hc_head_fn": ((4, 4 * hidden), full),
                    "hc_head_base": ((4,), full), "hc_head_scale": ((1,), full),
                    "markov_head.markov_w1.weight": ((VOCABULARY, markov), half),
                    "markov_head.markov_w2.weight": ((VOCABULARY, markov), full),
                    "confidence_head.proj.weight": ((1, hidden + markov), full)}
        found |= {f"mtp.{i}.{name}": value for name, value in own.items()}
    return found


TABLES = {"flash": table(4096, 64, 1024, 8, 2048, 256, 256), "pro": table(7168, 128, 1536, 16, 3072, 384, 512)}


@pytest.mark.parametrize("name", SIZES)
def test_released_sizes_on_the_meta_device(name: str) -> None:
    config = config_of(name)
    shape = shape_from(spec_of(name), config.target, config.drafter)
    with torch.device("meta"):
        matrix = torch.empty(VOCABULARY, shape.hidden_size)
        model = build_drafter(shape, SharedWeights(matrix, matrix, "meta"))
    values = shape_to_config(shape, num_anchors=512)
    assert {key: tuple(value.shape) for key, value in model.tensors().items()} == own_tensors(values)
    wanted = TABLES[name]
    assert released_tensors(values) == {key: size for key, (size, _) in wanted.items()}
    assert {key: dtype_of(key, "bfloat16") for key in wanted} == {key: dtype for key, (_, dtype) in wanted.items()}
    experts, quantised = SIZES[name]["experts"], 3 * (8 + 3 * SIZES[name]["experts"]) + 1  # each with a scale
    assert len(wanted) + quantised == 3 * (29 + 6 * experts) + 10
    counted = sum(value.numel() for value in model.tensors().values())
    assert counted == count_parameters(config).trainable
    assert counted / 1e9 == pytest.approx(SIZES[name]["billions"], abs=0.06)
    assert replace(shape_from_config(values), rope_parameters={}) == replace(shape, rope_parameters={})


def test_keys_of_a_release() -> None:
    """What a released config.json leaves to its engines; the number of stages is no key of it."""
    values = shape_to_config(v4_shape(), num_anchors=4)
    for key in ("n_mtp_layers", "enable_confidence_head", "confidence_head_with_markov", "num_target_layers",
                "target_hidden_size", "deepspec_algorithm", "sample_from_anchor"):
        del values[key]
    found = shape_from_config(values)
    assert (found.num_layers, found.confidence_head, found.num_target_layers) == (3, True, 6)
    with pytest.raises(InputRefused, match="q_lora_rank"):
        shape_from_config({key: value for key, value in values.items() if key != "q_lora_rank"})
    with pytest.raises(InputRefused, match="sample_from_anchor"):
        shape_from_config(values | {"sample_from_anchor": False})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(dtype: torch.dtype) -> None:
    model = v4_drafter(torch.float32).cast(dtype)
    values = shape_to_config(model.shape, num_anchors=4)
    released = to_release(model.tensors(), 3, dtype)
    assert set(released) == set(released_tensors(values))
    back = from_release(released, values, "here")
    assert set(back) == set(model.tensors())
    for name, value in model.tensors().items():
        assert torch.equal(back[name], value.detach()), name
        assert back[name].dtype == value.dtype, name


def test_what_is_missing_unknown_or_misshapen_is_named() -> None:
    model = v4_drafter(torch.float32)
    values = shape_to_config(model.shape, num_anchors=4)
    released = to_release(model.tensors(), 3, torch.float32)
    released["mtp.1.attn.wkv.weight"] = torch.zeros(2, 2)
    released["mtp.2.confidence_head.proj.bias"] = torch.zeros(1)
    del released["mtp.0.ffn.experts.3.w2.weight"]
    with pytest.raises(InputRefused) as caught:
        from_release(released, values, "here")
    for part in ("mtp.1.attn.wkv.weight has shape (2, 2), expected (8, 32)",
                 "mtp.2.confidence_head.proj.bias is unknown", "mtp.0.ffn.experts.3.w2.weight is missing"):
        assert part in str(caught.value)


def test_quantised_matrices_are_expanded() -> None:
    plain = torch.tensor([[1.0, -0.5, 3.0, 6.0] * 16, [0.0, 2.0, -1.5, -4.0] * 16])  # 2 x 64, exact in FP4
    codes = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}
    nibbles = torch.tensor([[codes[abs(x)] + (8 if x < 0 else 0) for x in row] for row in plain.tolist()])
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    scales = torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)  # 1, 2, 1/2, 4
    wide = torch.randn(130, 200).to(torch.float8_e4m3fn)
    blocks = torch.tensor([[1.0, 0.5], [4.0, 2.0]]).to(torch.float8_e8m0fnu)
    found = dequantised({"mtp.0.a.weight": packed, "mtp.0.a.scale": scales, "mtp.0.b.weight": wide,
                         "mtp.0.b.scale": blocks, "mtp.0.hc_attn_scale": torch.ones(3)}, "here")
    factors = torch.tensor([[1.0] * 32 + [2.0] * 32, [0.5] * 32 + [4.0] * 32])
    assert set(found) == {"mtp.0.a.weight", "mtp.0.b.weight", "mtp.0.hc_attn_scale"}
    assert torch.equal(found["mtp.0.a.weight"], plain * factors)
    assert torch.equal(found["mtp.0.b.weight"][:128, :128], wide.float()[:128, :128])
    assert torch.equal(found["mtp.0.b.weight"][128:, 128:], wide.float()[128:, 128:] * 2.0)
    with pytest.raises(InputRefused, match="has no .scale"):
        dequantised({"mtp.0.b.weight": wide}, "here")
    with pytest.raises(InputRefused, match="expected .2, 2."):
        dequantised({"mtp.0.b.weight": wide, "mtp.0.b.scale": torch.ones(1, 2)}, "here")
