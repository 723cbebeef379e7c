"""The attention kernel against an explicit one."""

import pytest
import torch
from torch import Tensor

from deepspec.targets import attention
from deepspec.targets.attention import AttentionOptions, DocumentLayout, attend, causal_attention


def _explicit(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    queries, keys = query.shape[2], key.shape[2]
    for i in range(queries):
        for j in range(keys):
            position = keys - queries + i
            if j > position or (options.window is not None and j <= position - options.window):
                scores[..., i, j] = float("-inf")
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("options", [AttentionOptions(0.3), AttentionOptions(0.3, window=5),
                                     AttentionOptions(0.5, softcap=1.5), AttentionOptions(0.5, 6, 1.5)])
@pytest.mark.parametrize("queries, keys", [(19, 19), (1, 1), (1, 19), (13, 19)])
def test_causal_attention(options: AttentionOptions, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERY_CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, queries, 8, generator=generator)
    key, value = (torch.randn(1, 2, keys, 8, generator=generator) for _ in range(2))
    torch.testing.assert_close(causal_attention(query, key, value, options), _explicit(query, key, value, options))


def test_documents_are_attended_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    output = DocumentLayout((2, 7)).attend(0, query, key, value, AttentionOptions(0.2))
    for part in (slice(0, 2), slice(2, 9)):
        expected = _explicit(query[:, :, part], key[:, :, part], value[:, :, part], AttentionOptions(0.2))
        torch.testing.assert_close(output[:, part], expected.transpose(1, 2))


def test_a_key_far_away_has_no_influence() -> None:
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 4, 8)
    mask = torch.tensor([0.0, 0.0, float("-inf"), 0.0])
    value = torch.zeros(1, 1, 4, 8)
    value[:, :, 2] = 1e30
    assert float(attend(query, key, value, AttentionOptions(1.0), mask=mask[None, None, None]).abs().max()) == 0.0
