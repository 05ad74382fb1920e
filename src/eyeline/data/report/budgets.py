"""The fill of packs at several budgets, and the budget to take: the planner's own packs, without fetching anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from eyeline.core.batch import Budget
from eyeline.core.cost import Cost
from eyeline.core.errors import Refused
from eyeline.data.plan.blend import Cursor, Pool, blended_window, window_of
from eyeline.data.plan.order import Longs
from eyeline.data.plan.plan import OPEN_BINS, ImageGroup, Ordered, plan
from eyeline.data.plan.sizing import Sizing
from eyeline.data.reader import Reader, training_pools

CANDIDATES = tuple(2**n for n in range(8, 16))  # tokens
ROOM = 1.25  # patches for a quarter more images than there are on average: text, not images, is what fills a pack
STEP = 16  # patches are a multiple of this
ROWS = (2_000, 200_000)  # rows that are planned: at least (small sets come again), and at most
WINDOWS = 64  # of a set so small that it would come again and again
WASTE, LOST = 0.01, 0.001  # padding, and samples that are too long, of a budget that is suggested
UNBOUNDED = Budget(2**31 - 1, 2**31 - 1)
MOST = Budget(CANDIDATES[-1], UNBOUNDED.patches)  # of which the proportion of patches is taken where no budget is given
COUNTED = Cost(token=0, pair=1, label=0, patch=0, patch_pair=1)  # so that the costs of a plan are numbers of pairs


@dataclass(frozen=True)
class Load:
    """The contents of some packs, without padding."""

    packs: int = 0
    patch: int = 0
    patch_pair: int = 0
    token: int = 0
    pair: int = 0
    label: int = 0
    sample: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Packing:
    """The packs that a budget makes of the examined training rows."""

    budget: Budget
    with_images: Load  # packs with images
    texts: Load  # packs without
    rows: int  # that were planned
    too_long: int  # of them, those that are over the budget, or over the model's positions
    settled: bool  # whether enough packs were closed that those still open at the end do not matter; otherwise they are counted

    @property
    def load(self) -> Load:
        return self.with_images + self.texts

    @property
    def waste(self) -> float:
        """Padding, as a share of all slots for tokens."""
        return 1 - self.load.token / (self.load.packs * self.budget.tokens)

    @property
    def patch_share(self) -> float:
        """Patches, as a share of those that the packs could hold."""
        return self.load.patch / (self.load.packs * self.budget.patches) if self.budget.patches else 0.0

    @property
    def lost(self) -> float:
        return self.too_long / self.rows

    @property
    def good(self) -> bool:
        return self.settled and self.waste <= WASTE and self.lost <= LOST


Shards = frozenset[tuple[int, int]]


def packings(reader: Reader, shards: Shards, now: Budget | None, others: bool = True) -> tuple[Packing, ...]:
    """The packings of the present budget if there is one, then of `others`, with patches in the proportion that the data has. Rows come
    from these shards, by source and number. Samples over a budget are left out here, whatever `too_long` says."""
    known, now = now is not None, now or MOST
    first = packing(reader, shards, now)
    if not others:
        return () if first is None else (first,)
    sizing = Sizing(reader.training.index, UNBOUNDED, min(UNBOUNDED.tokens, reader.longest), "reject", COUNTED)
    size_G2 = np.concatenate([np.empty((0, 2), np.int64), *(_sizes(reader, sizing, *entry) for entry in sorted(shards))])
    out = [first] if known else []
    # rows that are encoded together, and weights of sources, make the share of patches another than that of the rows one by one
    scale = first.load.patch / first.load.token / _share(size_G2, now.tokens) if first and first.load.patch else 1.0
    for tokens in (n for n in CANDIDATES if len(size_G2) and n >= np.median(size_G2[:, 0]) and not (known and n == now.tokens)):
        fitting_G2 = size_G2[size_G2[:, 0] <= tokens]
        patches = -(-int(ROOM * scale * _share(size_G2, tokens) * tokens) // STEP) * STEP
        found = packing(reader, shards, Budget(tokens, max(patches, int(fitting_G2[:, 1].max()))))
        out.append(found)
        if found is not None and not found.settled:  # larger ones say even less
            break
    return tuple(found for found in out if found is not None)


def _sizes(reader: Reader, sizing: Sizing, source: int, shard: int) -> Longs:
    """Tokens and patches of each training row of a shard that can be used."""
    sized = sizing(source, shard)
    here = reader.training.kept_rows(source, shard) & sized.usable_R
    return np.stack([sized.tokens_R[here], sized.patches_R[here]], 1)


def _share(size_G2: Longs, tokens: int) -> float:
    """Patches per token of the samples that have at most `tokens` tokens."""
    summed = size_G2[size_G2[:, 0] <= tokens].sum(0)
    return float(summed[1] / max(summed[0], 1))


def suggest_budget(packings: Sequence[Packing]) -> Packing | None:
    """The smallest budget that wastes at most `WASTE` and loses at most `LOST`; where none does, the one that loses least, of equals the
    one that wastes least."""
    good = [p for p in packings if p.good]
    if good:
        return min(good, key=lambda p: p.budget.tokens)
    return min(packings, key=lambda p: (not p.settled, max(p.lost, LOST), p.waste), default=None)


def packing(reader: Reader, shards: Shards, budget: Budget) -> Packing | None:
    """The packing of one budget; None if it holds no sample, or none of a source that has a share."""
    sizing = Sizing(reader.training.index, budget, min(budget.tokens, reader.longest), "reject", COUNTED)
    pools = tuple(replace(pool, entries=tuple(entry for entry in pool.entries if entry in shards)) for pool in training_pools(reader))
    there = sum(int(reader.training.kept_rows(*entry).sum()) for pool in pools for entry in pool.entries)
    loads, bins, rows, lost, closed = [NOTHING], (), 0, 0, 0
    try:
        for number, ordered in enumerate(_windows(reader, pools, sizing), 1):
            made = plan(ordered, bins, sizing)
            bins = tuple(map(tuple, made.bins))
            load_I6 = _loads(made.row_G5, made.bounds_I1, sizing)
            loads += [load_I6[pack].sum(0)[None] for pack in made.packs]
            closed += len(made.packs)
            rows += len(ordered.row_R5)
            lost += sum(reject.cause == "too_long" for _, reject in made.rejects)
            enough = rows >= there and (number >= WINDOWS or rows >= ROWS[0] or (not made.packs and not bins))
            if enough or rows >= ROWS[1]:
                break
    except Refused:  # a source without a usable sample cannot have a share
        return None
    settled = closed >= OPEN_BINS
    if not settled:
        loads += [_loads(*_unpacked(bin), sizing).sum(0)[None] for bin in bins]
    load_K6 = np.concatenate(loads)
    with_images, texts = (Load(len(some), *some.sum(0).tolist()) for some in (load_K6[load_K6[:, 0] > 0], load_K6[load_K6[:, 0] == 0]))
    return Packing(budget, with_images, texts, rows, lost, settled) if len(load_K6) else None


def _windows(reader: Reader, pools: Sequence[Pool], sizing: Sizing) -> Iterator[Ordered]:
    """The rows of these pools as training meets them, without end. Nothing when there are none.

    From the second epoch on: the first windows of the first one are small, and of large data they are all that would be seen.
    """
    cursors = tuple(Cursor(epoch=1) for _ in pools)
    if not all(pool.entries for pool in pools):
        return
    for number in count():
        if reader.data.mix == "concat":
            ordered, after = window_of(pools[0], cursors[0])
            cursors = (after,)
        else:
            ordered, cursors = blended_window(pools, [source.weight for source in reader.data.sources], cursors, number, sizing)
        yield ordered


NOTHING = np.empty((0, 6), np.int64)


def _loads(row_G5: Longs, bounds_I1: Longs, sizing: Sizing) -> Longs:
    """Patches, their pairs, tokens, theirs, labels and samples of image groups. Rows of one show the same images."""
    if not len(row_G5):
        return NOTHING
    of_G5 = np.zeros((len(row_G5), 5), np.int64)
    shards, where_G = np.unique(row_G5[:, 2:4], axis=0, return_inverse=True)
    for n, (source, shard) in enumerate(shards.tolist()):
        here = np.flatnonzero(where_G.ravel() == n)
        sized, number = sizing(source, shard), row_G5[here, 4]
        for column, values in enumerate((sized.patches_R, sized.vision_R, sized.tokens_R, sized.language_R, sized.supervised_R)):
            of_G5[here, column] = values[number]
    starts = bounds_I1[:-1]
    summed = [np.maximum.reduceat(of_G5[:, :2], starts), np.add.reduceat(of_G5[:, 2:], starts), np.diff(bounds_I1)[:, None]]
    return np.concatenate(summed, 1)


def _unpacked(bin: Sequence[ImageGroup]) -> tuple[Longs, Longs]:
    """Rows of image groups as a plan has them, and their bounds."""
    rows = [(group.epoch, group.window, *row) for group in bin for row in group.rows]
    return np.array(rows, np.int64).reshape(-1, 5), np.cumsum([0, *(len(group.rows) for group in bin)])
