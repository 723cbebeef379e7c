"""EAGLE-3 and MTP: training is decoding fed the same tokens, nobody sees what comes later, gradients are right."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_cases import loss_and_grads, pack
from recurrent_cases import ALGORITHMS, DOCUMENTS, Reference, recurrent_drafter, recurrent_shape
from torch import Tensor

from deepspec.config.schema import DrafterConfig, ObjectiveConfig, TargetConfig
from deepspec.data.batch import AnchorBlocks, FeatureSample, Sample, TrainingBatch
from deepspec.data.collate import collate
from deepspec.decoding.recurrent import RecurrentDraftState
from deepspec.drafters import attention, autoregressive
from deepspec.drafters.autoregressive import AutoregressiveDrafter
from deepspec.drafters.registry import shape_from
from deepspec.drafters.warm_start import warm_start
from deepspec.errors import ConfigError
from deepspec.objective import drafter_loss, window_weights
from deepspec.targets.sampling import Sampling
from deepspec.targets.spec import TargetSpec


def batch_of(model: AutoregressiveDrafter, documents: Any = DOCUMENTS, **options: Any) -> TrainingBatch:
    return pack(model.shape, documents, dtype=torch.float64, **options)


def document(batch: TrainingBatch, block: int) -> tuple[Tensor, list[int], int]:
    """Features and ids of a block's document, and its anchor's position."""
    start = int(batch.blocks.context_starts[block])
    stop = next(end for end in batch.document_starts if end > start)
    return batch.features[start:stop], batch.input_ids[start:stop].tolist(), int(batch.blocks.anchor_positions[block])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_the_arithmetic_written_out(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch, reference = batch_of(model), Reference(model)
    hidden = model(batch).hidden.detach()
    for block in range(len(batch.blocks)):
        expected = reference.chain(*document(batch, block), batch.blocks.previous_ids[block].tolist())
        torch.testing.assert_close(hidden[block], expected, rtol=1e-6, atol=1e-6)  # RoPE tables are float32


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_drafting_fed_the_same_tokens(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch = batch_of(model)
    hidden = model(batch).hidden.detach()
    for block in range(len(batch.blocks)):
        features, ids, anchor = document(batch, block)
        state = RecurrentDraftState(model, 1, tokenizer_size=61)
        for part in (slice(0, anchor // 2), slice(anchor // 2, anchor)):
            state.append(0, features[part], ids[part.start + 1:part.stop + 1])
        state._flush([0])
        keys, values, lengths = state._context([0])
        chains, fed = model.open_chains(keys[0], values[0], lengths - 1), state._last
        for step, token in enumerate(batch.blocks.previous_ids[block]):
            found, fed = model.draft_step(chains, step, fed, token[None])
            torch.testing.assert_close(found[0].detach(), hidden[block, step], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_proposal_is_the_chain_of_its_own_tokens(algorithm: str) -> None:
    """Three ragged rows at once; the ids proposed are put back into the written-out arithmetic."""
    model = recurrent_drafter(algorithm)
    reference, generator = Reference(model), torch.Generator().manual_seed(4)
    state = RecurrentDraftState(model, 4, tokenizer_size=58, capacity=4)
    rows, anchors = [3, 0, 2], [5, 1, 12]
    width = len(model.shape.feature_layers) * 32
    texts = [torch.randint(0, 58, (anchor + 1,), generator=generator).tolist() for anchor in anchors]
    features = [torch.randn(anchor, width, generator=generator, dtype=torch.float64) for anchor in anchors]
    for row, text, known in zip(rows, texts, features, strict=True):
        state.append(row, known, text[1:])
    uniforms = torch.rand(3, 4, generator=generator)
    proposal = state.propose(rows, [text[-1] for text in texts], uniforms, Sampling(temperature=1.0))
    assert int(proposal.ids.max()) < 58 and proposal.probs.shape == (3, 4, 61)
    torch.testing.assert_close(proposal.probs.gather(2, proposal.ids[..., None])[..., 0], proposal.token_probs)
    for i, (text, known, anchor) in enumerate(zip(texts, features, anchors, strict=True)):
        assert proposal.previous_ids[i].tolist() == [text[-1], *proposal.ids[i, :-1].tolist()]
        expected = reference.chain(known, text, anchor, proposal.previous_ids[i].tolist())
        torch.testing.assert_close(proposal.hidden[i], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nobody_sees_what_comes_later_or_another_document(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch = batch_of(model)
    known, row = model(batch).hidden.detach(), int(batch.blocks.anchor_rows[3])  # anchor 9 of the first document
    for step in range(4):
        ids, previous = batch.input_ids.clone(), batch.blocks.previous_ids.clone()
        ids[row + step + 1:] = (ids[row + step + 1:] + 7) % 60
        previous[3, step + 1:] = (previous[3, step + 1:] + 7) % 60
        features = batch.features.clone()
        features[row:] += 1.0  # from the anchor on
        changed = replace(batch, input_ids=ids, features=features,
                          blocks=replace(batch.blocks, previous_ids=previous))
        hidden = model(changed).hidden.detach()
        assert torch.equal(hidden[3, :step + 1], known[3, :step + 1])
        assert step == 3 or not torch.allclose(hidden[3, step + 1], known[3, step + 1])
    earlier = batch.features.clone()
    earlier[row - 1] += 1.0
    assert not torch.allclose(model(replace(batch, features=earlier)).hidden[3, 0], known[3, 0])
    alone = model(batch_of(model, (DOCUMENTS[3],))).hidden
    torch.testing.assert_close(alone, known[-2:], rtol=1e-9, atol=1e-9)
    alone = model(batch_of(model, ((17, (9,)),))).hidden
    torch.testing.assert_close(alone[0], known[3], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_anchor_without_a_row_before_it_knows_its_own_token_alone(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch = batch_of(model, ((6, ()), (9, (0, 4))))
    known = model(batch).hidden.detach()
    assert torch.isfinite(known).all()
    other = replace(batch, features=batch.features + 1.0, input_ids=(batch.input_ids + 5) % 60)
    hidden = model(other).hidden.detach()
    assert torch.equal(hidden[0], known[0]) and not torch.allclose(hidden[1], known[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_slopes(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch = batch_of(model)
    loss, grads = loss_and_grads(model, batch, batch)
    generator = torch.Generator().manual_seed(2)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        ends = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.add_(way, alpha=sign * 1e-6)
                ends.append(float(loss_and_value(model, batch)))
                parameter.add_(way, alpha=-sign * 1e-6)
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope - float((grad * way).sum())) < 1e-5 * max(1.0, abs(slope))


def loss_and_value(model: AutoregressiveDrafter, batch: TrainingBatch) -> Tensor:
    objective = ObjectiveConfig()
    denominators = window_weights(batch.blocks, objective, model.shape.trained_length)
    return drafter_loss(model(batch), batch, model.shared, objective, denominators, model.shape).loss


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_packs_are_one_and_checkpointing_changes_nothing(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    whole = batch_of(model)
    loss, grads = loss_and_grads(model, whole, whole)
    parts = [loss_and_grads(model, batch_of(model, part), whole) for part in (DOCUMENTS[:1], DOCUMENTS[1:])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    for grad, first, second in zip(grads, parts[0][1], parts[1][1], strict=True):
        torch.testing.assert_close(first + second, grad, rtol=1e-9, atol=1e-12)
    saving = recurrent_drafter(algorithm, activation_checkpointing=True)
    for grad, other in zip(grads, loss_and_grads(saving, whole, whole)[1], strict=True):
        torch.testing.assert_close(other, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pack_without_weight_gives_every_parameter_an_exact_zero(algorithm: str) -> None:
    model = recurrent_drafter(algorithm)
    batch = batch_of(model, ((5, (2,)),))
    nothing = replace(batch, blocks=replace(batch.blocks, mask=torch.zeros_like(batch.blocks.mask)))
    loss, grads = loss_and_grads(model, nothing, batch)
    assert float(loss) == 0.0 and all(bool((grad == 0).all()) for grad in grads)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_other_backend_has_the_same_mask(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs forward only on the CPU, and without a kernel."""
    model = recurrent_drafter(algorithm, torch.float32)
    batch = pack(model.shape, DOCUMENTS)
    with torch.no_grad():
        known = model(batch).hidden
        monkeypatch.setattr(autoregressive, "choose_backend", lambda *_: "flex")
        torch.testing.assert_close(model(batch).hidden, known, rtol=1e-4, atol=1e-5)
    plans = attention.plan_chain(batch.blocks.anchor_rows, batch.blocks.context_starts, 50, steps=3, heads=4,
                                 backend="flex")
    assert [plan.mask.seq_lengths[1] for plan in plans] == [50 + len(batch.blocks) * (step + 1) for step in range(3)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("unroll", [1, 6])
def test_steps_of_training_need_not_be_the_draft_length(algorithm: str, unroll: int) -> None:
    model = recurrent_drafter(algorithm, unroll=unroll)
    assert (model.shape.draft_length, model.shape.trained_length) == (4, unroll)
    batch = pack(replace(model.shape, block_size=unroll), DOCUMENTS, dtype=torch.float64)
    hidden, longer = model(batch).hidden, recurrent_drafter(algorithm)(batch_of(model)).hidden
    common = min(4, unroll)
    torch.testing.assert_close(hidden[:, :common], longer[:, :common], rtol=1e-9, atol=1e-9)
    assert torch.isfinite(loss_and_value(model, batch))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_stays_close(algorithm: str) -> None:
    exact = recurrent_drafter(algorithm, torch.float32)
    batch = pack(exact.shape, DOCUMENTS)
    half = recurrent_drafter(algorithm, torch.float32).to(torch.bfloat16)
    with torch.no_grad():
        assert half(batch).hidden.dtype == torch.bfloat16
        assert (half(batch).hidden.float() - exact(batch).hidden).abs().mean() < 0.06


SPEC = TargetSpec("qwen3", 32, 48, 6, 4, 2, 8, 61, 1e-6, 10000.0, {"rope_type": "default"}, 256)


def built(layers: list[int], **changes: Any) -> Any:
    drafter = DrafterConfig(**{"head": "none", "confidence_head": False, **changes})
    return shape_from(SPEC, TargetConfig(feature_layers=layers, mask_token_id=3), drafter)


def test_one_layer_whatever_the_experiment_says() -> None:
    for algorithm, layers in (("eagle3", [1, 3]), ("mtp", [5])):
        found = built(layers, algorithm=algorithm, num_layers=5, block_size=1)
        assert (found.num_layers, found.draft_length, found.head, found.autoregressive) == (1, 1, "none", True)
    assert recurrent_shape("eagle3").autoregressive and not built([1], algorithm="dflash").autoregressive


@pytest.mark.parametrize("changes, said", [
    ({"layers": [1, 5], "algorithm": "eagle3"}, "between 0 and 4"),
    ({"layers": [1], "algorithm": "mtp"}, r"target.feature_layers=\[5\]"),
    ({"layers": [1], "algorithm": "eagle3", "head": "vanilla"}, "neither sequential nor confidence head"),
    ({"layers": [1], "algorithm": "eagle3", "sample_from_anchor": False}, "from the anchor on"),
    ({"layers": [1], "algorithm": "eagle3", "sliding_window": 8}, "chooses its context itself"),
])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(**changes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("prompt, answer", [(1, 3), (7, 5)])
def test_the_end_of_the_prompt_is_taught(algorithm: str, prompt: int, answer: int) -> None:
    """Counted by hand: anchors are all answer tokens but the last, and the first of them starts at the prompt's end."""
    model, length = recurrent_drafter(algorithm), prompt + answer
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(0, 60, (length,), generator=generator)
    width = len(model.shape.feature_layers) * 32
    features = torch.randn(length, width, generator=generator, dtype=torch.float64).requires_grad_()
    sample = Sample("one", "chat", ids, torch.arange(length) >= prompt)
    last = torch.randn(length, 32, generator=generator, dtype=torch.float64)
    batch = collate([FeatureSample(sample, features, last)], num_anchors=99, draft_length=4, seed=0, epoch=0)
    blocks = batch.blocks
    assert blocks.anchor_rows.tolist() == list(range(prompt, length - 1))
    assert int(blocks.mask.sum()) == sum(min(4, length - 1 - anchor) for anchor in range(prompt, length - 1))
    assert sorted(set(blocks.label_ids[blocks.mask].tolist())) == sorted(set(ids[prompt + 1:].tolist()))
    (slope,) = torch.autograd.grad(loss_and_value(model, batch), features)
    touched = (slope.abs().sum(dim=1) > 0).tolist()
    assert touched == [row <= length - 3 for row in range(length)]  # the last chain starts at anchor length - 2
    first = replace(batch, blocks=AnchorBlocks(**{
        name: getattr(blocks, name)[:1] for name in AnchorBlocks.__dataclass_fields__}))
    (slope,) = torch.autograd.grad(loss_and_value(model, first), features)
    assert bool(slope[prompt - 1].abs().sum() > 0) and bool((slope[prompt:] == 0).all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_warm_start_takes_what_fits(algorithm: str) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    config = Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, vocab_size=61)
    layers = [Qwen3DecoderLayer(config, index) for index in range(3)]
    model = recurrent_drafter(algorithm, torch.float32)
    assert warm_start(model, layers, torch.full((32,), 1.5)) == 11
    last, attention_of = layers[-1], model.layer.self_attn
    assert torch.equal(model.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(attention_of.q_proj.weight[:, -32:], last.self_attn.q_proj.weight)
    hidden, _ = model.predict(torch.randn(3, 32))
    assert torch.isfinite(hidden).all()
    if algorithm == "eagle3":
        features = torch.randn(3, 64)
        assert torch.equal(model.project_context(features), features[:, 32:])
        assert model.norm.weight.unique().tolist() == [1.5]
    else:
        assert torch.equal(model.layer.input_proj.weight[:, :32], torch.eye(32))
