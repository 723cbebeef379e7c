"""The stages against Hugging Face's DeepSeek-V4 layers, used as V4's own drafter uses them; and starting from them."""

from typing import Any

import pytest
import torch
from drafter_cases import pack
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from v4_cases import v4_drafter, v4_shape

from deepspec.drafters.v4.drafter import V4Drafter
from deepspec.drafters.v4.warm_start import _SOURCES
from deepspec.drafters.warm_start import warm_start


def config_of(model: V4Drafter, **changes: Any) -> DeepseekV4Config:
    shape, of = model.shape, model.of
    values: dict[str, Any] = dict(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, moe_intermediate_size=shape.intermediate_size,
        num_hidden_layers=3, layer_types=["sliding_attention"] * 3, mlp_layer_types=["moe"] * 3,
        num_attention_heads=shape.num_heads, num_key_value_heads=1, head_dim=shape.head_dim,
        partial_rotary_factor=of.rope_head_dim / shape.head_dim, q_lora_rank=of.q_lora_rank, o_groups=of.o_groups,
        o_lora_rank=of.o_lora_rank, n_routed_experts=of.num_experts, n_shared_experts=1,
        num_experts_per_tok=of.experts_per_token, sliding_window=64, hc_mult=of.hc_mult,
        hc_sinkhorn_iters=of.hc_sinkhorn_iters, hc_eps=of.hc_eps, rms_norm_eps=shape.rms_norm_eps,
        routed_scaling_factor=of.routed_scaling_factor, swiglu_limit=of.swiglu_limit, max_position_embeddings=256,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=4, index_head_dim=8)
    config = DeepseekV4Config(**values | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


@torch.no_grad()
def copied(model: V4Drafter, config: DeepseekV4Config) -> list[Any]:
    """Three of Hugging Face's layers with the stages' weights."""
    layers = []
    for index, stage in enumerate(model.layers):
        layer = hf.DeepseekV4DecoderLayer(config, index).double()
        theirs = dict(layer.named_parameters())
        own = dict(stage.named_parameters())
        for name, others in _SOURCES.items():
            if others[0] in theirs:
                theirs[others[0]].copy_(own[name])
        theirs["mlp.experts.gate_up_proj"].copy_(torch.cat((own["ffn.experts.w1"], own["ffn.experts.w3"]), dim=1))
        theirs["mlp.gate.weight"].copy_(own["ffn.gate.weight"])
        layer.mlp.gate.e_score_correction_bias.copy_(model.gates[index].bias)
        layers.append(layer)
    return layers


class Context:
    """In the place of a cache: hands out the context's rows before those of the block."""

    def __init__(self, rows: dict[int, Tensor]) -> None:
        self.rows = rows

    def update(self, keys: Tensor, values: Tensor, index: int, **_: Any) -> tuple[Tensor, Tensor]:
        joined = torch.cat((self.rows[index], keys), dim=2)
        return joined, joined


@torch.no_grad()
@pytest.mark.parametrize("anchor", [0, 3, 5, 14])
def test_stages_are_hugging_faces_layers(anchor: int) -> None:
    model = v4_drafter()
    batch = pack(model.shape, ((19, (anchor,)),), dtype=torch.float64)
    config = config_of(model)
    layers, rotary = copied(model, config), hf.DeepseekV4RotaryEmbedding(config).double()
    main = model.project_context(batch.features)[max(0, anchor - 5):anchor]
    rows = {}
    for index, layer in enumerate(layers):
        positions = torch.arange(max(0, anchor - 5), anchor)[None]
        row = layer.self_attn.kv_norm(layer.self_attn.kv_proj(main))[None, None]
        rows[index] = hf.apply_rotary_pos_emb(row, *rotary(main[None], positions, layer_type="main"))
    ids = torch.tensor([[int(batch.input_ids[anchor])] + [model.shape.mask_token_id] * 3])
    streams = model.shared.embed.double()[ids][:, :, None].repeat(1, 1, 4, 1)
    positions = anchor + torch.arange(4)[None]
    angles = rotary(streams[:, :, 0], positions, layer_type="main")
    mask = torch.zeros(1, 1, 4, len(main) + 4, dtype=torch.float64)
    for layer in layers:
        streams = layer(streams, position_embeddings={"main": angles}, position_ids=positions, attention_mask=mask,
                        cache=Context(rows))
    head = hf.DeepseekV4HyperHead(config).double()
    for part in ("fn", "base", "scale"):
        getattr(head, f"hc_{part}").copy_(getattr(model.hc_head, part))
    hidden = model.norm(head(streams))
    # Hugging Face computes angles, mHC and norms in float32 whatever the model's dtype is.
    torch.testing.assert_close(model(batch).hidden, hidden, rtol=1e-4, atol=1e-5)


class Sources(nn.Module):
    """A V4 target's collapse of its streams."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.head = hf.DeepseekV4HyperHead(config)


@torch.no_grad()
def test_warm_start_from_a_v4_target() -> None:
    """All that fits, from the last three of four layers; never the router, whose choices belong to another depth."""
    model = v4_drafter(torch.float32)
    config = config_of(model, num_hidden_layers=4, layer_types=["sliding_attention"] * 2 + [
        "compressed_sparse_attention", "heavily_compressed_attention"], mlp_layer_types=["moe"] * 4)
    torch.manual_seed(7)
    layers, head = [hf.DeepseekV4DecoderLayer(config, index) for index in range(4)], Sources(config).head
    for module in (*layers, head):
        for parameter in module.parameters():
            parameter.normal_()
    before = [gate.weight.clone() for gate in model.gates]
    count = warm_start(model, layers, torch.full((32,), 1.5), head)
    assert count == 3 * (len(dict(model.layers[0].named_parameters())) - 1) + 3
    for stage, layer, old in zip(model.layers, layers[1:], before, strict=True):
        assert torch.equal(stage.attn.wo_a.weight, layer.self_attn.o_a_proj.weight)
        assert torch.equal(stage.attn.wkv.weight, layer.self_attn.kv_proj.weight)
        assert torch.equal(stage.ffn.experts.w3, layer.mlp.experts.gate_up_proj[:, 10:])
        assert torch.equal(stage.ffn.experts.w1, layer.mlp.experts.gate_up_proj[:, :10])
        assert torch.equal(stage.hc_ffn_base, layer.ffn_hc.base)
        assert torch.equal(stage.ffn.gate.weight, old)
    assert torch.equal(model.hc_head.fn, head.hc_fn) and bool((model.norm.weight == 1.5).all())
    assert torch.equal(model.main_proj.weight[:, -32:], torch.eye(32)) and not model.main_proj.weight[:, :-32].any()


@torch.no_grad()
def test_warm_start_from_a_dense_target() -> None:
    """Norms, and the feed-forward as the shared expert where its width is that of an expert."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    model = v4_drafter(torch.float32, v4_shape(num_layers=2))
    config = Qwen3Config(hidden_size=32, intermediate_size=10, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    layers = [Qwen3DecoderLayer(config, index) for index in range(3)]
    assert warm_start(model, layers) == 2 * 5
    assert torch.equal(model.layers[1].ffn.shared_experts.w2.weight, layers[2].mlp.down_proj.weight)
