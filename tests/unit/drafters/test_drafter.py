"""The drafter as a whole: isolation of blocks, parity of training and drafting, checkpoints of others."""

import dataclasses
from typing import Any, Optional, Sequence

import pytest
import torch
from drafter_cases import DOCUMENTS, SHAPE, drafter, loss_and_grads, pack, shape, shared_weights
from torch import Tensor
from torch.nn import functional

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.dspark import DSparkDrafter
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.sequential import block_log_probs, sample_block
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights

HEADS = ("none", "vanilla", "gated", "rnn")


def logits_of(model: DSparkDrafter, output: DrafterOutput) -> Tensor:
    logits = model.base_logits(output.hidden)
    return logits if output.transition is None else logits + functional.linear(output.transition, output.output_factor)


def test_parameters_of_the_published_layout() -> None:
    """Names, shapes and the trainable parameters of Qwen3-4B's drafter."""
    of = DrafterShape(
        "dspark", 2560, 9728, 5, 32, 8, 128, 151936, 1e-6, 1e6, {"rope_type": "default"}, 40960, 7, True, "vanilla",
        256, True, True, 151669, (1, 9, 17, 25, 33), 36, 2560, "qwen3",
    )
    with torch.device("meta"):
        weight = torch.empty(151936, 2560)
        model = build_drafter(of, SharedWeights(weight, weight, ""))
    expected = {
        "fc.weight": (2560, 12800), "hidden_norm.weight": (2560,), "norm.weight": (2560,),
        "markov_head.markov_w1.weight": (151936, 256), "markov_head.markov_w2.weight": (151936, 256),
        "confidence_head.proj.weight": (1, 2816), "confidence_head.proj.bias": (1,),
    }
    for layer in (f"layers.{index}" for index in range(5)):
        expected.update({
            f"{layer}.input_layernorm.weight": (2560,), f"{layer}.post_attention_layernorm.weight": (2560,),
            f"{layer}.self_attn.q_proj.weight": (4096, 2560), f"{layer}.self_attn.k_proj.weight": (1024, 2560),
            f"{layer}.self_attn.v_proj.weight": (1024, 2560), f"{layer}.self_attn.o_proj.weight": (2560, 4096),
            f"{layer}.self_attn.q_norm.weight": (128,), f"{layer}.self_attn.k_norm.weight": (128,),
            f"{layer}.mlp.gate_proj.weight": (9728, 2560), f"{layer}.mlp.up_proj.weight": (9728, 2560),
            f"{layer}.mlp.down_proj.weight": (2560, 9728),
        })
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == 615_221_249


