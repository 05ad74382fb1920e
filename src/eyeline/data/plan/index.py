"""The indexes of all shards of some sources: each is read from disk, or made when it is first needed, or before.

A file that is damaged, or whose images have changed, is made again. Processes that share a folder, such as the ranks of a run, make each
index once: one does, the others wait for it.

Where there are workers, other processes make the indexes of the windows to come, or all of them at once: the one that trains only maps
what they have written. It never depends on them: an index that is not there when it is needed is made where it is needed.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import claimed, make_folder, storage_failed, write_atomically
from eyeline.core.image_rule import ImageRule
from eyeline.core.locations import Remote, Stamp, location
from eyeline.core.recent import Recent
from eyeline.data.plan.read_shard import ABSENT, shard_index_of, stamp_of
from eyeline.data.plan.shard_index import ShardIndex, Shelf, from_bytes, identity_of, index_path, to_bytes
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.workers import At, Background, Workers, in_order

Entry = tuple[int, int]  # source and shard
KEPT_OPEN = 128  # shards whose index stays open: those of a window and of its neighbours, and some that open bins still refer to


@dataclass(frozen=True, eq=False)
class Index:
    """The indexes of all shards of some sources, each made when it is first asked for."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None
    folder: Path | None  # None: they are remembered only, as far as there is room
    shelf: Shelf | None = None  # of prepared data: they are read there, and none is made
    _open: Recent[Entry, ShardIndex] = field(default_factory=Recent, repr=False)

    @property
    def is_shared(self) -> bool:
        """Return whether other processes find here what this one makes, and the other way round."""
        return self.folder is not None and self.shelf is None

    def absent(self, source: int, shard: int) -> bool:
        """Return whether the index of a shard is not written yet, as far as that is known: reading it raises the reason why it cannot be
        read."""
        path = self._path(self._identity(source, shard))
        return path is None or not os.path.exists(path)

    def shard(self, source: int, shard: int) -> ShardIndex:
        """The index of one shard: remembered, read, made, or waited for."""
        known = self._index(source, shard, wait=True)
        assert known is not None, "what was waited for is there"
        return known

    def make(self, wanted: Iterable[Entry]) -> None:
        """Read or make those that no other process is making: thus many processes make different ones."""
        for source, shard in wanted:
            self._index(source, shard, wait=False)

    def _index(self, source: int, shard: int, wait: bool) -> ShardIndex | None:
        known = self._open.get((source, shard))
        if known is not None:
            return known
        known = self.shelf.read(self._identity(source, shard)) if self.shelf is not None else self.read(source, shard)
        if known is None:
            known = self._made_or_waited_for(source, shard, wait)
        return None if known is None else self._open.keep((source, shard), known, KEPT_OPEN)

    def _identity(self, source: int, shard: int) -> str:
        rows = self.sources[source]
        return identity_of(rows.shards[shard], rows.layout.identity, rows.root, self.encoder, self.rule)

    def _path(self, identity: str) -> Path | None:
        return index_path(self.folder, identity) if self.folder else None

    def read(self, source: int, shard: int) -> ShardIndex | None:
        """The index on disk, if there is one that is valid and up to date."""
        identity = self._identity(source, shard)
        path = self._path(identity)
        if path is None:
            return None
        try:
            index = from_bytes(np.asarray(np.memmap(path, np.uint8, "r")), identity)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise storage_failed("read", path, error) from error
        retries = self.sources[source].retries
        if not all(
            _is_still(file, (size, change), retries) for file, (size, change) in zip(index.files, index.stamps_F2.tolist(), strict=True)
        ):
            return None
        return index

    def _made_or_waited_for(self, source: int, shard: int, wait: bool) -> ShardIndex | None:
        """The index, made here unless another process has made it meanwhile. None: another one is at it, and we do not wait."""
        identity = self._identity(source, shard)
        path = self._path(identity)
        if path is None:
            return shard_index_of(self.sources[source], shard, self.encoder, self.rule)
        make_folder(path.parent)
        with claimed(path, wait) as mine:
            if not mine:
                return None
            read = self.read(source, shard)
            if read is None:
                made = shard_index_of(self.sources[source], shard, self.encoder, self.rule)
                write_atomically(path, to_bytes(made, identity), durable=False)
                read = self.read(source, shard)
        if read is None:
            raise StorageFailed(
                f"{self.sources[source].path} or its images change while they are read. Start again when nothing writes to them"
            )
        return read


def _is_still(written: str, stamp: Stamp, retries: int) -> bool:
    """Return whether an image is as it was. Of objects only absent ones are asked for: the others tell when they are fetched, at no
    cost."""
    path = location(written) if "://" in written else written
    return (isinstance(path, Remote) and stamp != ABSENT) or stamp_of(path if isinstance(path, Remote) else written, retries) == stamp


# Made before they are needed


@dataclass(frozen=True)
class Wanted:
    """Indexes that one process makes in their order, as a job. It has no parts: a crash while it runs belongs to no row in particular."""

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
        return Ahead(index, apart=workers.count > 0 and index.is_shared)

    def start(self, coming: Iterable[Entry]) -> None:
        """A window's. Of the same folder every process is asked for the same ones, and each makes those that no other is at."""
        if not self.apart:
            return
        missing = tuple(entry for entry in coming if self.index.absent(*entry))
        if not missing:
            self.close()
            return
        if self._process is None:
            self._process = Background(Making(self.index))
        self._process.start(Wanted(missing))

    def share(self, coming: Sequence[Entry], done: int, of: int) -> None:
        """Here, where there is no such process: one now and then, so that no step waits for all of the next window."""
        if not self.apart:
            self.index.make(coming[max(done - 1, 0) * len(coming) // of : done * len(coming) // of])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
