"""Where a plan stands: all that a resumed run needs of it, as JSON.

That is a window, how many of its packs were given, and the bins that were open where it starts. Few rows of open bins are written out;
many are written by where they stand in the order of their window. A window's rows come in a drawn order and go into bins as they come.
So the places of a bin's rows rise in small steps, which take few bits, where their numbers would look like chance. The order itself is
no state: whoever reads draws it again.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from eyeline.data.plan.blend import Cursor
from eyeline.data.plan.order import Longs
from eyeline.data.plan.plan import ImageGroup, RowOf

VERSION = 5  # of the state
MANY = 512  # rows of one window that are written out; to read more the window's order is drawn, which needs the indexes of its shards

WindowAddress = tuple[int, int, int]  # pool, epoch and window
RowsInOrder = Callable[[WindowAddress], Longs]  # rows in the order of a window: source, shard, number


@dataclass(frozen=True)
class Position:
    """A window, how many of its packs were given, and the bins that were open where it starts."""

    cursors: tuple[Cursor, ...]  # where the window starts: of the pool of everything, or of each source's
    number: int = 0  # windows before it
    done: int = 0  # packs of the window that were given
    bins: "Carried" = field(default_factory=lambda: Carried(()))
    digest: str | None = None  # of the window's plan, once it is made

    def state(self) -> dict[str, Any]:
        """The position as JSON. An image group is its rows, under the epoch and window that drew it."""
        return {
            "epoch": self.cursors[0].epoch,
            "number": self.number,
            "done": self.done,
            "digest": self.digest,
            "cursors": [asdict(cursor) for cursor in self.cursors],
            "bins": self.bins.written,
        }

    @staticmethod
    def of(state: dict[str, Any], order: RowsInOrder | None = None) -> "Position":
        cursors = cursors_of(state)
        return Position(cursors, state["number"], state["done"], Carried.read(state["bins"], len(cursors), order), state["digest"])


def cursors_of(state: dict[str, Any]) -> tuple[Cursor, ...]:
    """Where the window of a state starts."""
    return tuple(Cursor(**cursor) for cursor in state["cursors"])


@dataclass(frozen=True)
class Carried:
    """Open bins between two windows."""

    bins: tuple[tuple[ImageGroup, ...], ...]
    pools: int = field(default=1, compare=False)  # 1: of everything; else one a source
    order: RowsInOrder | None = field(default=None, compare=False, repr=False)  # None: every row is written out

    def without(self, first: int) -> "Carried":
        """All but the first so many."""
        return Carried(self.bins[first:], self.pools, self.order)

    @cached_property
    def written(self) -> list[Any]:
        """As JSON: the same at every step of a window."""
        rows = Counter[WindowAddress]()
        for bin in self.bins:
            for group in bin:
                rows[self._drawn(group)] += len(group.rows)
        places = {drawn: _Places(self.order(drawn)) for drawn, count in rows.items() if count > MANY} if self.order else {}
        return [
            [
                stretch
                for many, groups in groupby(bin, lambda group: self._drawn(group) in places)
                for stretch in ([self._packed(list(groups), places)] if many else _written(groups))
            ]
            for bin in self.bins
        ]

    def _drawn(self, group: ImageGroup) -> WindowAddress:
        return group.rows[0][0] if self.pools > 1 else 0, group.epoch, group.window

    def _packed(self, groups: Sequence[ImageGroup], places: "dict[WindowAddress, _Places]") -> list[Any]:
        """[orders, text]: for each row how far it stands behind the last one of its order, doubled, and 1 more where it starts a group;
        then the number of the order of the group follows."""
        orders = list(dict.fromkeys(map(self._drawn, groups)))
        last = dict.fromkeys(orders, 0)
        numbers: list[int] = []
        for group in groups:
            drawn = self._drawn(group)
            for n, place in enumerate(places[drawn].of(group.rows)):
                behind = place - last[drawn]  # not below 0, unless a row comes twice in a window
                numbers += [4 * behind + (n == 0) if behind >= 0 else -4 * behind - 2 + (n == 0)] + [orders.index(drawn)] * (n == 0)
                last[drawn] = place
        return [[list(drawn) for drawn in orders], base64.b64encode(zlib.compress(_bytes(numbers), 9)).decode()]

    @staticmethod
    def read(bins: Sequence[Any], pools: int = 1, order: RowsInOrder | None = None) -> "Carried":
        """What was written."""
        return Carried(tuple(tuple(group for stretch in bin for group in _groups(stretch, order)) for bin in bins), pools, order)


class _Places:
    """Where rows stand in an order."""

    def __init__(self, rows_R3: Longs):
        self.keys = _keys(rows_R3)
        self.sorted = np.argsort(self.keys, kind="stable")

    def of(self, rows: Sequence[RowOf]) -> list[int]:
        return self.sorted[np.searchsorted(self.keys, _keys(np.array(rows, np.int64)), sorter=self.sorted)].tolist()


def _keys(rows_R3: Longs) -> Longs:
    source, shard, number = rows_R3.T
    return (source << 56) + (shard << 28) + number


def _written(groups: Iterator[ImageGroup]) -> list[list[Any]]:
    """[epoch, window, groups] for each stretch of one window; a group is [source, shard, rows ...] for each stretch of a shard."""
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


def _groups(stretch: Sequence[Any], order: RowsInOrder | None) -> Iterator[ImageGroup]:
    if len(stretch) == 3:
        epoch, window, groups = stretch
        for runs in groups:
            yield ImageGroup(epoch, window, tuple((source, shard, number) for source, shard, *numbers in runs for number in numbers))
        return
    assert order is not None, "rows that are written by their places are read with their orders"
    orders, text = stretch
    rows = [order((pool, epoch, window)) for pool, epoch, window in orders]
    last = [0] * len(orders)
    numbers = _numbers(zlib.decompress(base64.b64decode(text)))
    n, found = 0, list[RowOf]()
    for number in numbers:
        if number & 1:
            if found:
                yield ImageGroup(orders[n][1], orders[n][2], tuple(found))
            n, found = next(numbers), []
        last[n] += -((number + 2) >> 2) if number & 2 else number >> 2
        source, shard, row = rows[n][last[n]].tolist()
        found.append((source, shard, row))
    yield ImageGroup(orders[n][1], orders[n][2], tuple(found))


def _bytes(numbers: Sequence[int]) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _numbers(data: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
