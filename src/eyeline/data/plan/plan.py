"""The plan: which rows make which pack. A pure function of the rows of a window, their sizes, the budget and open bins.

    rows of a window, in the order of their image groups           order.py, blend.py
    Sized     what each row needs under this budget          sizing.py: from the index; what cannot be used is rejected there
    groups    image groups that fit into a pack
    packed    groups -> packs; bins that stay open are carried into the next window

Dims: R rows in order  G rows of these that can be used  I image groups  K packs
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import Budget
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.step import PackCost
from eyeline.data.plan.order import Longs
from eyeline.data.plan.sizing import Sizing
from eyeline.data.rejects import Reject

VERSION = 2  # of the plan: another one may pack otherwise. Golden digests in tests/data/test_plan.py belong to it

RowOf = tuple[int, int, int]  # source, shard, number in the shard


@dataclass(frozen=True, eq=False)
class Ordered:
    """Rows in the order in which they come. Image group v is the rows `bounds_V1[v]` to `bounds_V1[v + 1]`."""

    row_R5: Longs  # epoch and window of the order that a row comes from; source, shard, number
    bounds_V1: Longs
    first_R: NDArray[np.bool_]  # whether the row comes for the first time: rejects are counted of different rows
    left_out: int = 0  # other rows of the window, which `where` leaves out and which would come for the first time


@dataclass(frozen=True)
class ImageGroup:
    """Rows that are packed together since they share an image, or a part of one that is too large."""

    epoch: int
    window: int
    rows: tuple[RowOf, ...]


@dataclass(frozen=True)
class RowsMet:
    """Rows of a window that were met since the pack before, or behind the last one."""

    first: int  # that came for the first time: rejects are counted of different rows
    rejects: tuple[Reject, ...]  # of these, those that are not planned
    again: tuple[Reject, ...]  # rows that are not planned, and were not the first time
    left_out: int = 0  # of the whole window, as in Ordered: with the first rows of it that are met


class Pack(NamedTuple):
    """Rows that are to be one batch."""

    groups: list[ImageGroup]
    cost: tuple[int, int]  # language, vision
    met: RowsMet


@dataclass(frozen=True, eq=False)
class Plan:
    """The packs of one window, in order, as numbers of image groups; `bins` are still open after it."""

    row_G5: Longs  # as in Ordered: first those that were carried in
    bounds_I1: Longs
    packs: list[list[int]]
    passed_K: Longs  # rows of the window that were met up to each pack, rejected ones included
    first_R: NDArray[np.bool_]  # of the window's rows, as in Ordered
    rejects: list[tuple[int, Reject]]  # (rows met before it, why): rising
    bins: list[list[ImageGroup]]
    cost_I2: Longs  # language, vision
    digest: str
    left_out: int = 0  # as in Ordered
    closing: bool = False  # its packs are the bins that were open after the last window

    def pack(self, number: int) -> Pack:
        before = int(self.passed_K[number - 1]) if number else 0
        language, vision = self.cost_I2[self.packs[number]].sum(0).tolist()
        return Pack(list(map(self.group, self.packs[number])), (language, vision), self._met(before, int(self.passed_K[number])))

    def groups_behind(self, packs: int) -> int:
        """The number of image groups that are not in the first `packs` packs: those of bins that are still open, too."""
        return self._given[-1] - self._given[min(packs, len(self.packs))] + sum(map(len, self.bins))

    @cached_property
    def _given(self) -> list[int]:
        return list(accumulate(map(len, self.packs), initial=0))

    @property
    def rest(self) -> RowsMet:
        """The rows behind the last pack."""
        return self._met(int(self.passed_K[-1]) if len(self.passed_K) else 0, len(self.first_R))

    def _met(self, start: int, end: int) -> RowsMet:
        bad = self.rejects[bisect_left(self.rejects, start, key=itemgetter(0)) : bisect_left(self.rejects, end, key=itemgetter(0))]
        first, again = (tuple(reject for n, reject in bad if self.first_R[n] == wanted) for wanted in (True, False))
        return RowsMet(int(self.first_R[start:end].sum()), first, again, 0 if start else self.left_out)

    def group(self, number: int) -> ImageGroup:
        rows = self.row_G5[self.bounds_I1[number] : self.bounds_I1[number + 1]].tolist()
        return ImageGroup(rows[0][0], rows[0][1], tuple((source, shard, row) for _, _, source, shard, row in rows))


# Items into packs, by a streaming best fit: the open bins are all there is to remember

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


def _ripest(bins: Bins, budget: Budget) -> int:
    tokens, patches = [bin.tokens for bin in bins], [bin.patches for bin in bins]
    left = tokens if sum(tokens) * budget.patches <= sum(patches) * budget.tokens else patches
    return left.index(min(left))  # where several have as little, the one that sorts first


def _scarcer(tokens: int, patches: int, budget: Budget) -> int:
    return min(tokens * budget.patches, patches * budget.tokens) if budget.patches else tokens


# Rows into packs


def plan(ordered: Ordered, carried: Sequence[Sequence[ImageGroup]], sizing: Sizing) -> Plan:
    """Pack the rows of a window behind the bins that the one before left open."""
    columns_R4, usable_R = _columns(ordered.row_R5, sizing)
    rejects = [
        (int(n), reject_of(sizing, (source, shard, number)))
        for n in np.flatnonzero(~usable_R)
        for _, _, source, shard, number in [ordered.row_R5[n].tolist()]
    ]
    at_G = np.flatnonzero(usable_R)
    starts_I, tokens_I, patches_I, vision_I, language_I = _groups(columns_R4[at_G], _group_of(ordered.bounds_V1)[at_G], sizing.budget)
    old_G5, old_bounds, old_columns, bins = _bins_of(carried, sizing)
    row_G5 = np.concatenate([old_G5, ordered.row_R5[at_G]])
    first = len(old_bounds) - 1  # groups of this window are numbered behind those that were carried in
    bounds_I1 = np.concatenate([old_bounds[:-1], len(old_G5) + starts_I, [len(row_G5)]]).astype(np.int64)
    *_, old_vision, old_language = _sums(old_columns, old_bounds[:-1])
    last_I = np.append(starts_I, len(at_G))[1:] - 1
    passed_I = (at_G[last_I] + 1).tolist() if len(starts_I) else []
    met = 0

    def groups() -> Iterator[tuple[int, int, int]]:
        nonlocal met
        for n, (tokens, patches) in enumerate(zip(tokens_I.tolist(), patches_I.tolist(), strict=True)):
            met = passed_I[n]
            yield first + n, tokens, patches

    packs, consumed = [], []
    for done in pack_items(groups(), bins, sizing.budget):
        packs.append(done)
        consumed.append(met)
    cost_I2 = np.stack([np.concatenate([old_language, language_I]), np.concatenate([old_vision, vision_I])], 1).astype(np.int64)
    digest = _digest(packs, bounds_I1, np.concatenate([row_G5, np.concatenate([old_columns, columns_R4[at_G]])[:, :2]], 1))
    passed_K = np.array(consumed, np.int64)
    made = Plan(row_G5, bounds_I1, packs, passed_K, ordered.first_R, rejects, [], cost_I2, digest, ordered.left_out)
    made.bins.extend([made.group(n) for n in bin.items] for bin in bins)
    return made


def closing_plan(carried: Sequence[Sequence[ImageGroup]], sizing: Sizing, digest: str) -> Plan:
    """The bins that are open behind the last window, as packs. StorageFailed when a row is no longer what was planned."""
    row_G5, bounds_I1, columns_G4, _ = _bins_of(carried, sizing)
    *_, vision_I, language_I = _sums(columns_G4, bounds_I1[:-1])
    packs = _unpacked(carried)[2]
    cost_I2 = np.stack([language_I, vision_I], 1).astype(np.int64)
    return Plan(row_G5, bounds_I1, packs, np.zeros(len(packs), np.int64), np.empty(0, np.bool_), [], [], cost_I2, digest, closing=True)


def cost_of(groups: Sequence[ImageGroup], sizing: Sizing) -> tuple[int, int]:
    """Language and vision cost of a pack, from the sizes of its rows as they are now."""
    language = vision = 0
    for group in groups:
        of = [(sizing(source, shard), row) for source, shard, row in group.rows]
        language += sum(int(sized.language_R[row]) for sized, row in of)
        vision += max(int(sized.vision_R[row]) for sized, row in of)
    return language, vision


def _bins_of(carried: Sequence[Sequence[ImageGroup]], sizing: Sizing) -> tuple[Longs, Longs, Longs, Bins]:
    """Rows of carried image groups, bounds of the groups in them, their columns, and the bins with the numbers of their groups.
    StorageFailed when a row is no longer what was planned."""
    row_G5, bounds, numbers = _unpacked(carried)
    columns_G4, usable_G = _columns(row_G5, sizing)
    if not usable_G.all():
        *_, source, shard, number = row_G5[np.flatnonzero(~usable_G)[0]].tolist()
        why = reject_of(sizing, (source, shard, number))
        raise StorageFailed(f"{why.file} row {why.row} is in the plan and can no longer be used: {why.message}. Restore it")
    tokens_I, patches_I, *_ = _sums(columns_G4, bounds[:-1])
    bins: Bins = []
    for inside in numbers:
        tokens, patches = sizing.budget.tokens - int(tokens_I[inside].sum()), sizing.budget.patches - int(patches_I[inside].sum())
        if min(tokens, patches) < 0:
            raise StorageFailed("images of rows that share a pack have grown, and the pack is too small now. Restore their images")
        bins.append(Bin(0, 0, tokens, patches, [*inside]).ranked(len(bins), sizing.budget))
    return row_G5, bounds, columns_G4, bins


def _columns(row_R5: Longs, sizing: Sizing) -> tuple[Longs, NDArray[np.bool_]]:
    """Tokens, patches, vision and language cost of each row, and whether it can be used."""
    out_R4, usable_R = np.zeros((len(row_R5), 4), np.int64), np.zeros(len(row_R5), bool)
    shards, where_R = np.unique(row_R5[:, 2:4], axis=0, return_inverse=True)
    for n, (source, shard) in enumerate(shards.tolist()):
        here = np.flatnonzero(where_R.ravel() == n)
        sized, number = sizing(source, shard), row_R5[here, 4]
        for column, values in enumerate((sized.tokens_R, sized.patches_R, sized.vision_R, sized.language_R)):
            out_R4[here, column] = values[number]
        usable_R[here] = sized.usable_R[number]
    return out_R4, usable_R


def reject_of(sizing: Sizing, row: RowOf) -> Reject:
    """The reject of a row that cannot be used."""
    source, shard, number = row
    cause, where, message = sizing(source, shard).rejects[number]
    place = sizing.index.shard(source, shard).place(shard, number)
    return sizing.index.sources[source].reject(place, BadSample(cause, where, message))


def _group_of(bounds_V1: Longs) -> Longs:
    return np.repeat(np.arange(len(bounds_V1) - 1), np.diff(bounds_V1))


def _sums(columns_G4: Longs, starts_I: Longs) -> tuple[Longs, Longs, Longs, Longs]:
    """Tokens, patches, vision and language cost of image groups. Rows of one show the same images (or the first of them, where one
    was shrunk), so it has the patches of its largest row."""
    if not len(starts_I):
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing, nothing
    tokens, language = (np.add.reduceat(columns_G4[:, n], starts_I) for n in (0, 3))
    patches, vision = (np.maximum.reduceat(columns_G4[:, n], starts_I) for n in (1, 2))
    return tokens, patches, vision, language


def _groups(columns_G4: Longs, visit_G: Longs, budget: Budget) -> tuple[Longs, Longs, Longs, Longs, Longs]:
    """The start of each group, and its sums. An image group whose rows together are over the budget is cut where it is full."""
    starts_I = np.flatnonzero(np.diff(visit_G, prepend=-1))
    tokens, *_ = _sums(columns_G4, starts_I)
    cuts: list[int] = []
    ends = np.append(starts_I, len(visit_G))[1:]
    for group in np.flatnonzero(tokens > budget.tokens).tolist():
        filled = 0
        for row in range(int(starts_I[group]), int(ends[group])):
            filled += int(columns_G4[row, 0])
            if filled > budget.tokens:
                cuts.append(row)
                filled = int(columns_G4[row, 0])
    starts_I = np.sort(np.concatenate([starts_I, np.array(cuts, np.int64)]))
    return starts_I, *_sums(columns_G4, starts_I)


def _unpacked(carried: Sequence[Sequence[ImageGroup]]) -> tuple[Longs, Longs, list[list[int]]]:
    """Rows of carried image groups, bounds of the groups in them, and the numbers of the groups of each bin."""
    groups = [group for bin in carried for group in bin]
    rows = [(group.epoch, group.window, *row) for group in groups for row in group.rows]
    ends = np.cumsum([0, *(len(bin) for bin in carried)]).tolist()
    bounds = np.cumsum([0, *(len(group.rows) for group in groups)])
    return np.array(rows, np.int64).reshape(-1, 5), bounds, [list(range(a, b)) for a, b in pairwise(ends)]


def _digest(packs: list[list[int]], bounds_I1: Longs, row_G7: Longs) -> str:
    """A hash of which rows are in which pack, in order, and of their tokens and patches."""
    flat = np.array([n for pack in packs for n in pack], np.int64)
    lengths = np.diff(bounds_I1)[flat]
    ends = np.cumsum(lengths)
    rows = np.arange(int(lengths.sum())) + np.repeat(bounds_I1[flat] - (ends - lengths), lengths)
    hashed = hashlib.sha256(np.array([len(pack) for pack in packs], "<i8").tobytes())
    hashed.update(row_G7[rows].astype("<i8").tobytes())
    return hashed.hexdigest()[:16]


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
