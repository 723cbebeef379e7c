"""The order in which supervised slots are worked through, so that nothing of vocabulary size is made twice.

n supervised slots, P distinct transitions, Q distinct target rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotPlan:
    """Supervised slots in the order they are worked through."""

    slots: Tensor  # [n] int64 into the flattened [N*K]
    rows: Tensor  # [Q] int64, distinct rows of last_hidden, in order
    row_of: Tensor  # [n] int64 into ``rows``, ascending
    first_of: Tensor  # [P] int64: a slot (flattened) that has the transition
    group_of: Tensor  # [n] int64 into ``first_of``, ascending
    shared_bias: bool  # slots of a group have the same transition; otherwise P = n


def plan_slots(mask: Tensor, previous_ids: Tensor, target_rows: Tensor, by_token: bool) -> SlotPlan:
    """Order the supervised slots of [N, K] blocks. ``by_token``: the transition depends on the previous token only."""
    slots = mask.flatten().nonzero().squeeze(1)
    rows, tokens = target_rows.flatten()[slots], previous_ids.flatten()[slots]
    order = torch.argsort(rows, stable=True)
    if by_token:
        order = order[torch.argsort(tokens[order], stable=True)]
    slots, rows, tokens = slots[order], rows[order], tokens[order]
    group_of = torch.arange(len(slots), device=slots.device)
    if by_token:
        group_of = torch.unique_consecutive(tokens, return_inverse=True)[1]
    distinct, row_of = torch.unique_consecutive(rows, return_inverse=True)
    first = torch.ones_like(group_of, dtype=torch.bool)
    first[1:] = group_of[1:] != group_of[:-1]
    return SlotPlan(slots, distinct, row_of, slots[first], group_of, by_token)
