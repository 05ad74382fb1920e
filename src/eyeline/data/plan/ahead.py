"""Indexes made before they are needed: those of the windows to come while the ones before are learned from, or all of them at once.

Where there are workers, other processes make them: the one that trains only maps what they have written. It never depends on them:
an index that is not there when it is needed is made where it is needed, or waited for while another process is at it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from eyeline.core.errors import BadSample
from eyeline.data.plan.index import Index
from eyeline.data.workers import At, Background, Workers, in_order

Entry = tuple[int, int]  # source and shard


@dataclass(frozen=True)
class Wanted:
    """Indexes that one process makes in their order, as a job. It has no parts: a process that dies of it dies of no row in particular."""

    entries: tuple[Entry, ...]
    bytes: int = 0

    def only(self, part: int) -> Self:  # noqa: ARG002
        return self

    def without(self, part: int, bad: BadSample) -> Self:  # noqa: ARG002
        return self


@dataclass(frozen=True, eq=False)
class Making:
    """`making(wanted)`: what another process does."""

    index: Index

    def __call__(self, wanted: Wanted, at: At) -> None:  # noqa: ARG002
        self.index.make(wanted.entries)


def make_each(index: Index, absent: Sequence[Entry], workers: Workers) -> Iterator[None]:
    """Have each made, by all workers that have something to do. Comes once for each, in order."""
    if workers.count and absent:
        jobs = ((None, Wanted((entry,))) for entry in absent)
        how = replace(workers, count=min(workers.count, len(absent)), most_bytes=None)
        yield from (done for _, done in in_order(jobs, Making(index), how))
        return
    for entry in absent:
        yield index.make([entry])


@dataclass(eq=False)
class Ahead:
    """Has the indexes of coming windows made, by a process of its own or here."""

    index: Index
    apart: bool  # by a process of its own, which lives while any is missing
    _process: Background[Wanted] | None = field(default=None, repr=False)

    @staticmethod
    def of(index: Index, workers: Workers) -> "Ahead":
        return Ahead(index, apart=workers.count > 0 and index.written)

    def begin(self, coming: Iterable[Entry]) -> None:
        """A window's. Of the same folder every process is asked for the same ones, and each makes those that no other is at."""
        if not self.apart:
            return
        missing = tuple(entry for entry in coming if self.index.absent(*entry))
        if not missing:
            self.close()
            return
        if self._process is None:
            self._process = Background(Making(self.index))
        self._process.begin(Wanted(missing))

    def share(self, coming: Sequence[Entry], done: int, of: int) -> None:
        """Here, where there is no such process: one now and then, so that no step waits for all of the next window."""
        if not self.apart:
            self.index.make(coming[max(done - 1, 0) * len(coming) // of : done * len(coming) // of])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
