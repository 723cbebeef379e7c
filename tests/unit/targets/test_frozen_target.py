"""The frozen target against Hugging Face's own forward."""

import hashlib

import pytest
import torch
from tiny_targets import FAMILIES, ROWS, assert_near, random_ids, reference, tiny_model, tiny_target, tiny_tokenizer

from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.frozen import FrozenTarget


@pytest.mark.parametrize("family", FAMILIES)
def test_features_last_hidden_and_logits_are_those_of_hugging_face(family: str) -> None:
    ids, target = random_ids(33), tiny_target(family)
    features, last_hidden, expected = reference(family, ids)
    result = target.encode(ids, [33])
    assert_near(result.features, features)
    assert_near(result.last_hidden, last_hidden)
    logits = target.logits(result.last_hidden)
    assert logits.dtype == torch.float32 and logits.shape == (33, ROWS)
    real = target.tokenizer_size
    assert_near(logits[:, :real], expected[:, :real])
    assert target.self_check() < 2e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_rows_times_the_scale_enter_the_first_layer(family: str) -> None:
    """What a drafter that shares the embedding computes is what the target computes."""
    model, ids, entered = tiny_model(family), random_ids(9), []
    model.get_decoder().layers[0].register_forward_pre_hook(
        lambda _module, arguments, keywords: entered.append((arguments or (keywords["hidden_states"],))[0]),
        with_kwargs=True)
    with torch.no_grad():
        model(ids[None], use_cache=False)
    target = tiny_target(family)
    streams = entered[0][0] if entered[0].dim() == 3 else entered[0][0].unbind(1)[-1]
    assert_near(target.embed_weight[ids] * target.spec.embed_scale, streams)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    target = tiny_target(family)
    lengths = [1, 20, 5, 13]
    documents = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    packed = target.encode(torch.cat(documents), lengths)
    alone = [target.encode(document, [len(document)]) for document in documents]
    assert_near(packed.features, torch.cat([one.features for one in alone]))
    assert_near(packed.last_hidden, torch.cat([one.last_hidden for one in alone]))


def test_padding_rows_are_never_probable() -> None:
    target = tiny_target()
    assert target.tokenizer_size == len(tiny_tokenizer()) < ROWS == target.spec.vocab_size
    logits = target.logits(target.encode(random_ids(5), [5]).last_hidden)
    assert torch.isneginf(logits[:, target.tokenizer_size:]).all()
    assert torch.isfinite(logits[:, :target.tokenizer_size]).all()


def test_an_id_outside_the_embedding_is_named() -> None:
    target = tiny_target()
    with pytest.raises(InputRefused, match=rf"id {ROWS} at index 2 .* {ROWS} rows"):
        target.encode(torch.tensor([5, 6, ROWS, 7]), [4])
    with pytest.raises(InputRefused, match="id -1 at index 0"):
        target.step(torch.tensor([-1]), [0], [1], target.new_cache(1, 4))
    target.encode(torch.tensor([ROWS - 1]), [1])  # a padding row may be read, for instance as the mask token


