"""Containers of rows: a list of shards that is cheap to make, each read in order for an index, and any row by its place.

All bytes of data but those of image files are read through a `Window`, which notices a file that has changed since it was opened,
and asks a store that fails again before it gives up.
"""

import errno
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from eyeline.core.batch import Span
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import storage_failed
from eyeline.core.locations import Location, Remote, Stamp
from eyeline.data.files import stores

HASHED = 64 << 20  # files up to this size are known by their content, larger ones by size and time
SHARD_BYTES = 4 << 20  # of text: enough that a shard is worth a request, and so few rows that the first one is soon indexed
SHARD_ROWS = 2048
COUNTED_BYTES = 4 << 20  # of text whose lines are counted together
HEADER_BYTES = 4096  # of an image in an archive are read at first: most say their size there
RETRIES = 3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
PASSING = {  # errors of a store that may be gone the next time
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENFILE, errno.EMFILE),
    *(errno.ECONNRESET, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
}

T = TypeVar("T")


class Place(NamedTuple):
    """The location of one row."""

    shard: int
    number: int  # among all rows of the shard, those that cannot be read included
    start: int  # what random access needs: an offset, or a row of a row group
    length: int


@dataclass(frozen=True)
class Shard:
    """A part of a container that is read in one go."""

    name: str  # for messages: the file, and which part of it
    fingerprint: str  # of its content, and not of its location: a set that was moved is the same set
    bytes: int  # about
    held: int = 0  # bytes that a process keeps to read its rows in any order
    joined: bool = False  # it is in the same group as the shard before it, which is read whole: both come together, and `held` counts both


class Container(Protocol):
    """Rows of one file or of several. Its pickle is small: the unpickled object reads the same files again."""

    @property
    def what(self) -> str: ...  # "JSON list"

    @property
    def header(self) -> tuple[str, ...]: ...  # names of all columns, where it has them once for all rows

    @property
    def shards(self) -> tuple[Shard, ...]: ...  # in the order of the files

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        """Every row of a shard in order, parsed, or why it cannot be."""
        ...

    def row(self, place: Place) -> Any:
        """One row. Raises BadSample as `rows` gives it, and StorageFailed when the file has changed."""
        ...

    def id(self, place: Place) -> str:
        """The name of a row, equal in every run. Costs nothing."""
        ...

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        """(its id, the file that it is in, its number there, from 0). Of a row far into a large file this may take a second or more."""
        ...

    def line(self, place: Place) -> int | None:
        """The line of the file that a row starts in, as editors count them, from 1. None where a file is not text."""
        ...

    def file_of(self, shard: int) -> "File":
        """The file of a shard, and of every `Span` in its rows."""
        ...


@dataclass(frozen=True)
class File:
    """A file, or an object of a store, as it was when it was opened."""

    path: Location
    stamp: Stamp
    retries: int  # how often more a failing store is asked

    @staticmethod
    def of(path: Location, retries: int) -> "File":
        if isinstance(path, Remote):
            return File(path, path.about or persistent(partial(stores.stamp_of, path), retries), retries)
        try:
            about = os.stat(path)
        except OSError as error:
            raise storage_failed("read", path, error) from error
        return File(path, (about.st_size, about.st_mtime_ns), retries)

    @property
    def size(self) -> int:
        return self.stamp[0]

    def check(self) -> None:
        """StorageFailed when the file is not the one that was opened."""
        FileSlice(self, 0, 0).close()

    def read(self, start: int, length: int) -> bytes:
        """Exactly `length` bytes. StorageFailed when the store fails, or when the file is not the one that was opened."""
        with FileSlice(self, start, length) as window:
            data = window.read()
        if len(data) < length:
            raise StorageFailed(f"{self.path} ended {length - len(data):,} bytes early. A part of it is missing in its store; restore it")
        return data


