"""Which samples share a forward: an optimizer window cut into packs of bounded tokens and blocks, for all ranks.

A pure function of the window, so that ranks agree without talking and a resume packs as the uninterrupted run did.
Where a sample lands changes no number: its anchors are drawn from (seed, epoch, sample id) alone.
"""

import heapq
from dataclasses import dataclass, field
from typing import Optional, Sequence

from deepspec.data.order import MicroStep
from deepspec.errors import InputRefused


@dataclass(frozen=True)
class PackItem:
    """A sample as the packer sees it."""

    index: int  # in its source
    sample_id: str
    tokens: int
    anchors: int  # blocks it will have: its valid anchors, at most num_anchors


@dataclass(frozen=True)
class PackLimits:
    """Capacities of a pack and what a block costs."""

    tokens: int
    anchors: Optional[int]  # None: as many blocks as the tokens bring along
    slots: int  # rows of a block; a token is one row

    def cost(self, tokens: int, anchors: int) -> int:
        """Rows that go through the drafter: nearly all of a pack's time is proportional to them."""
        return tokens + self.slots * anchors

    def fits(self, tokens: int, anchors: int) -> bool:
        """Whether one pack may hold so much."""
        return tokens <= self.tokens and (self.anchors is None or anchors <= self.anchors)


@dataclass
class _Pack:
    members: list[int] = field(default_factory=list)  # positions in the window
    tokens: int = 0
    anchors: int = 0

    def takes(self, item: PackItem, limits: PackLimits) -> bool:
        return limits.fits(self.tokens + item.tokens, self.anchors + item.anchors)

    def add(self, position: int, item: PackItem) -> None:
        self.members.append(position)
        self.tokens += item.tokens
        self.anchors += item.anchors


def check_item(item: PackItem, limits: PackLimits) -> None:
    """Raise InputRefused naming a sample that no pack can hold."""
    if limits.fits(item.tokens, item.anchors):
        return
    name, value, limit = "pack_tokens", item.tokens, limits.tokens
    if value <= limit:
        name, value, limit = "pack_anchors", item.anchors, limits.anchors or 0
    raise InputRefused(
        f"sample {item.sample_id!r} has {value} {name.removeprefix('pack_')}, more than trainer.{name}={limit}. Raise "
        f"trainer.{name} to at least {value}."
    )


def _first_fit(items: Sequence[PackItem], order: Sequence[int], limits: PackLimits) -> list[_Pack]:
    packs: list[_Pack] = []
    smallest = min(item.tokens for item in items)
    begin = 0  # packs before it take nothing any more
    for position in order:
        item = items[position]
        while begin < len(packs) and packs[begin].tokens + smallest > limits.tokens:
            begin += 1
        for number in range(begin, len(packs)):
            if packs[number].takes(item, limits):
                packs[number].add(position, item)
                break
        else:
            packs.append(_Pack())
            packs[-1].add(position, item)
    return packs


def _spread(items: Sequence[PackItem], order: Sequence[int], limits: PackLimits, count: int) -> Optional[list[_Pack]]:
    """``count`` packs of even cost: each sample goes to the cheapest pack that takes it; None if one fits nowhere."""
    packs = [_Pack() for _ in range(count)]
    cheapest = [(0, number) for number in range(count)]  # a heap of costs
    for position in order:
        item = items[position]
        passed = []
        while cheapest and not packs[cheapest[0][1]].takes(item, limits):
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        pack = packs[cheapest[0][1]]
        pack.add(position, item)
        heapq.heapreplace(cheapest, (limits.cost(pack.tokens, pack.anchors), cheapest[0][1]))
        for entry in passed:
            heapq.heappush(cheapest, entry)
    return packs


def pack_window(items: Sequence[PackItem], limits: PackLimits, world_size: int) -> list[list[MicroStep]]:
    """Micro-steps of each rank: every sample in exactly one, equally many per rank, as few as first fit needs.

    First fit decreasing finds how many packs are enough, because it packs tightly. Longest-processing-time then deals
    the samples anew over that many packs (rounded up to a multiple of the ranks), because it makes them even, and an
    uneven pack is waited for by all ranks; where it finds no room, the tight packs stay. Packs of similar cost run at
    the same time on all ranks, the costliest first. A rank without samples gets a weightless stand-in.
    """
    if world_size < 1 or not items:
        raise ValueError(f"{len(items)} samples cannot be packed for {world_size} ranks")
    for item in items:
        check_item(item, limits)
    order = sorted(range(len(items)), key=lambda p: (-limits.cost(items[p].tokens, items[p].anchors), p))
    tight = _first_fit(items, order, limits)
    rounds = -(-len(tight) // world_size)
    packs = _spread(items, order, limits, rounds * world_size) or tight
    packs += [_Pack() for _ in range(rounds * world_size - len(packs))]

    packs.sort(key=lambda pack: (-limits.cost(pack.tokens, pack.anchors), pack.members[:1]))
    ranks: list[list[MicroStep]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for first in range(0, len(packs), world_size):
        # The rank that has had the least so far takes the costliest pack of this round.
        for rank, pack in zip(sorted(range(world_size), key=loads.__getitem__), packs[first:first + world_size]):
            loads[rank] += limits.cost(pack.tokens, pack.anchors)
            indices = tuple(items[position].index for position in sorted(pack.members))
            ranks[rank].append(MicroStep(indices or (items[0].index,), weightless=not indices))
    return ranks


def worst_size(items: Sequence[PackItem], limits: PackLimits) -> tuple[int, int]:
    """Upper bounds of the tokens and blocks of any pack of ``items``, whatever the windows are."""
    tokens = min(limits.tokens, sum(item.tokens for item in items))
    if limits.anchors is not None:
        return tokens, min(limits.anchors, sum(item.anchors for item in items))
    anchors = room = 0
    # Without a limit of its own: the densest samples that fit, the last one counted whole.
    for item in sorted(items, key=lambda item: -item.anchors / max(1, item.tokens)):
        if room >= limits.tokens:
            break
        anchors, room = anchors + item.anchors, room + item.tokens
    return tokens, anchors


def worst_pack(items: Sequence[PackItem], limits: PackLimits) -> tuple[int, ...]:
    """Indices of the costliest pack found by filling one greedily, by cost and by blocks per token."""
    def filled(order: list[PackItem]) -> _Pack:
        pack = _Pack()
        for item in order:
            if pack.takes(item, limits):
                pack.add(item.index, item)
        return pack

    by_cost = sorted(items, key=lambda item: -limits.cost(item.tokens, item.anchors))
    by_density = sorted(items, key=lambda item: -item.anchors / max(1, item.tokens))
    found = max((filled(by_cost), filled(by_density)), key=lambda pack: limits.cost(pack.tokens, pack.anchors))
    return tuple(found.members)
