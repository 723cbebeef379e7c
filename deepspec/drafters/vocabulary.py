"""A reduced draft vocabulary: the drafter proposes some of the target's tokens only (EAGLE-3's d2t and t2d).

V tokens of the target, Vd of the draft, r rank. The drafter reads every token and keeps rows for all of them; logits of
the others are out of reach, so that what it drafts, and what training and evaluation make of it, is exactly what an
engine with the smaller LM head does. The target still decides about every token: the output does not change, but no
round accepts a token that is never proposed, and acceptance is at most the target's probability inside.
"""

from functools import lru_cache
from typing import Iterable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from deepspec.drafters.types import DrafterShape
from deepspec.errors import InputRefused

D2T, T2D = "d2t", "t2d"  # [Vd] int64, id of the target minus id of the draft; [V] bool, whether it is one of them
_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight")  # tensors with a row for each draft token


@lru_cache(maxsize=8)
def _outside(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    mask = torch.ones(vocab_size, dtype=torch.bool)
    mask[torch.tensor(ids, dtype=torch.int64)] = False
    return mask.to(device)


def outside(shape: DrafterShape, device: torch.device) -> Optional[Tensor]:
    """Tokens that the drafter never proposes, bool [V]; None where it knows all."""
    return None if shape.draft_ids is None else _outside(shape.draft_ids, shape.vocab_size, device)


def count_tokens(samples: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """How often each token is one that the target generated: int64 [V], of pairs of ids [T] and loss mask [T]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, mask in samples:
        counts += torch.bincount(ids[mask.bool()].cpu(), minlength=vocab_size)
    return counts


def choose_ids(counts: Tensor, size: int, always: Sequence[int] = ()) -> tuple[int, ...]:
    """The ``size`` most frequent tokens of ``counts`` [V], ascending; ``always`` (end of turn) are among them.

    Of equally frequent tokens the smaller ids, so that a vocabulary larger than what was seen is filled up with them.
    """
    counts = counts.clone()
    counts[torch.tensor(list(always), dtype=torch.int64)] = torch.iinfo(torch.int64).max
    return tuple(sorted(torch.argsort(counts, descending=True, stable=True)[:size].tolist()))


def coverage(counts: Tensor, ids: Sequence[int]) -> Optional[float]:
    """Share of the counted tokens that are among ``ids``; None of nothing."""
    total = int(counts.sum())
    return int(counts[torch.tensor(ids, dtype=torch.int64)].sum()) / total if total else None


def narrowed(tensors: Mapping[str, Tensor], shape: DrafterShape) -> dict[str, Tensor]:
    """``tensors`` of a whole-vocabulary file as those of one with ``shape.draft_ids``: fewer rows, d2t and t2d."""
    ids = torch.tensor(shape.draft_ids, dtype=torch.int64)
    found = {name: value[ids].contiguous() if name in _ROWS else value for name, value in tensors.items()}
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[ids] = True
    return found | {D2T: ids - torch.arange(len(ids)), T2D: known}


def stored_ids(tensors: Mapping[str, Tensor], where: object) -> Optional[tuple[int, ...]]:
    """The target ids that ``d2t`` of a file stands for; None without one. Raises InputRefused for ids that repeat."""
    if D2T not in tensors:
        return None
    ids = (tensors[D2T].long() + torch.arange(len(tensors[D2T]))).tolist()
    if len(set(ids)) != len(ids) or min(ids) < 0 or ids != sorted(ids):
        raise InputRefused(f"{where}: its d2t does not name ascending, different tokens of the target. Give the file "
                           "as its trainer wrote it.")
    return tuple(ids)


def widened(tensors: Mapping[str, Tensor], ids: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Inverse of ``narrowed``: rows of tokens that are never proposed are zero."""
    found = {name: value for name, value in tensors.items() if name not in (D2T, T2D)}
    for name in _ROWS:
        if name in found and len(found[name]) == len(ids):
            whole = found[name].new_zeros(vocab_size, found[name].shape[1])
            whole[torch.tensor(ids, dtype=torch.int64)] = found[name]
            found[name] = whole
    return found