class FileSlice(io.RawIOBase):
    """A part of a file, as a file. StorageFailed as `File.read` raises it."""

    def __init__(self, file: File, start: int, length: int):
        self._about, self._begin, self._length, self._at = file, start, length, 0
        path = file.path
        self._handle = None if isinstance(path, Remote) else persistent(partial(self._open_handle, path), file.retries)

    def _open_handle(self, path: Path) -> int:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            about = os.fstat(handle)
        except OSError as error:
            raise storage_failed("read", path, error) from error
        if (about.st_size, about.st_mtime_ns) != self._about.stamp:  # else rows would be read in pieces, and not be those that were planned
            os.close(handle)
            raise stores.changed_error(path)
        return handle

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence], 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Less than asked for only at the end, whatever was asked for: a hostile length costs no memory."""
        left = max(self._length - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        pieces: list[bytes] = []
        while wanted > 0 and (piece := persistent(partial(self._piece, wanted), self._about.retries)):
            pieces.append(piece)
            self._at += len(piece)
            wanted -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readall(self) -> bytes:
        return self.read()

    def _piece(self, wanted: int) -> bytes:
        path, start = self._about.path, self._begin + self._at
        if isinstance(path, Remote):
            return stores.piece(path, self._about.stamp, start, wanted) if start < self._about.size else b""
        assert self._handle is not None
        try:
            return os.pread(self._handle, wanted, start)
        except OSError as error:
            raise storage_failed("read", path, error) from error

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        handle = None if self.closed else getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)
        super().close()


class _Begun(io.RawIOBase):
    """A span as a file. What goes beyond its first bytes is read when it is asked for."""

    def __init__(self, span: Span):
        self._span, self._at = span, 0
        self._rest: FileSlice | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._span.length}[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        span = self._span
        data = span.data[self._at : self._at + len(buffer)]
        if not data:
            if self._rest is None:
                self._rest = FileSlice(File(span.path, span.stamp, 0), span.start, span.length)
            self._rest.seek(self._at)
            data = self._rest.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._rest is not None:
            self._rest.close()
        super().close()


def span_file(span: Span) -> io.BytesIO | io.BufferedReader:
    """The bytes of a span, as a file that reads as far as it is asked."""
    if len(span.data) == span.length:
        return io.BytesIO(span.data)
    return io.BufferedReader(_Begun(span), HEADER_BYTES)


@lru_cache(maxsize=1 << 16)
def _newlines(file: File, block: int) -> int:
    start = block * COUNTED_BYTES
    return file.read(start, min(COUNTED_BYTES, file.size - start)).count(b"\n")


def line_at(file: File, offset: int) -> int:
    """Number of the line that a byte of a text file belongs to, from 0. Earlier blocks of the file are read once in each process."""
    blocks, rest = divmod(offset, COUNTED_BYTES)
    return sum(_newlines(file, block) for block in range(blocks)) + file.read(offset - rest, rest).count(b"\n")


def fingerprints(files: Sequence[File], hashed: int = HASHED) -> list[str]:
    """A fingerprint of each file: the SHA-256 of its content where they are small together, else size and time."""
    if sum(file.size for file in files) > hashed:
        return [f"{file.size}.{file.stamp[1]}" for file in files]
    return [hashlib.sha256(file.read(0, file.size)).hexdigest() for file in files]


def persistent(read: Callable[[], T], retries: int) -> T:
    """Call `read`, and return its result. After a failure that may be temporary it is called up to `retries` times more, ever later."""
    tries = 0
    while True:
        try:
            return read()
        except StorageFailed as failed:
            tries += 1
            if number_of(failed) not in PASSING:
                raise
            if tries > retries:
                raise StorageFailed(f"{failed} Tried {tries} times.") from failed.__cause__
        time.sleep(min(FIRST_WAIT_S * 4 ** (tries - 1), LONGEST_WAIT_S))


def number_of(failed: StorageFailed) -> int | None:
    """The system's number of what a store failed with."""
    return failed.__cause__.errno if isinstance(failed.__cause__, OSError) else None
