"""Drafting with a sliding window: only the window is kept, and it is what the whole context under a mask would give."""

import pytest
import torch
from drafter_cases import drafter, shape

from deepspec.decoding.draft import DraftState
from deepspec.targets.sampling import Sampling


@pytest.mark.parametrize("window", [1, 5, 70, 1000, None])
def test_kept_context_drafts_as_the_whole_context(window: int | None) -> None:
    """Ragged rows, fed in uneven parts, longer and shorter than the window, a row used again."""
    of = shape(sliding_window=window)
    model = drafter(of)
    torch.manual_seed(1)
    features = torch.randn(3, 150, 64)
    state = DraftState(model, 3, tokenizer_size=61, capacity=4, flush_tokens=20)
    lengths = [0, 0, 0]

    def feed(row: int, count: int) -> None:
        state.append(row, features[row, lengths[row]:lengths[row] + count])
        lengths[row] += count
        state.settle()

    feed(1, 90)
    state.drop(1)
    lengths[1] = 0
    for counts in ((3, 40, 1), (1, 1, 4), (100, 9, 0), (1, 2, 1)):
        for row, count in enumerate(counts):
            feed(row, count)
        for rows in ([0, 1, 2], [0, 2]):
            found = state.propose(rows, [7, 8, 9][:len(rows)], torch.zeros(len(rows), 4), Sampling(temperature=0.0))
            for place, row in enumerate(rows):
                length = torch.tensor([lengths[row]])
                context = model.project_context(features[row, :lengths[row]])
                keys, values = model.context_kv(context, torch.arange(lengths[row]))
                with torch.no_grad():
                    expected = model.block_hidden(torch.tensor([[7, 8, 9][place]]), length, keys[:, None],
                                                  values[:, None], length)
                torch.testing.assert_close(found.hidden[place], expected[0], rtol=1e-4, atol=1e-5)
    kept = state._keys.shape[2]
    assert kept >= max(lengths) if window is None or window > 150 else kept < window + 64