@pytest.mark.parametrize("head,extra", [
    ("none", {}),
    ("gated", {"markov_head.gate_proj.weight": (6, 38), "markov_head.gate_proj.bias": (6,)}),
    ("rnn", {"markov_head.joint_proj.weight": (18, 44), "markov_head.joint_proj.bias": (18,)}),
])
def test_parameters_of_the_other_heads(head: str, extra: dict[str, Any]) -> None:
    names = {name: tuple(value.shape) for name, value in drafter(shape(head=head)).state_dict().items()}
    found = {name: size for name, size in names.items() if name.startswith("markov_head") and "markov_w" not in name}
    assert found == extra
    assert any("markov_w" in name for name in names) == (head != "none")
    assert names["confidence_head.proj.weight"] == (1, 32 if head == "none" else 38)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_drafting_equals_the_teacher_forced_pass(head: str, from_anchor: bool, window: Optional[int]) -> None:
    """Step by step on the data's own tokens, with cached context, both slot conventions, with and without window."""
    of = shape(head=head, sample_from_anchor=from_anchor, block_size=5, sliding_window=window)
    model = drafter(of)
    batch = pack(of, DOCUMENTS)
    blocks = batch.blocks
    with torch.no_grad():
        output = model(batch)
        assert output.hidden.shape == (len(blocks), of.draft_length, of.hidden_size)
        expected = logits_of(model, output)
        keys, values = model.context_kv(model.project_context(batch.features), batch.positions)
        lengths = blocks.anchor_rows - blocks.context_starts
        padded = torch.full((2, of.num_layers, len(blocks), int(lengths.max()) + 2, of.num_kv_heads, of.head_dim), 50.0)
        for block, (start, length) in enumerate(zip(blocks.context_starts.tolist(), lengths.tolist(), strict=True)):
            padded[0, :, block, :length] = keys[:, start:start + length]
            padded[1, :, block, :length] = values[:, start:start + length]
        hidden = model.block_hidden(blocks.anchor_ids, blocks.anchor_positions, padded[0], padded[1], lengths)
        torch.testing.assert_close(hidden, output.hidden, rtol=1e-5, atol=1e-5)
        steps: list[Tensor] = []

        def choose(position: int, logits: Tensor) -> Tensor:
            steps.append(logits)
            return blocks.label_ids[:, position]

        drafted = sample_block(model, blocks.anchor_ids, output.hidden, choose)
    torch.testing.assert_close(torch.stack(steps, dim=1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drafted.confidence_logits, output.confidence_logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(drafted.token_ids, blocks.label_ids)


def test_many_requests_draft_the_same_tokens_as_few() -> None:
    model = drafter()
    hidden, anchors = torch.randn(70, 4, 32), torch.randint(0, 60, (70,))

    def choose(position: int, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    many, few = sample_block(model, anchors, hidden, choose), sample_block(model, anchors[:9], hidden[:9], choose)
    assert torch.equal(many.token_ids[:9], few.token_ids)


@pytest.mark.parametrize("head", HEADS)
def test_packed_loss_is_the_sum_of_the_separate_ones(head: str) -> None:
    """No block spans two documents."""
    of = shape(head=head)
    model = drafter(of)
    whole = pack(of, DOCUMENTS)
    loss, grads = loss_and_grads(model, whole, whole)
    parts = [loss_and_grads(model, pack(of, (document,)), whole) for document in DOCUMENTS]
    torch.testing.assert_close(sum(part for part, _ in parts), loss, rtol=1e-5, atol=1e-6)
    for index, grad in enumerate(grads):
        torch.testing.assert_close(sum(part[index] for _, part in parts), grad, rtol=1e-4, atol=1e-5)


def test_other_blocks_and_later_tokens_change_nothing() -> None:
    model = drafter()
    alone = model(pack(SHAPE, ((23, (9,)),))).hidden
    batch = pack(SHAPE, ((17, (3, 5)), (23, (0, 3, 9, 9, 10, 21)), (9, (1,))))
    torch.testing.assert_close(model(batch).hidden[4:5], alone, rtol=1e-5, atol=1e-6)
    features = batch.features.clone()
    features[17 + 9:] = torch.nan  # the anchor's own row and all behind it
    features[:17] = torch.nan  # another document
    blocks = dataclasses.replace(batch.blocks, **{
        field.name: getattr(batch.blocks, field.name)[4:5] for field in dataclasses.fields(batch.blocks)
    })
    poisoned = model(dataclasses.replace(batch, features=features, blocks=blocks)).hidden
    torch.testing.assert_close(poisoned, alone, rtol=1e-5, atol=1e-6)


def test_the_token_before_the_anchor_is_seen() -> None:
    model = drafter()
    batch = pack(SHAPE, ((23, (9,)),))
    features = batch.features.clone()
    features[8] += 1.0
    changed = model(dataclasses.replace(batch, features=features)).hidden
    assert (changed - model(batch).hidden).abs().max() > 1e-4


def test_published_dflash_does_not_predict_from_the_anchor_slot() -> None:
    """Slot j+1 sits at position p+j+1 and predicts that position's token; the anchor slot predicts nothing."""
    of = shape(algorithm="dflash", head="none", confidence_head=False, sample_from_anchor=False)
    model = drafter(of)
    batch = pack(of, ((12, (4,)),))
    assert of.draft_length == of.block_size - 1 and batch.blocks.label_ids.shape == (1, 3)
    output = model(batch)
    with_anchor = drafter(shape(algorithm="dflash", head="none", confidence_head=False))
    with_anchor.load_state_dict(model.state_dict())
    full = with_anchor(pack(with_anchor.shape, ((12, (4,)),))).hidden
    torch.testing.assert_close(output.hidden, full[:, 1:])
    assert output.transition is None and output.output_factor is None and output.confidence_logits is None


def test_casting_leaves_shared_weights_and_rope_alone() -> None:
    model = drafter()
    before, positions = model.shared, torch.arange(4096)
    table = model._rotary(positions)
    model.to(torch.bfloat16)
    assert model.shared is before and model.shared.embed.dtype == torch.float32
    for ours, reference in zip(model._rotary(positions), table, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, reference)
    output = model(pack(SHAPE, DOCUMENTS))
    assert output.hidden.dtype == torch.bfloat16 and output.confidence_logits.dtype == torch.float32
    assert model.base_logits(output.hidden).dtype == torch.float32
    assert not any("embed" in name or "lm_head" in name for name in model.state_dict())


def test_bfloat16_is_close_to_float32() -> None:
    of = shape(head="rnn")
    batch = pack(of, DOCUMENTS)
    exact = drafter(of)
    half = drafter(of).to(torch.bfloat16)
    with torch.no_grad():
        error = (half(batch).hidden.float() - exact(batch).hidden).abs().mean()
    assert error < 0.03


def reference_hidden(model: DSparkDrafter, batch: TrainingBatch) -> Tensor:
    """The same drafter built from transformers' own Qwen3 parts: one sequence, an explicit mask over everything."""
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    of, blocks, size = model.shape, batch.blocks, len(batch.input_ids)
    config = Qwen3Config(
        vocab_size=of.vocab_size, hidden_size=of.hidden_size, intermediate_size=of.intermediate_size,
        num_hidden_layers=of.num_layers, num_attention_heads=of.num_heads, num_key_value_heads=of.num_kv_heads,
        head_dim=of.head_dim, rms_norm_eps=of.rms_norm_eps, rope_parameters=dict(of.rope_parameters),
        attn_implementation="eager",
    )
    slots = torch.arange(of.block_size)
    near = (blocks.anchor_positions[:, None] + slots).flatten()
    owner = torch.arange(len(blocks)).repeat_interleave(of.block_size)
    rows, starts, stops = torch.arange(size), blocks.context_starts[owner, None], blocks.anchor_rows[owner, None]
    starts = starts if of.sliding_window is None else torch.maximum(starts, stops - of.sliding_window)
    allowed = torch.cat(((rows >= starts) & (rows < stops), owner[:, None] == owner), dim=1)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.cat((batch.positions, near))[None])
    ids = torch.where(slots == 0, blocks.anchor_ids[:, None], of.mask_token_id).flatten()
    states, context = model.shared.embed[ids][None], model.hidden_norm(model.fc(batch.features))[None]
    for index, layer in enumerate(model.layers):
        theirs = qwen3.Qwen3DecoderLayer(config, index)
        theirs.load_state_dict(layer.state_dict())
        attn, normed = theirs.self_attn, theirs.input_layernorm(states)
        both = torch.cat((context, normed), dim=1)
        query = attn.q_norm(attn.q_proj(normed).view(1, -1, of.num_heads, of.head_dim)).transpose(1, 2)
        key = attn.k_norm(attn.k_proj(both).view(1, -1, of.num_kv_heads, of.head_dim)).transpose(1, 2)
        value = attn.v_proj(both).view(1, -1, of.num_kv_heads, of.head_dim).transpose(1, 2)
        query, _ = qwen3.apply_rotary_pos_emb(query, query, cos[:, size:], sin[:, size:])
        key, _ = qwen3.apply_rotary_pos_emb(key, key, cos, sin)
        attended, _ = qwen3.eager_attention_forward(attn, query, key, value, mask, scaling=attn.scaling)
        states = states + attn.o_proj(attended.reshape(1, -1, of.num_heads * of.head_dim))
        states = states + theirs.mlp(theirs.post_attention_layernorm(states))
    return model.norm(states).view(len(blocks), of.block_size, -1)


def test_window_is_that_of_the_qwen3_block_under_its_mask() -> None:
    of = shape(sliding_window=5)
    model, batch = drafter(of), pack(of, DOCUMENTS)
    with torch.no_grad():
        torch.testing.assert_close(model(batch).hidden, reference_hidden(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
])
def test_arithmetic_is_that_of_the_qwen3_block(rope: dict[str, Any]) -> None:
    of = shape(rope_parameters=rope)
    model = drafter(of)
    batch = pack(of, DOCUMENTS)
    with torch.no_grad():
        torch.testing.assert_close(model(batch).hidden, reference_hidden(model, batch), rtol=1e-4, atol=1e-5)


def test_block_log_probs_is_equation_4() -> None:
    logits, bias = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    torch.testing.assert_close(block_log_probs(logits, bias).exp(), torch.softmax(logits + bias, -1))
    torch.testing.assert_close(block_log_probs(logits, None).exp(), torch.softmax(logits, -1))


def test_bias_starts_near_zero() -> None:
    torch.manual_seed(0)
    of = shape(vocab_size=500, markov_rank=256)
    model = build_drafter(of, shared_weights(of))
    assert model.sequential.transition_bias(torch.arange(50)).abs().max() < 0.05


def test_softcap_comes_before_the_bias() -> None:
    of = shape(final_logit_softcap=2.0)
    model = drafter(of)
    hidden = torch.randn(3, 32) * 20
    assert model.base_logits(hidden).abs().max() <= 2.0
    logits: Sequence[Tensor] = []

    def choose(position: int, step: Tensor) -> Tensor:
        logits.append(step)
        return step.argmax(-1)

    sample_block(model, torch.zeros(3, dtype=torch.int64), hidden[:, None], choose)
    expected = model.base_logits(hidden) + model.sequential.transition_bias(torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(logits[0], expected)


def test_a_partitioned_factor_is_handed_out_as_a_copy() -> None:
    """ZeRO-3 empties the parameter after the module's call; a plain parameter is not copied."""
    head = drafter().sequential
    assert head.output_factor() is head.markov_w2.weight
    head.markov_w2.weight.ds_id = 0
    assert head.output_factor().data_ptr() != head.markov_w2.weight.data_ptr()
    assert head.output_factor().requires_grad
