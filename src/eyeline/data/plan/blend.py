"""What an epoch is made of: rows of one side of the sources, in windows, and how sources are blended; and where a plan of them stands.

`once`: all shards of all sources are one pool, and every row comes exactly once an epoch (a source's `repeat` times).
`shares`: each source is a pool with epochs of its own; image groups come from the source that is furthest behind its share.

A *cursor* says where a pool stands; a *position* has the cursors, and the bins that were open there: all that a resumed run needs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyeline.core.errors import Refused
from eyeline.core.randomness import seed_for
from eyeline.data.plan.index import Index
from eyeline.data.plan.order import WINDOW_SHARDS, Runs, image_groups_of, shards_of
from eyeline.data.plan.plan import ImageGroup, Ordered
from eyeline.data.plan.shard_index import ShardIndex
from eyeline.data.plan.sizing import Sizing
from eyeline.data.signals.chosen import require_rows

VERSION = 6  # of a position as JSON
MIXED_ROWS = (2_048, 65_536)  # rows of the first window of `mix: interleave`, and of the largest: they double


@dataclass(frozen=True, eq=False)
class Side:
    """The rows to learn from, or those to validate on."""

    index: Index
    validation_fraction: float  # share of the images that is held out; 0: all rows are on this side
    held_out: bool  # whether this side is what is held out
    _limits: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def shards(self, source: int) -> int:
        """The number of shards of a source with rows on this side: all, or those up to its limit."""
        rows = self.index.sources[source]
        return len(rows.shards) if rows.source.limit is None else len(self._limited_rows(source))

    def kept_rows(self, source: int, shard: int) -> NDArray[np.bool_]:
        """A mask of the rows of a shard that are on this side."""
        kept = self._chosen_rows(source, shard)
        if self.index.sources[source].source.limit is not None:
            kept = kept & (np.cumsum(kept) <= self._limited_rows(source)[shard])
        return kept & self._side(self.index.shard(source, shard))

    def left_out(self, source: int, shard: int) -> int:
        """The number of rows of a shard that would be on this side, but for `where`."""
        rows = self.index.sources[source]
        if rows.chosen is None:
            return 0
        index, kept = self.index.shard(source, shard), self._chosen_rows(source, shard)
        out = index.kept_rows(rows.source.categories) & ~kept & self._side(index)
        if rows.source.limit is not None:  # behind the last row that it leaves, none is looked at
            out = out & (np.cumsum(kept) < self._limited_rows(source)[shard])
        return int(out.sum())

    def _chosen_rows(self, source: int, shard: int) -> NDArray[np.bool_]:
        """A mask of the rows that `categories` and `where` leave."""
        index, rows = self.index.shard(source, shard), self.index.sources[source]
        kept = index.kept_rows(rows.source.categories)
        return kept if rows.chosen is None else kept & require_rows(rows.chosen, shard, len(index))

    def _side(self, index: ShardIndex) -> NDArray[np.bool_]:
        return (index.drawn_R < self.validation_fraction) == self.held_out if self.validation_fraction else np.ones(len(index), bool)

    def _limited_rows(self, source: int) -> list[int]:
        """The number of rows of each of the first shards that a limit leaves."""
        if source not in self._limits:
            left, found = self.index.sources[source].source.limit or 0, []
            for shard in range(len(self.index.sources[source].shards)):
                if left <= 0:
                    break
                found.append(left)
                left -= int(self._chosen_rows(source, shard).sum())
            self._limits[source] = found
        return self._limits[source]


@dataclass(frozen=True)
class Cursor:
    """The position of a pool: a window of an epoch, and the image groups taken from it."""

    epoch: int = 0
    window: int = 0
    first: int = 0  # position of the window's first shard in the epoch's order
    group: int = 0
    given: int = 0  # usable rows given so far


@dataclass(frozen=True, eq=False)
class Pool:
    """Shards that are put in order together."""

    side: Side
    entries: tuple[tuple[int, int], ...]  # source and shard; one that is visited twice an epoch is there twice
    share: int  # rows of an image that come together
    seed: int | None  # None: as listed
    most: int = WINDOW_SHARDS  # of a window

    def shards(self, cursor: Cursor) -> list[tuple[int, int]]:
        """Source and shard of all that the cursor's window is made of."""
        return [self.entries[n] for n in self._chosen(cursor)]

    def epochs_done(self, cursor: Cursor) -> float:
        """Epochs that are done where a window starts, by shards."""
        return cursor.epoch + cursor.first / max(len(self.entries), 1)

    def _chosen(self, cursor: Cursor) -> list[int]:
        """The numbers of the entries that the cursor's window is made of."""

        def held(entry: int) -> int:
            source, shard = self.entries[entry]
            return self.side.index.sources[source].shards[shard].held

        return shards_of(self._runs, self.seed, cursor.epoch, cursor.first, cursor.window, held, self.most)

    @cached_property
    def _first_N(self) -> NDArray[np.bool_]:
        """Return whether each entry is the first one of its shard: of a shard that comes several times in an epoch, the one that counts."""
        first = {entry: n for n, entry in reversed([*enumerate(self.entries)])}
        return np.array([first[entry] == n for n, entry in enumerate(self.entries)], np.bool_)

    def rows_about(self, cursor: Cursor) -> int:
        """About how many different rows there are, by the cursor's window and the sizes of all shards. Exact where one window has all."""
        sources = self.side.index.sources
        here, every = ({*self.shards(cursor)}, {*self.entries})
        sizes = [sum(sources[source].shards[shard].bytes for source, shard in entries) for entries in (here, every)]
        rows = len(np.unique(self.window(cursor).row_R5[:, 2:], axis=0))
        return rows if here == every else round(rows * sizes[1] / max(sizes[0], 1))

    @cached_property
    def _runs(self) -> Runs:
        sources = self.side.index.sources
        return Runs.of(np.array([sources[source].shards[shard].joined for source, shard in self.entries], np.bool_))

    def make_indexes(self, cursor: Cursor) -> None:
        """Have the indexes of a window made, each by the first process that is at it: planning reads them then."""
        self.side.index.make(self.shards(cursor))

    def window(self, cursor: Cursor) -> Ordered:
        """The rows of the cursor's window, from the indexes of its shards."""
        rows, images, first = [np.empty((0, 5), np.int64)], [np.empty(0, np.uint64)], [np.empty(0, np.bool_)]
        left_out = 0
        for n in self._chosen(cursor):
            source, shard = self.entries[n]
            number_R = np.flatnonzero(self.side.kept_rows(source, shard))
            address = (np.full_like(number_R, value) for value in (cursor.epoch, cursor.window, source, shard))
            rows.append(np.stack([*address, number_R], 1))
            images.append(self.side.index.shard(source, shard).images_R[number_R])
            first.append(np.full(len(number_R), cursor.epoch == 0 and self._first_N[n]))
            left_out += self.side.left_out(source, shard) if cursor.epoch == 0 and self._first_N[n] else 0
        groups = image_groups_of(np.concatenate(images), self.share, self.seed, cursor.epoch, cursor.window)
        return Ordered(np.concatenate(rows)[groups.rows_R], groups.bounds_V1, np.concatenate(first)[groups.rows_R], left_out)

    def after(self, cursor: Cursor) -> Cursor:
        """Where the next window starts."""
        first = cursor.first + len(self._chosen(cursor))
        if first < len(self.entries):
            return replace(cursor, window=cursor.window + 1, first=first, group=0)
        return replace(cursor, epoch=cursor.epoch + 1, window=0, first=0, group=0)


