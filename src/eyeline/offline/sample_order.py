"""The rows of a stage in the order in which its first epoch needs them: one sequential pass over the plan, since open bins carry over."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.data.loader import PlannedWindow, planned_windows
from eyeline.data.plan.blend import Side
from eyeline.data.plan.plan import Pack, RowOf
from eyeline.data.plan.shard_index import Longs
from eyeline.data.reader import Reader, sizing_of
from eyeline.data.rejects import Rejects
from eyeline.data.validation import validation_packs


class SampleOrder(NamedTuple):
    """The rows in the order in which they are first needed: source, shard, number of each."""

    rows_R3: Longs
    validation_R3: Longs
    windows: list[str]  # digests of those that were planned for it
    packs: int


def sample_order(reader: Reader, budget: Budget, packs: int | None) -> SampleOrder:
    """Every row to learn from as it is first needed, and every row to validate on.

    Of `mix: interleave` that is the order of the first `packs` packs, or fewer if all rows have come. Rows that never come, as they
    are too long, are last: planning may look at them. TooManyRejects as in training.
    """
    rejects = Rejects(None, reader.data.max_reject_rate)
    sizing, once = sizing_of(reader, budget), reader.data.mix == "concat"
    usable = sum(int(sizing(s, h).usable_R[number_R].sum()) for s, h, number_R in sound_rows(reader.training))
    rows = _Rows()
    windows: list[str] = []
    count = 0
    for window, pack in packs_of_plan(planned_windows(reader, sizing, 1 if once else None), packs):
        if window.number == len(windows):
            windows.append(window.plan.digest)
        met = window.plan.rest if pack is None else pack.met
        rejects.seen += met.first
        for reject in met.rejects:
            rejects.add(reject)
        if pack is not None:
            count += 1
            rows.add(row for group in pack.groups for row in group.rows)
        if not once and len(rows) == usable:
            break
    if not len(rows):
        raise Refused(f"no sample can be used: all {rejects.seen} were rejected. `eyeline check` says why")
    rejects.check(once, lambda: sum(int(reader.training.kept_rows(s, h).sum()) for s, h, _ in sound_rows(reader.training)))
    rows.add((s, h, number) for s, h, number_R in sound_rows(reader.training) for number in number_R.tolist())
    validated = _Rows()
    if reader.validates:
        packed = validation_packs(reader, sizing_of(reader, budget, validation=True), [])
        validated.add(row for pack in packed for group in pack for row in group.rows)
        validated.add((s, h, number) for s, h, number_R in sound_rows(reader.validation) for number in number_R.tolist())
    return SampleOrder(rows.in_order, validated.in_order, windows, count)


class _Rows:
    """Rows, each once, in the order in which they came: 25 bytes per row."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._seen: dict[tuple[int, int], bytearray] = {}

    def __len__(self) -> int:
        return len(self._numbers) // 3

    @property
    def in_order(self) -> Longs:
        return np.array(self._numbers, np.int64).reshape(-1, 3)

    def add(self, rows: Iterable[RowOf]) -> None:
        for source, shard, number in rows:
            seen = self._seen.setdefault((source, shard), bytearray())
            if number >= len(seen):
                seen.extend(bytes(number + 1 - len(seen)))
            if not seen[number]:
                seen[number] = 1
                self._numbers.extend((source, shard, number))


def packs_of_plan(windows: Iterator[PlannedWindow], most: int | None) -> Iterator[tuple[PlannedWindow, Pack | None]]:
    """Each pack with its window, up to a number; None stands for the rows behind a window's last pack."""
    count = 0
    for window in windows:
        for pack in window.packs:
            yield window, pack
            count += 1
            if count == most:
                return
        yield window, None


def sound_rows(side: Side) -> Iterator[tuple[int, int, Longs]]:
    """Source, shard, and numbers of the rows of a side there, without unusable ones."""
    for source in range(len(side.index.sources)):
        for shard in range(side.shards(source)):
            yield source, shard, np.flatnonzero(side.kept_rows(source, shard) & ~side.index.shard(source, shard).bad_R)
