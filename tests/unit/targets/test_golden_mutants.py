"""What the golden tests would miss if the tiny targets were too tame: each mistake must be visible in their numbers."""

from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
from tiny_targets import FEATURES, assert_near, random_ids, reference, tiny_model, tiny_target

from deepspec.targets import attention, frozen, passes, sink
from deepspec.targets.attention import AttentionOptions
from deepspec.targets.frozen import FrozenTarget

Mutation = Callable[[pytest.MonkeyPatch], Any]


def _options(**changes: object) -> Mutation:
    """Attention that ignores some of a layer's options."""
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(attention, "AttentionOptions",
                      lambda **given: AttentionOptions(**(given | changes)))  # type: ignore[arg-type]
    return mutate


def _spec(**changes: object) -> Mutation:
    """A head that ignores some of the target's constants."""
    def mutate(patch: pytest.MonkeyPatch) -> None:
        own = frozen.head_logits
        patch.setattr(frozen, "head_logits", lambda hidden, head, spec: own(hidden, head, replace(spec, **changes)))
    return mutate


def _first_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sink, "layer_output", lambda output: (output[0] if isinstance(output, tuple) else output)[0, :, 0])


def _leak(patch: pytest.MonkeyPatch) -> None:
    """Documents that see the one before."""
    patch.setattr(passes, "DocumentLayout", lambda lengths: attention.DocumentLayout((sum(lengths),)))
    patch.setattr(passes.RowPass, "encode", lambda self, ids, lengths, sink: _together(self, ids, sink))


def _together(row_pass: passes.RowPass, ids: torch.Tensor, into: Any) -> torch.Tensor:
    if into is not None:
        into.expect(slice(0, len(ids)))
    return row_pass._decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]


def _compare(target: FrozenTarget, family: str) -> None:
    """The golden comparison, of two documents laid end to end."""
    parts = [random_ids(20), random_ids(13, 1)]
    result = target.encode(torch.cat(parts), [20, 13])
    expected = [torch.cat(values) for values in zip(*(reference(family, ids, FEATURES) for ids in parts))]
    real = target.tokenizer_size
    assert_near(result.features, expected[0])
    assert_near(result.last_hidden, expected[1])
    assert_near(target.logits(result.last_hidden)[:, :real], expected[2][:, :real])


@pytest.mark.parametrize("family, mutation", [
    ("gemma2", _options(softcap=None)), ("gemma2", _options(window=None)), ("gemma2", _options(scale=1.0)),
    ("gemma2", _spec(final_logit_softcap=None)), ("gemma4_text", _spec(final_logit_softcap=None)),
    ("gemma3_text", _options(window=None)), ("gemma4_text", _options(window=None)),
    ("mistral_window", _options(window=None)), ("mistral_window", _options(window=8)),
    ("phi3", _options(window=None)), ("phi3", _leak),
    ("gpt_oss", _options(sinks=None)), ("gpt_oss", _options(window=None)), ("granite", _spec(logit_scale=1.0)),
    ("deepseek_v3", _options(scale=20 ** -0.5)), ("deepseek_v4", _first_stream),
    ("qwen3", _leak), ("deepseek_v3", _leak), ("qwen3_5_text", _leak), ("glm_moe_dsa", _leak), ("deepseek_v4", _leak),
])
def test_a_mistake_is_seen(family: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(family)
    _compare(target, family)
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        _compare(target, family)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v4"])
def test_a_layer_further_is_seen(family: str) -> None:
    target = FrozenTarget(tiny_model(family), tiny_target(family).tokenizer, feature_layers=(1, 2))
    ids = random_ids(20)
    with pytest.raises(AssertionError):
        assert_near(target.encode(ids, [20]).features, reference(family, ids, (0, 2))[0])
