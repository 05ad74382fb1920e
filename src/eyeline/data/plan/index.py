"""The indexes of all shards of some sources: each is read from disk, or made when it is first needed.

A file that is damaged, or whose images have changed, is made anew. Processes that share a folder, such as the ranks of a run, make each
index once: one does, the others wait for it.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eyeline.core.errors import StorageFailed
from eyeline.core.files import claimed, make_folder, storage_failed, write_atomically
from eyeline.core.image_rule import ImageRule
from eyeline.core.locations import Remote, Stamp, location
from eyeline.data.plan.read_shard import ABSENT, shard_index_of, stamp_of
from eyeline.data.plan.shard_index import ShardIndex, Shelf, from_bytes, identity_of, index_path, to_bytes
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder

KEPT_OPEN = 128  # shards whose index stays open: those of a window and of the ones beside it, and some that open bins still refer to


@dataclass(frozen=True, eq=False)
class Index:
    """The indexes of all shards of some sources, each made when it is first asked for."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None
    folder: Path | None  # None: they are remembered only, as far as there is room
    shelf: Shelf | None = None  # of prepared data: they are read there, and none is made
    _open: OrderedDict[tuple[int, int], ShardIndex] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": OrderedDict()}

    @property
    def written(self) -> bool:
        """Whether other processes find here what this one makes, and the other way round."""
        return self.folder is not None and self.shelf is None

    def absent(self, source: int, shard: int) -> bool:
        """Whether nobody has written the index of a shard yet, as far as it can be told: who reads it is told why it cannot be read."""
        path = self._path(self._identity(source, shard))
        return path is None or not os.path.exists(path)

    def shard(self, source: int, shard: int) -> ShardIndex:
        """The index of one shard: remembered, read, made, or waited for."""
        known = self._index(source, shard, wait=True)
        assert known is not None, "what was waited for is there"
        return known

    def make(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Read or make those that no other process is making: so many processes make different ones."""
        for source, shard in wanted:
            self._index(source, shard, wait=False)

    def _index(self, source: int, shard: int, wait: bool) -> ShardIndex | None:
        known = self._open.get((source, shard))
        if known is None and self.shelf is not None:
            known = self.shelf.read(self._identity(source, shard))
        if known is None:
            known = self._read(source, shard)
        if known is None:
            known = self._made_or_waited_for(source, shard, wait)
        if known is not None:
            self._open[source, shard] = known
            self._open.move_to_end((source, shard))
            while len(self._open) > KEPT_OPEN:
                self._open.popitem(last=False)
        return known

    def _identity(self, source: int, shard: int) -> str:
        rows = self.sources[source]
        return identity_of(rows.shards[shard], rows.layout.identity, rows.root, self.encoder, self.rule)

    def _path(self, identity: str) -> Path | None:
        return index_path(self.folder, identity) if self.folder else None

    def _read(self, source: int, shard: int) -> ShardIndex | None:
        """The index on disk, if there is one that is sound and still true."""
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
            read = self._read(source, shard)
            if read is None:
                made = shard_index_of(self.sources[source], shard, self.encoder, self.rule)
                write_atomically(path, to_bytes(made, identity), durable=False)
                read = self._read(source, shard)
        if read is None:
            raise StorageFailed(
                f"{self.sources[source].path} or its images change while they are read. Start again when nothing writes to them"
            )
        return read


def _is_still(written: str, stamp: Stamp, retries: int) -> bool:
    """Whether an image is as it was. Of objects only absent ones are asked for: the others tell when they are fetched, at no cost."""
    path = location(written) if "://" in written else written
    return (isinstance(path, Remote) and stamp != ABSENT) or stamp_of(path if isinstance(path, Remote) else written, retries) == stamp
