"""Words and word n-grams of a text as 64-bit hashes: what near duplicates and decontamination compare.

Case, compatibility forms (NFKC) and blanks do not count. A word is a run of letters, digits and underscores; a
character of a script without blanks (Han, Kana) is a word of its own.
"""

import re
import unicodedata
from typing import Sequence

import numpy as np
import xxhash

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|(?:(?![{_IDEOGRAPH}])\w)+")
_WORD_OR_SYMBOL = re.compile(rf"[{_IDEOGRAPH}]|(?:(?![{_IDEOGRAPH}])\w)+|[^\w\s]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(33)


def words(text: str, *, symbols: bool = False) -> list[str]:
    """The words of a text, normalised; with ``symbols`` every other visible character too ("2 + 3" is not "2 * 3")."""
    plain = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return (_WORD_OR_SYMBOL if symbols else _WORD).findall(plain)


def word_hashes(found: Sequence[str]) -> np.ndarray:
    """One 64-bit hash per word, the same in every process: [words] uint64."""
    digests = (xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass")) for word in found)
    return np.fromiter(digests, dtype=np.uint64, count=len(found))


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> _SHIFT)) * _MIX
    return values ^ (values >> _SHIFT)


def ngram_hashes(hashes: np.ndarray, sizes: Sequence[int]) -> dict[int, np.ndarray]:
    """For each size n the hashes of the n-grams in order: n -> [words - n + 1], empty where the text is shorter."""
    result = {size: np.zeros(0, dtype=np.uint64) for size in sizes}
    windows = np.zeros(len(hashes), dtype=np.uint64)
    for size in range(1, min(max(sizes, default=0), len(hashes)) + 1):
        # Horner's rule: the windows of one size are those of the size before, one word longer.
        windows = windows[:len(hashes) - size + 1] * _MULTIPLIER + hashes[size - 1:]
        if size in result:
            result[size] = _mixed(windows)
    return result


def shingles(text: str, size: int) -> np.ndarray:
    """The set of a text's n-grams of words and symbols, sorted; a shorter text has one, all of it."""
    found = words(text, symbols=True) or [text]
    size = min(size, len(found))
    return np.unique(ngram_hashes(word_hashes(found), (size,))[size])


def jaccard(one: np.ndarray, two: np.ndarray) -> float:
    """Size of the intersection over size of the union of two sorted sets."""
    common = len(np.intersect1d(one, two, assume_unique=True))
    return common / (len(one) + len(two) - common)
