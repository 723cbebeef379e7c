"""Near duplicates: found, deterministic, and never on both sides of the split."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gathered import gather, gather_all, source, write
from hypothesis import given, settings, strategies as st

from deepspec.data.dedup import RECALL, SHINGLE, choose_bands
from deepspec.data.ngrams import jaccard, ngram_hashes, shingles, word_hashes, words
from deepspec.data.prompt_pool import near_text

VOCABULARY = [f"{first}{last}" for first in "bcdfghjklm" for last in ("an", "el", "ix", "or", "um")]


def sentence(seed: int, length: int = 40) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=length))


def edited(text: str, place: int, word: str = "edited") -> str:
    found = text.split(" ")
    found[place % len(found)] = word
    return " ".join(found)


def similarity(one: str, two: str) -> float:
    return jaccard(shingles(one, SHINGLE), shingles(two, SHINGLE))


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("num_perm", [16, 64, 128])
def test_bands_have_the_recall(threshold: float, num_perm: int) -> None:
    bands, rows = choose_bands(threshold, num_perm)
    assert bands * rows <= num_perm
    assert 1 - (1 - threshold**rows) ** bands >= RECALL
    longer = rows + 1
    if longer <= num_perm:
        assert 1 - (1 - threshold**longer) ** (num_perm // longer) < RECALL or threshold == 1.0
    assert choose_bands(0.8, 128) == (21, 6)
    assert choose_bands(0.1, 16) == (16, 1)  # cannot reach it: the most sensitive there is


def test_words_ignore_case_form_and_blanks_but_not_symbols() -> None:
    assert words("Ｔhe  CAFE\u0301,\nthe café!") == ["the", "café", "the", "café"]
    assert words("2 + 3") == words("2 * 3") == ["2", "3"]
    assert words("2 + 3", symbols=True) != words("2 * 3", symbols=True)
    assert words("漢字abcかな") == ["漢", "字", "abc", "か", "な"]
    assert words("STRASSE ß") == ["strasse", "ss"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 6))
def test_ngrams_are_equal_where_the_words_are(found: list[str], size: int) -> None:
    hashes = ngram_hashes(word_hashes(found), (size,))[size]
    expected = [tuple(found[place:place + size]) for place in range(len(found) - size + 1)]
    assert len(hashes) == len(expected)
    for one, left in zip(hashes, expected):
        for two, right in zip(hashes, expected):
            assert (one == two) == (left == right)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_similarity_is_one_for_equal_and_symmetric(one: str, two: str) -> None:
    assert similarity(one, one) == 1.0
    assert similarity(one, two) == similarity(two, one) <= 1.0


def test_a_short_text_resembles_only_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": text} for text in ("Hi", "hi ", "Hello", "2+3", "2*3", "?", "!")))
    rows, counts = gather(source(path), near_duplicate_threshold=0.8)
    assert counts["own"].refused == {"near duplicate": 1}
    assert len(rows) == 6


def test_one_changed_word_is_found_and_reported(tmp_path: Path) -> None:
    texts = [sentence(seed) for seed in range(30)]
    copies = [edited(texts[index], 20) for index in range(10)]
    path = write(tmp_path / "p.jsonl", *({"id": f"a{index}", "prompt": text} for index, text in enumerate(texts)),
                 *({"id": f"b{index}", "prompt": text} for index, text in enumerate(copies)))
    rows, totals = gather_all([source(path)], tmp_path / "out")
    assert totals.sources["own"].refused == {"near duplicate": 10} and len(rows) == 30
    facts = totals.near_duplicates
    assert facts["dropped"] == len(facts["pairs"]) == 10
    for pair in facts["pairs"]:
        assert {pair["dropped"][1:], pair["kept"][1:]} == {pair["kept"][1:]}
        assert pair["similarity"] == round(similarity(texts[int(pair["kept"][1:])], copies[int(pair["kept"][1:])]), 4)
    kept = {row.id for row in rows}
    assert all(pair["kept"] in kept and pair["dropped"] not in kept for pair in facts["pairs"])
    assert len(gather(source(path))[0]) == 40


def test_the_threshold_is_exact(tmp_path: Path) -> None:
    one = sentence(1, 30)
    two = edited(one, 15)
    value = similarity(one, two)
    path = write(tmp_path / "p.jsonl", {"prompt": one}, {"prompt": two})
    assert len(gather(source(path), near_duplicate_threshold=value)[0]) == 1
    assert len(gather(source(path), near_duplicate_threshold=value + 0.001)[0]) == 2


def test_a_system_prompt_makes_no_duplicates_and_prevents_none(tmp_path: Path) -> None:
    system = {"role": "system", "content": sentence(0, 300)}
    rows = [{"messages": [system, {"role": "user", "content": sentence(seed, 20)}]} for seed in (1, 2)]
    other = {"messages": [{"role": "system", "content": "Other."}, {"role": "user", "content": sentence(1, 20)}]}
    found, _ = gather(source(write(tmp_path / "p.jsonl", *rows, other)), near_duplicate_threshold=0.8)
    assert len(found) == 2


def corpus(seed: int) -> list[dict[str, Any]]:
    """Families of prompts: an original and copies with one word changed, some of those changed once more."""
    state, rows = random.Random(seed), []
    for family in range(25):
        text = sentence(1000 * seed + family, state.randint(30, 60))
        rows.append({"prompt": text})
        for _ in range(state.randint(0, 3)):
            text = edited(text, state.randrange(60), f"w{state.randrange(9)}")
            rows.append({"prompt": text})
    return rows


def alike(one: list[str], two: list[str]) -> int:
    """Pairs across the two lists that reach the threshold."""
    return sum(similarity(first, second) >= 0.8 for first in one for second in two)


MISSED = 1  # of some forty pairs: signatures find 99 of 100 that are right at the threshold


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), extra=st.integers(0, 10**6))
def test_order_does_not_matter_and_no_near_duplicate_crosses_the_split(tmp_path_factory: Any, seed: int,
                                                                       extra: int) -> None:
    folder = tmp_path_factory.mktemp("near")
    rows = corpus(seed)
    options: dict[str, Any] = {"near_duplicate_threshold": 0.8, "held_out_fraction": 0.4, "min_held_out": 0}
    first = gather(source(write(folder / "a.jsonl", *rows)), **options)[0]
    shuffled = random.Random(extra).sample(rows, len(rows))
    assert gather(source(write(folder / "b.jsonl", *shuffled)), **options)[0] == first
    texts = {split: [near_text(row.messages) for row in first if row.split == split] for split in ("train", "held_out")}
    assert texts["held_out"] and texts["train"]
    assert alike(texts["train"], texts["held_out"]) <= MISSED
    # More data, among it copies of what is there: rows may go, none changes its side.
    more = [{"prompt": edited(row["prompt"], 3, "again")} for row in rows[::3]] + corpus(extra + 1)
    second = gather(source(write(folder / "c.jsonl", *rows, *more)), **options)[0]
    splits = {near_text(row.messages): row.split for row in first}
    assert all(splits.get(near_text(row.messages), row.split) == row.split for row in second)
    assert len({near_text(row.messages) for row in second} & set(splits)) >= len(splits) // 2
    held_out, train = ([near_text(row.messages) for row in second if row.split == split]
                       for split in ("held_out", "train"))
    assert alike(train, held_out) <= MISSED


def test_an_earlier_source_keeps_its_rows(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *({"prompt": sentence(seed)} for seed in range(20)))
    two = write(tmp_path / "b.jsonl", *({"prompt": edited(sentence(seed), 7)} for seed in range(20)))
    _, counts = gather(source(one, name="one"), source(two, name="two"), near_duplicate_threshold=0.8)
    assert counts["one"].kept == 20 and str(counts["two"]) == "read 20, valid 0, kept 0, near duplicate 20"


def test_a_larger_number_of_prompts_keeps_those_of_a_smaller(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *corpus(3))
    few, many = (gather(source(path), near_duplicate_threshold=0.8, max_prompts=count)[0] for count in (10, 22))
    assert [row.id for row in few] == [row.id for row in many][:10]


def test_crowded_buckets_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one pattern share buckets; only the first few kept in each are compared with."""
    rows = [{"prompt": f"{sentence(5, 30)} {sentence(100 + seed, 9)}"} for seed in range(150)]
    path = write(tmp_path / "p.jsonl", *rows)
    seen: list[int] = []

    def counting(one: np.ndarray, two: np.ndarray) -> float:
        seen.append(1)
        return jaccard(one, two)

    monkeypatch.setattr("deepspec.data.dedup.jaccard", counting)
    assert len(gather(source(path), near_duplicate_threshold=0.8)[0]) == 150
    unbounded = len(seen)
    monkeypatch.setattr("deepspec.data.dedup._BUCKET", 1)
    assert len(gather(source(path), near_duplicate_threshold=0.8)[0]) == 150
    assert len(seen) - unbounded < unbounded / 2


def test_signatures_do_not_depend_on_the_process() -> None:
    assert shingles("The quick brown fox", 3).tolist() == np.sort(shingles("the QUICK brown  fox", 3)).tolist()
    assert int(word_hashes(["a"])[0]) == 0xD24EC4F1A98C6E5B  # xxh64 of "a"
