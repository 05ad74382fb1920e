"""Arrow: record batches of streams (as `datasets.save_to_disk` writes them) and of files (Feather) alike.

A stream has no table of contents, so the head of each message is read once; what is in them pyarrow reads.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location
from eyeline.data.containers.container import File, FileSlice
from eyeline.data.containers.parquet import MAX_GROUP_BYTES, Contents, Listed, RowGroup, Tables, open_tables, with_pyarrow

if TYPE_CHECKING:
    import pyarrow as arrow

FILE_MAGIC = b"ARROW1\0\0"  # of the file format, in which the same messages follow
MESSAGE = b"\xff\xff\xff\xff"
ROWS_PER_BYTE = 64  # at most, of a batch that is compressed: more than that is a damaged number
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # format/Message.fbs: MessageHeader


class Message(NamedTuple):
    """One message of a stream."""

    kind: int
    start: int
    length: int
    rows: int


def messages(window: FileSlice, start: int) -> Iterator[Message]:
    """The messages of a stream in order. ValueError where it breaks off."""
    while True:
        window.seek(start)
        head = window.read(8)
        if head[:4] != MESSAGE or len(head) < 8:
            raise ValueError(f"no message starts at byte {start:,}")
        (size,) = struct.unpack("<i", head[4:])
        if size == 0:
            return
        about = window.read(size) if 0 < size <= 1 << 28 else b""
        if len(about) < max(size, 8):
            raise ValueError(f"the message at byte {start:,} is cut")
        try:
            root = _at(about, 0, "I")
            kind, body = _field(about, root, 1), _field(about, root, 3)
            length = 8 + size + (_at(about, body, "q") if body else 0)
            batch, rows = _field(about, root, 2), 0
            if kind and batch and about[kind] == BATCH:
                count = _field(about, batch + _at(about, batch, "I"), 0)
                rows = _at(about, count, "q") if count else 0
        except struct.error as error:
            raise ValueError(f"the message at byte {start:,} is damaged") from error
        if not kind or length < 8 + size or not 0 <= rows <= ROWS_PER_BYTE * length or start + length > window.seek(0, 2):
            raise ValueError(f"the message at byte {start:,} is damaged or cut")
        yield Message(about[kind], start, length, rows)
        start += length


def _at(data: bytes, place: int, kind: str) -> int:
    if place < 0:
        raise struct.error("a position before the start")
    return struct.unpack_from("<" + kind, data, place)[0]


def _field(data: bytes, table: int, number: int) -> int | None:
    """The position of a field of a flatbuffer table; None if it is absent."""
    entries = table - _at(data, table, "i")
    if 6 + 2 * number > _at(data, entries, "H"):
        return None
    offset = _at(data, entries + 4 + 2 * number, "H")
    return table + offset if offset else None


def read_batch(file: File, group: RowGroup, columns: tuple[str, ...], most: int | None) -> "arrow.Table":  # noqa: ARG001
    """A record batch, which is read whole, checked: Arrow has no checksums, and a damaged offset would be followed anywhere."""
    import pyarrow
    import pyarrow.ipc as ipc

    data = file.read(0, group.head).removeprefix(FILE_MAGIC) + file.read(group.part, group.length)
    try:
        names = ipc.open_stream(pyarrow.BufferReader(data)).schema.names
        options = ipc.IpcReadOptions(included_fields=[names.index(column) for column in columns], use_threads=False)
        table = pyarrow.Table.from_batches([ipc.open_stream(pyarrow.BufferReader(data), options=options).read_next_batch()])
        table.validate(full=True)
    except (OSError, ValueError) as error:  # as pyarrow's errors are
        raise BadSample("damaged_parquet", "row", str(error)[:300]) from error
    return table


def record_batches(file: File) -> Contents:
    """The record batches of a file, from its messages."""
    import pyarrow
    import pyarrow.ipc as ipc

    try:
        with FileSlice(file, 0, file.size) as window:
            found = list(messages(window, len(FILE_MAGIC) if window.read(8) == FILE_MAGIC else 0))
        head = next((message.start for message in found if message.kind == BATCH), file.size)
        schema = ipc.read_schema(pyarrow.BufferReader(file.read(0, head).removeprefix(FILE_MAGIC)))
    except (OSError, ValueError) as error:
        raise Refused(f"{file.path} is not a complete Arrow file: {str(error)[:300]}. Download or write it again") from error
    if any(message.kind == DICTIONARY and message.start > head for message in found):
        raise Refused(f"{file.path} replaces a dictionary between its record batches, which is not read. Write it as Parquet")

    def listed(columns: tuple[str, ...]) -> Iterator[Listed]:  # noqa: ARG001  # a batch is read whole
        for n, message in enumerate(message for message in found if message.kind == BATCH):
            if message.length > MAX_GROUP_BYTES:
                raise Refused(
                    f"{file.path}: record batch {n} has {message.rows} rows of {message.length:,} bytes together, over "
                    f"{MAX_GROUP_BYTES:,}. Write it again in batches of a few hundred rows (writer_batch_size)"
                )
            yield Listed(message.start, message.rows, message.length, message.length, head)

    return schema, listed


def open_arrow(paths: list[Location], base: Location, wanted: tuple[str, ...] | None, retries: int, features: Any = None) -> Tables:
    """List the record batches. Refused when pyarrow is missing, or a file cannot be used."""
    with_pyarrow(paths[0])
    return open_tables(paths, base, wanted, retries, record_batches, read_batch, "Arrow", features)