@pytest.mark.parametrize("layers, message", [
    ((0, 3), "layer 3 is the last"), ((1, 4), "4 is not a decoder layer"), ((-1, 1), "-1 is not"),
    ((2, 1), r"ascending.*\[1, 2\]"), ((1, 1), "without repetition"),
])
def test_feature_layers_are_checked(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrozenTarget(tiny_model(), tiny_tokenizer(), feature_layers=layers)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_v4"])
def test_the_last_layer_alone_is_the_last_hidden_state(family: str) -> None:
    """After the final norm, as Hugging Face has it there, in packed passes and in cached steps."""
    model = tiny_model(family)
    last = model.config.get_text_config().num_hidden_layers - 1
    target, ids = FrozenTarget(model, tiny_tokenizer(), feature_layers=(last,)), random_ids(20)
    packed, cache = target.encode(ids, [20]), target.new_cache(1, 20)
    assert_near(packed.features, reference(family, ids)[1])
    assert torch.equal(packed.features, packed.last_hidden)
    steps = [target.step(ids[:11], [0], [11], cache), target.step(ids[11:], [0], [9], cache)]
    assert_near(torch.cat([step.features for step in steps]), packed.features)
    assert target.encode(ids, [20], features=False).features.shape == (20, 0)


@pytest.mark.parametrize("layers", [(1, 2, 3), (3,)])
def test_the_last_of_several_streams_is_taken_before_they_are_weighed(layers: tuple[int, ...]) -> None:
    target, ids = FrozenTarget(tiny_model("deepseek_v4"), tiny_tokenizer(), feature_layers=layers), random_ids(20)
    features, last_hidden, _ = reference("deepseek_v4", ids, layers)
    result, cache = target.encode(ids, [20]), target.new_cache(1, 20)
    assert_near(result.features, features)
    assert_near(result.last_hidden, last_hidden)
    assert float((result.features[:, -64:] - last_hidden).abs().max()) > 0.1
    steps = [target.step(ids[:11], [0], [11], cache), target.step(ids[11:], [0], [9], cache)]
    assert_near(torch.cat([step.features for step in steps]), features)
    with pytest.raises(InputRefused, match="several residual streams"):
        target.final_norm(result.features[:, -64:])


def test_an_unknown_model_type_lists_the_families() -> None:
    model = tiny_model()
    model.config.model_type = "mamba"
    with pytest.raises(InputRefused, match=r"model_type='mamba'.*gpt_oss \(gpt-oss\).*docs/adding-a-target.md"):
        FrozenTarget(model, tiny_tokenizer(), name="mine")


@pytest.mark.parametrize("mask", [-1, ROWS])
def test_the_mask_token_must_be_a_row(mask: int) -> None:
    with pytest.raises(ConfigError, match=f"mask_token_id={mask} is not a row.*{ROWS} rows"):
        FrozenTarget(tiny_model(), tiny_tokenizer(), mask_token_id=mask)


def test_an_unknown_kind_of_attention_is_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(InputRefused, match="chunked_attention"):
        FrozenTarget(model, tiny_tokenizer())


def test_self_check_refuses_a_model_with_another_head() -> None:
    target = tiny_target()
    target.lm_head_weight = target.lm_head_weight * 1.5  # as if the logits were scaled elsewhere in the model
    with pytest.raises(InputRefused, match="do not reproduce its logits"):
        target.self_check()


def test_hidden_states_of_a_sample_are_compared_with_the_logits_of_the_model() -> None:
    target, ids = tiny_target(), random_ids(9)
    hidden = target.encode(ids, [9]).last_hidden
    assert target.check_sample(ids, hidden) < 1e-3
    with pytest.raises(InputRefused, match="do not reproduce its logits"):
        target.check_sample(ids, hidden.roll(1, dims=0))  # those of the token before
    with pytest.raises(InputRefused, match="do not reproduce its logits"):
        target.check_sample(ids, hidden * float("nan"))


def test_nothing_is_trainable_and_training_leaves_the_target_alone() -> None:
    target = tiny_target()
    before = target.fingerprint
    result = target.encode(random_ids(6), [6])
    tensors = [target.embed_weight, target.lm_head_weight, result.features, result.last_hidden]
    tensors.extend(target.layers.parameters())
    assert not any(tensor.requires_grad for tensor in tensors)
    factor = torch.nn.Parameter(torch.ones(64))
    (result.last_hidden * factor @ target.lm_head_weight.T).sum().backward()  # no inference-mode tensors among them
    assert factor.grad is not None and target.lm_head_weight.grad is None
    del target.__dict__["fingerprint"]
    assert target.fingerprint == before


def test_fingerprint_sees_every_weight() -> None:
    first = tiny_target().fingerprint
    assert first == tiny_target().fingerprint and len(first) == hashlib.sha256().digest_size * 2
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[-1, -1] += 1e-6
    assert FrozenTarget(model, tiny_tokenizer()).fingerprint != first
    assert tiny_target("qwen3_tied").fingerprint != first


def test_features_can_be_skipped_and_leave_nothing_behind() -> None:
    target = tiny_target()
    ids = random_ids(4)
    full = target.encode(ids, [4])
    bare = target.encode(ids, [4], features=False)
    assert bare.features.shape == (4, 0)
    torch.testing.assert_close(bare.last_hidden, full.last_hidden)
    assert target._sink is None


def test_lengths_must_fit() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="sum to the 4 tokens"):
        target.encode(random_ids(4), [2, 1])
    with pytest.raises(ValueError, match="positive"):
        target.encode(random_ids(4), [4, 0])
