"""What holds rows: a list of shards that is cheap to make, each read in order for an index, and any row by its place.

All bytes of data but those of picture files are read by `read_at`, which notices a file that has changed since it was opened.
"""

import errno
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from eyeline.core.batch import Span
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import storage_failed

HASHED = 64 << 20  # a file up to this size is known by its content, a larger one by its size and time
SHARD_BYTES = 16 << 20  # of text: enough rows that a shard is worth a request, few enough that a window of shards is soon read
SHARD_ROWS = 2048
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
PASSING = {  # errors of a store that may be gone the next time
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENFILE, errno.EMFILE),
    *(errno.ECONNRESET, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
}

Stamp = tuple[int, int]  # size and time of the last change: other ones mean other content
T = TypeVar("T")


class Place(NamedTuple):
    """Where one row lies."""

    shard: int
    number: int  # among all rows of the shard, those that cannot be read included
    begin: int  # what random access needs: an offset, or a row of a row group
    length: int


@dataclass(frozen=True)
class Shard:
    """A part of a container that is read in one go."""

    name: str  # for messages: the file, and which part of it
    fingerprint: str  # of its content; never of where it lies: a set that was moved is the same set
    bytes: int  # about


class Container(Protocol):
    """Rows of one file or of several. Pickles small: whoever unpickles it reads the same files again."""

    @property
    def what(self) -> str: ...  # "JSON list"

    @property
    def shards(self) -> tuple[Shard, ...]: ...  # in the order of the files

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        """Every row of a shard in order, parsed, or why it cannot be."""
        ...

    def row(self, place: Place) -> Any:
        """One row. Raises BadSample as `rows` gives it, and StorageFailed when the file has changed."""
        ...

    def named(self, place: Place) -> tuple[str, str, int]:
        """(its id, the file it lies in, its number there)."""
        ...


def stamp_of(path: Path) -> Stamp:
    """Of a file as it is now. OSError when it cannot be examined."""
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


def fingerprint_of(path: Path, stamp: Stamp) -> str:
    """The SHA-256 of a small file, or the size and time of a large one."""
    if stamp[0] > HASHED:
        return f"{stamp[0]}.{stamp[1]}"
    return hashlib.sha256(read_at(path, 0, stamp[0], stamp)).hexdigest()


def read_at(path: Path, begin: int, length: int, stamp: Stamp) -> bytes:
    """Exactly so many bytes. StorageFailed when the store fails, or when the file is not the one that was opened."""
    try:
        with open(path, "rb", buffering=0) as file:
            _unchanged(file.fileno(), path, stamp)
            pieces: list[bytes] = []
            while length > 0 and (piece := os.pread(file.fileno(), length, begin)):
                pieces.append(piece)
                begin, length = begin + len(piece), length - len(piece)
    except OSError as error:
        raise storage_failed("read", path, error) from error
    if length:
        raise StorageFailed(f"{path} ended {length:,} bytes early. Its store has lost a part of it; put it back as it was")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unchanged(handle: int, path: Path, stamp: Stamp) -> None:
    about = os.fstat(handle)
    if (about.st_size, about.st_mtime_ns) != stamp:  # its rows would be read in pieces, and the plan would not be what is trained
        raise StorageFailed(f"{path} has changed since it was opened. Put it back as it was, or begin a new run with the new data")


def span_file(span: Span) -> io.BytesIO | io.BufferedReader:
    """The bytes of a span as a file that reads what it is asked for. StorageFailed when the file around it has changed."""
    if span.data is not None:
        return io.BytesIO(span.data)
    try:
        raw = _Window(span)
    except OSError as error:
        raise storage_failed("read", span.path, error) from error
    return io.BufferedReader(raw, 1 << 16)


class _Window(io.RawIOBase):
    """A part of a file."""

    def __init__(self, span: Span):
        self.span, self.at = span, 0
        self.file = open(span.path, "rb", buffering=0)  # noqa: SIM115
        try:
            _unchanged(self.file.fileno(), span.path, span.stamp)
        except StorageFailed:
            self.close()
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.span.length}[whence], 0)
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(self.span.length - self.at, 0))
        data = os.pread(self.file.fileno(), wanted, self.span.begin + self.at)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


def persistent(read: Callable[[], T], retries: int) -> T:
    """What `read` returns. A store that fails in a way that may pass is asked up to `retries` times more, ever later."""
    tries = 0
    while True:
        try:
            return read()
        except StorageFailed as failed:
            tries += 1
            if not (isinstance(failed.__cause__, OSError) and failed.__cause__.errno in PASSING):
                raise
            if tries > retries:
                raise StorageFailed(f"{failed} It was tried {tries} times.") from failed.__cause__
        time.sleep(min(FIRST_WAIT_S * 4 ** (tries - 1), LONGEST_WAIT_S))
