"""Steps over the cache against one pass over the whole text."""

import random

import pytest
import torch
from tiny_targets import FAMILIES, assert_near, random_ids, tiny_target

from deepspec.targets.cache import PackedCache
from deepspec.targets.frozen import FrozenTarget, TargetFeatures

LENGTHS = {0: 60, 1: 31, 3: 45}
# Each step: row -> new tokens. Prefill, decode and verification mixed; row 2 never used; long and short counts.
SCHEDULE = [
    {1: 3, 0: 20}, {0: 1, 1: 1}, {0: 4, 1: 4}, {3: 30, 0: 1, 1: 1}, {1: 2, 3: 5, 0: 1}, {3: 1, 0: 16},
    {0: 17, 1: 8, 3: 1}, {3: 8, 1: 8}, {1: 4}, {0: 0},
]


def _run(target: FrozenTarget, cache: PackedCache) -> dict[int, TargetFeatures]:
    texts = {row: random_ids(length, row) for row, length in LENGTHS.items()}
    parts: dict[int, list[TargetFeatures]] = {row: [] for row in LENGTHS}
    for step in SCHEDULE:
        counts = {row: count for row, count in step.items() if count}
        if not counts:
            continue
        begins = {row: cache.lengths[row] for row in counts}
        ids = torch.cat([texts[row][begins[row]:begins[row] + count] for row, count in counts.items()])
        result = target.step(ids, list(counts), list(counts.values()), cache)
        offset = 0
        for row, count in counts.items():
            span = slice(offset, offset + count)
            parts[row].append(TargetFeatures(result.features[span], result.last_hidden[span]))
            offset += count
    return {
        row: TargetFeatures(torch.cat([one.features for one in own]), torch.cat([one.last_hidden for one in own]))
        for row, own in parts.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_of_steps_equals_one_pass(family: str) -> None:
    target = tiny_target(family)
    cache = target.new_cache(4, 8)
    stepped = _run(target, cache)
    for row, result in stepped.items():
        length = cache.lengths[row]
        whole = target.encode(random_ids(LENGTHS[row], row)[:length], [length])
        assert_near(result.features, whole.features)
        assert_near(result.last_hidden, whole.last_hidden)
    assert cache.lengths[2] == 0 and cache.nbytes > 0
    if isinstance(cache, PackedCache):
        assert cache.capacity >= 60


def test_truncate_then_step_equals_fresh() -> None:
    target = tiny_target()
    ids, other = random_ids(24), random_ids(30, 9)
    cache = target.new_cache(2, 4)
    target.step(torch.cat([ids[:10], other]), [0, 1], [10, 30], cache)
    target.step(random_ids(8, 3), [0], [8], cache)  # eight draft tokens, of which none is accepted
    cache.truncate(0, 10)
    first = target.step(ids[10:14], [0], [4], cache)
    cache.truncate(1, 0)
    second = target.step(torch.cat([ids[14:], ids]), [0, 1], [10, 24], cache)
    whole = target.encode(ids, [24]).last_hidden
    assert_near(torch.cat([first.last_hidden, second.last_hidden[:10]]), whole[10:])
    assert_near(second.last_hidden[10:], whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_nothing_behind(family: str) -> None:
    """Rounds of verification whose drafts are mostly rejected, beside another row, against one pass over the text."""
    target = tiny_target(family)
    text, beside, chance = random_ids(90), random_ids(90, 1), random.Random(3)
    cache, at = target.new_cache(2, 16), 12
    parts = [target.step(torch.cat([text[:at], beside[:5]]), [0, 1], [at, 5], cache)]
    features, last_hidden = [parts[0].features[:at]], [parts[0].last_hidden[:at]]
    for round_number in range(16):
        accepted, draft = chance.randint(0, 5), random_ids(6, 100 + round_number)
        draft[:accepted] = text[at + 1:at + 1 + accepted]
        ids = torch.cat([text[at:at + 1], draft, beside[5 + round_number:6 + round_number]])
        step = target.step(ids, [0, 1], [7, 1], cache)
        cache.truncate(0, at + 1 + accepted)
        features.append(step.features[:accepted + 1])
        last_hidden.append(step.last_hidden[:accepted + 1])
        at += accepted + 1
    whole = target.encode(text[:at], [at])
    assert_near(torch.cat(last_hidden), whole.last_hidden)
    assert_near(torch.cat(features), whole.features)
    cache.truncate(0, 9)  # far behind the last step
    again = target.step(text[9:20], [0], [11], cache)
    assert_near(again.last_hidden, whole.last_hidden[9:20])


def test_a_forward_that_fails_leaves_the_row_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = tiny_target("deepseek_v4"), random_ids(30)
    cache = target.new_cache(1, 1)
    target.step(ids[:20], [0], [20], cache)
    with monkeypatch.context() as patch:
        patch.setattr(target.layers[2], "forward", lambda *_a, **_k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.step(ids[20:25], [0], [5], cache)
    assert cache.lengths == [20]
    step = target.step(ids[20:], [0], [10], cache)
    assert_near(step.last_hidden, target.encode(ids, [30]).last_hidden[20:])


def test_rows_that_are_not_named_stay_untouched() -> None:
    target = tiny_target()
    cache = target.new_cache(3, 32)
    target.step(random_ids(12), [0, 1, 2], [4, 4, 4], cache)
    before = [cache.keys[1][1].clone(), cache.values[1][1].clone()]
    target.step(random_ids(20, 1), [2, 0], [18, 2], cache)
    assert torch.equal(before[0], cache.keys[1][1]) and torch.equal(before[1], cache.values[1][1])
    assert cache.lengths == [6, 4, 22]


def test_capacity_doubles_and_keeps_the_contents() -> None:
    cache, key = PackedCache(2, 4), torch.zeros(1, 1, 3, 2)
    for layer in (0, 1):
        cache.layer(layer, key, key)
    cache.keys[1][1, 0, :3] = 7.0
    cache.lengths[1] = 3
    cache.reserve(5)
    assert cache.capacity == 8 and cache.nbytes == 2 * 2 * 2 * 8 * 2 * 4
    assert (cache.keys[1][1, 0, :3] == 7.0).all() and (cache.keys[1][1, 0, 3:] == 0).all()
    cache.reserve(100)
    assert cache.capacity == 100


@pytest.mark.parametrize("rows, counts, message", [
    ([0, 0], [1, 1], "only once"), ([2], [1], "not in a cache of 2 rows"), ([0], [0], "leave rows without"),
    ([], [], "at least one"), ([0, 1], [1], "one count per row"),
])
def test_wrong_steps_are_refused(rows: list[int], counts: list[int], message: str) -> None:
    target = tiny_target()
    ids = random_ids(max(1, sum(counts)))[:sum(counts)] if sum(counts) else random_ids(1)[:0]
    if not sum(counts):
        message = "non-empty"
    with pytest.raises(ValueError, match=message):
        target.step(ids, rows, counts, target.new_cache(2, 4))


def test_truncate_checks_its_length() -> None:
    cache = tiny_target().new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        cache.truncate(0, 1)