def pool_of(side: Side, share: int, seed: int | None, repeated: bool = True) -> Pool:
    """One pool of everything."""
    sources = side.index.sources
    entries = [
        (source, shard)
        for source, rows in enumerate(sources)
        for _ in range(rows.source.repeat if repeated else 1)
        for shard in range(side.shards(source))
    ]
    return Pool(side, tuple(entries), share, seed)


def pools_of(side: Side, share: int, seed: int) -> tuple[Pool, ...]:
    """A pool for each source. Their windows are open at the same time, so each is the smaller: what is open does not grow with them."""
    most = max(WINDOW_SHARDS // len(side.index.sources), 1)
    return tuple(
        Pool(side, tuple((source, shard) for shard in range(side.shards(source))), share, seed_for(seed, "source", source), most)
        for source in range(len(side.index.sources))
    )


def window_of(pool: Pool, cursor: Cursor) -> tuple[Ordered, Cursor]:
    """A window of a pool, and the cursor behind it."""
    pool.make_indexes(cursor)
    return pool.window(cursor), pool.after(cursor)


def blended_window(
    pools: Sequence[Pool], weights: Sequence[float], cursors: Sequence[Cursor], number: int, sizing: Sizing
) -> tuple[Ordered, tuple[Cursor, ...]]:
    """Window `number` of `mix: interleave`, and the cursors behind it.

    Each image group is taken from the source that is furthest behind its share of the usable rows given so far; of equals, from the
    first. So after any number of rows each source has had its share, give or take an image group.
    """
    parts = [_Part(pool, cursor, sizing) for pool, cursor in zip(pools, cursors, strict=True)]
    whole_weights = [max(round(weight * 1_000_000), 1) for weight in weights]  # integers: the same choice on every machine
    summed = sum(whole_weights)
    wanted = min(MIXED_ROWS[0] << min(number, 16), MIXED_ROWS[1])
    given = [cursor.given for cursor in cursors]
    total, met = sum(given), 0
    picks: list[int] = []
    while met < wanted:
        n = max(range(len(parts)), key=lambda n: (whole_weights[n] * (total + 1) - given[n] * summed, -n))
        rows, usable = parts[n].take()
        picks.append(n)
        met += rows
        given[n] += usable
        total += usable
    return _merge(parts, picks), tuple(replace(part.cursor, given=count) for part, count in zip(parts, given, strict=True))


@dataclass(eq=False)
class _Part:
    """The part of a mixed window that comes from one pool."""

    pool: Pool
    cursor: Cursor
    sizing: Sizing
    rows: list[Any] = field(default_factory=list)  # of each image group taken, as in Ordered
    _window: Ordered | None = None
    _usable_V: list[int] = field(default_factory=list)
    left_out: int = 0  # rows of the windows that were begun, as in Ordered
    _barren: int = 0  # windows in a row without a usable row

    def take(self) -> tuple[int, int]:
        """Take the next image group; its rows, and how many of them can be used."""
        while self._window is None or self.cursor.group >= len(self._window.bounds_V1) - 1:
            self._next()
        assert self._window is not None
        start, end = self._window.bounds_V1[self.cursor.group : self.cursor.group + 2]
        usable = self._usable_V[self.cursor.group]
        self.rows.append(self._window.row_R5[start:end])
        self.cursor = replace(self.cursor, group=self.cursor.group + 1)
        return int(end - start), usable

    def _next(self) -> None:
        if self._window is not None:
            self.cursor = self.pool.after(self.cursor)
        self.pool.make_indexes(self.cursor)
        self._window = self.pool.window(self.cursor)
        self.left_out += self._window.left_out if self.cursor.group == 0 else 0  # else it was begun, and counted, before
        usable = np.array([self.sizing(s, h).usable_R[r] for _, _, s, h, r in self._window.row_R5.tolist()], np.int64)
        self._usable_V = np.diff(np.concatenate([[0], np.cumsum(usable)])[self._window.bounds_V1]).tolist()
        self._barren = 0 if any(self._usable_V) else self._barren + len(self.pool.shards(self.cursor))
        if self._barren >= len(self.pool.entries):
            source = self.pool.side.index.sources[self.pool.entries[0][0]]
            raise Refused(f"{source.path}: no sample can be used, so it cannot have a share. `eyeline check` says why")


def _merge(parts: Sequence[_Part], picks: Sequence[int]) -> Ordered:
    taken = [iter(part.rows) for part in parts]
    rows = [next(taken[n]) for n in picks]
    row_R5 = np.concatenate(rows)
    left_out = sum(part.left_out for part in parts)
    return Ordered(row_R5, np.cumsum([0, *(len(r) for r in rows)]), row_R5[:, 0] == 0, left_out)  # no source comes twice in its own epoch


# Where a plan stands


@dataclass(frozen=True)
class OpenBins:
    """The image groups of the bins that are open between two windows."""

    bins: tuple[tuple[ImageGroup, ...], ...] = ()

    def without(self, first: int) -> "OpenBins":
        """All but the first `packs`."""
        return OpenBins(self.bins[first:])

    @cached_property
    def as_json(self) -> list[Any]:
        """As JSON: the same at every step of a window."""
        return [_groups_as_json(bin) for bin in self.bins]

    @staticmethod
    def of(written: Sequence[Any]) -> "OpenBins":
        return OpenBins(
            tuple(
                tuple(
                    ImageGroup(epoch, window, tuple((source, shard, number) for source, shard, *numbers in runs for number in numbers))
                    for epoch, window, groups in bin
                    for runs in groups
                )
                for bin in written
            )
        )


def _groups_as_json(groups: Sequence[ImageGroup]) -> list[list[Any]]:
    """[epoch, window, groups] for each run of groups of one window; a group is [source, shard, rows ...] for each run of a shard."""
    out: list[list[Any]] = []
    for group in groups:
        if not out or (group.epoch, group.window) != (out[-1][0], out[-1][1]):
            out.append([group.epoch, group.window, []])
        runs: list[list[int]] = []
        for source, shard, number in group.rows:
            if not runs or runs[-1][:2] != [source, shard]:
                runs.append([source, shard])
            runs[-1].append(number)
        out[-1][2].append(runs)
    return out


@dataclass(frozen=True)
class Position:
    """A window, how many of its packs were given, and the bins that were open where it starts."""

    cursors: tuple[Cursor, ...]  # where the window starts: of the pool of everything, or of each source's
    number: int = 0  # windows before it
    done: int = 0  # packs of the window that were given
    bins: OpenBins = OpenBins()
    digest: str | None = None  # of the window's plan, once it is made
    group_share: float = 0.0  # of an epoch, that each image group in the open bins is

    def state(self) -> dict[str, Any]:
        """The position as JSON. An image group is its rows, under the epoch and window that drew it."""
        return {
            "epoch": self.cursors[0].epoch,
            "number": self.number,
            "done": self.done,
            "digest": self.digest,
            "cursors": [asdict(cursor) for cursor in self.cursors],
            "bins": self.bins.as_json,
            "group_share": self.group_share,
        }

    def group_share_behind(self, share: float, groups: int) -> float:
        """`group_share` behind the window here, which is that share of an epoch and has so many image groups with those carried in."""
        return (share + self.group_share * sum(map(len, self.bins.bins))) / groups if groups else 0.0

    @staticmethod
    def of(state: dict[str, Any]) -> "Position":
        return Position(
            cursors_of(state), state["number"], state["done"], OpenBins.of(state["bins"]), state["digest"], state.get("group_share", 0.0)
        )


def cursors_of(state: dict[str, Any]) -> tuple[Cursor, ...]:
    """Where the window of a state starts."""
    return tuple(Cursor(**cursor) for cursor in state["cursors"])
