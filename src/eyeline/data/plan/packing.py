"""Items into packs, by a streaming best fit, and the packs of a step onto ranks. Pure, and the open bins are all there is to remember."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from eyeline.core.batch import Budget
from eyeline.core.step import PackCost

Item = Any  # opaque

OPEN_BINS = 16


class Bin(NamedTuple):
    """A pack that is still open. Bins sort by how full they are, the fullest first, and the older first where that is equal."""

    left: int  # the scarcer of the two capacities that are left, in units of tokens × patches, so that both compare as integers
    age: int  # distinct, so that items are never compared
    tokens: int  # left
    patches: int  # left
    items: list[Item]

    def ranked(self, age: int, budget: Budget) -> "Bin":
        """The same bin in its place among others."""
        return self._replace(left=_scarcer(self.tokens, self.patches, budget), age=age)


Bins = list[Bin]  # sorted


def pack_items(items: Iterable[tuple[Item, int, int]], bins: Bins, budget: Budget, open_bins: int = OPEN_BINS) -> Iterator[list[Item]]:
    """Packs of items that are given as (item, tokens, patches); `bins` is changed in place and holds what is left open.

    An item goes to the bin that it fills best. If it fits nowhere it opens one, and when that is one too many a bin is a pack: the one
    with the least left of what the bins together have less of, so that one without room for images still waits for text. A bin with
    no token left is a pack at once. So at most one pack follows an item, before the next item is taken. An item that alone is over
    the budget is a defect of the caller.
    """
    T, P = budget.tokens, budget.patches
    age = len(bins)
    bins[:] = [bin._replace(age=n) for n, bin in enumerate(bins)]
    for item, tokens, patches in items:
        assert tokens <= T and patches <= P, f"{item}: {tokens} tokens and {patches} patches do not fit {budget}"
        at = bisect_left(bins, (_scarcer(tokens, patches, budget),))
        while at < len(bins) and (bins[at].tokens < tokens or bins[at].patches < patches):
            at += 1
        if at < len(bins):
            _, born, free, room, inside = bins.pop(at)
        else:
            born, free, room, inside = age, T, P, []
            age += 1
        inside.append(item)
        free, room = free - tokens, room - patches
        if free == 0:
            yield inside
            continue
        insort(bins, Bin(_scarcer(free, room, budget), born, free, room, inside))
        if len(bins) > open_bins:
            yield bins.pop(_ripest(bins, budget)).items


def close_bins(bins: Bins) -> Iterator[list[Item]]:
    """Close what is open, the fullest first."""
    while bins:
        yield bins.pop(0).items


def _ripest(bins: Bins, budget: Budget) -> int:
    tokens, patches = [bin.tokens for bin in bins], [bin.patches for bin in bins]
    left = tokens if sum(tokens) * budget.patches <= sum(patches) * budget.tokens else patches
    return left.index(min(left))  # where several have as little, the one that sorts first


def _scarcer(tokens: int, patches: int, budget: Budget) -> int:
    return min(tokens * budget.patches, patches * budget.tokens) if budget.patches else tokens


# Packs onto ranks


def deal(costs: Sequence[PackCost], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal all packs: of each slot, the pack that each rank runs, so that ranks wait for one another as little as can be. Every rank has as
    many slots; where the ranks do not divide the packs, the last slot has empty packs, whose numbers follow those of the packs.

    With sharded weights all ranks wait at every micro-batch, so what a step costs is the sum over its slots of the slowest rank. Sorted by
    cost and cut into slots: no other way gives a smaller sum, since the n-th largest slot maximum cannot be less than the cost of pack
    (n-1)·ranks + 1. One rank runs the packs in their order.
    """
    order = list(range(len(costs) + -len(costs) % ranks))
    if ranks > 1:
        order[: len(costs)] = sorted(range(len(costs)), key=lambda n: (-sum(costs[n]), n))
    return tuple(tuple(order[start : start + ranks]) for start in range(0, len(order), ranks))
