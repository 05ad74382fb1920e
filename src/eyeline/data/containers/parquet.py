"""Tables in groups of rows, of which only the columns are read that a layout knows; and Parquet, where a group is a row group.

A row group is read whole, and is a shard, or several if it has many rows: so the first of a million are soon indexed.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location, below
from eyeline.core.recent import Recent
from eyeline.data.containers.class_labels import Labels, labels_in, with_names
from eyeline.data.containers.container import SHARD_ROWS, File, FileSlice, Place, Shard, fingerprints

if TYPE_CHECKING:
    import pyarrow as arrow

MAX_GROUP_BYTES = 1 << 30  # a row of a group cannot be read alone
MAX_GROUP_ROWS = 1 << 26
KEPT, KEPT_BYTES = 256, 256 << 20  # groups read last, in each process, and how much of them together


class RowGroup(NamedTuple):
    """Rows that are read in one go, or a part of them: a shard."""

    name: str
    file: int
    part: int  # number of a row group, or where a record batch begins
    first: int  # number of its first row in the file
    start: int  # the rows of it that this is
    end: int
    length: int = 0  # bytes of a record batch,
    head: int = 0  # and of all that is before the first of them


# (file, group, columns, how many of its first rows: None for all); BadSample for a group that is damaged
Read = Callable[[File, RowGroup, tuple[str, ...], int | None], "arrow.Table"]


@dataclass(frozen=True)
class Tables:
    """Groups of rows of several files."""

    files: tuple[File, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    shards: tuple[Shard, ...]
    header: tuple[str, ...]
    read: Read
    what: str
    labels: tuple[dict[str, Labels], ...]  # of each file: the names of the numbers in its columns
    _kept: "Recent[tuple[int, int], arrow.Table]" = field(default_factory=Recent, repr=False, compare=False)

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        start, end = self.groups[shard].start, self.groups[shard].end
        places = (Place(shard, row - start, row, 1) for row in range(start, end))
        try:
            table = self._group(shard)
        except BadSample as bad:
            yield from ((place, bad) for place in places)
            return
        labels = self.labels[self.groups[shard].file]
        yield from ((place, _row(table, place.start, labels)) for place in places)

    def head(self, shard: int, most: int) -> Iterator[tuple[Place, Any | BadSample]]:
        """The first rows of a shard that is a group's first, with every column of the file. Nothing of them is kept."""
        group = self.groups[shard]
        count = min(group.end, most)
        try:
            table = self.read(self.files[group.file], group, self.header, count)
        except BadSample:  # of a column that is not read, or one that this file does not have
            yield from islice(self.rows(shard), most)
            return
        labels = self.labels[group.file]
        yield from ((Place(shard, row, row, 1), _row(table, row, labels)) for row in range(min(count, len(table))))

    def row(self, place: Place) -> Any:
        row = _row(self._group(place.shard), place.start, self.labels[self.groups[place.shard].file])
        if isinstance(row, BadSample):
            raise row
        return row

    def file_of(self, shard: int) -> File:
        return self.files[self.groups[shard].file]

    def id(self, place: Place) -> str:
        group = self.groups[place.shard]
        return f"{group.name}#{group.start + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        group = self.groups[place.shard]
        return self.id(place), str(self.files[group.file].path), group.first + group.start + place.number

    def line(self, place: Place) -> None:  # noqa: ARG002
        return None

    def _group(self, shard: int) -> "arrow.Table":
        """The whole group of a shard; the last ones are kept. BadSample when it is damaged: then none of its rows can be read."""
        group = self.groups[shard]
        key = group.file, group.part
        known = self._kept.get(key)
        if known is not None:
            return known
        table = self.read(self.files[group.file], group, self.columns, None)
        if len(table) < group.end:
            raise BadSample("damaged_parquet", "row", f"{group.name} has {len(table):,} rows, and its metadata says that there are more")
        return self._kept.keep(key, table, KEPT, table.nbytes, KEPT_BYTES, at_least=1)


def _row(table: "arrow.Table", number: int, labels: dict[str, Labels]) -> dict[str, Any] | BadSample:
    try:
        [row] = table.slice(number, 1).to_pylist()
        return row | {column: with_names(row[column], inner, column) for column, inner in labels.items() if column in row}
    except UnicodeDecodeError as error:
        return BadSample("bad_unicode", "row", f"a text is not UTF-8: {error.reason} at byte {error.start}")
    except BadSample as bad:
        return bad


def with_pyarrow(path: Location) -> None:
    """Refused when pyarrow is not installed."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise Refused(
            f"{path} is Parquet or Arrow, and the package that reads it, pyarrow, is not installed. Try: pip install 'eyeline[parquet]'"
        ) from error


def columns_to_read(
    path: Location, names: Sequence[str], wanted: Sequence[str] | None, before: tuple[str, ...], first: Location
) -> tuple[str, ...]:
    """The columns of a file that are read, of all or of those that are `wanted`. Refused when there are none, or other ones than `before`
    it."""
    has = tuple(sorted(names if wanted is None else {name for name in wanted if name in names}))
    if not has and wanted is not None:
        raise Refused(
            f"{path}: no known columns. It has {', '.join(names[:20])}. Wanted some of: {', '.join(wanted[:50])}. Name yours with "
            "columns: {OURS: THEIRS}"
        )
    if before and has != before:
        raise Refused(f"{path} has the columns {', '.join(has)}, and {first} has {', '.join(before)}. Give them as separate sources")
    return has


def parts(group: RowGroup, fingerprint: str, size: int) -> Iterator[tuple[RowGroup, Shard]]:
    """The shards of a group: itself, or runs of its rows if it has many. They are read together, so they come together."""
    for start in range(0, group.end, SHARD_ROWS):
        end = min(start + SHARD_ROWS, group.end)
        which = f"#{start}" if group.end > SHARD_ROWS else ""
        share = size * (end - start) // group.end
        yield group._replace(start=start, end=end), Shard(group.name + which, fingerprint + which, share, held=size, joined=start > 0)


def read_row_group(file: File, group: RowGroup, columns: tuple[str, ...], most: int | None) -> "arrow.Table":
    import pyarrow
    import pyarrow.parquet as parquet

    with FileSlice(file, 0, file.size) as window:
        opened = parquet.ParquetFile(window, page_checksum_verification=True, buffer_size=0 if most is None else 1 << 16)
        try:
            if most is None:
                return opened.read_row_group(group.part, list(columns), use_threads=False)
            batches = opened.iter_batches(batch_size=most, row_groups=[group.part], columns=list(columns), use_threads=False)
            return pyarrow.Table.from_batches(list(islice(batches, 1)), opened.schema_arrow)
        except (OSError, ValueError) as error:  # as pyarrow's errors are; those of a store are StorageFailed
            raise BadSample("damaged_parquet", "row", str(error)[:300]) from error


class Listed(NamedTuple):
    """A group as its file lists it: see Group."""

    part: int
    rows: int
    size: int  # bytes that are held to read its rows
    length: int = 0
    head: int = 0


Contents = tuple["arrow.Schema", Callable[[tuple[str, ...]], Iterator[Listed]]]  # its columns; those that are read -> groups


def open_tables(
    paths: list[Location],
    base: Location,
    wanted: tuple[str, ...] | None,
    retries: int,
    contents: Callable[[File], Contents],
    read: Read,
    what: str,
    features: Any = None,
) -> Tables:
    """The groups of all files, in shards. Refused as `contents` does it, and where files have no or other columns. `features` are those
    that a saved data set states next to its files."""
    files = [File.of(path, retries) for path in paths]
    content = fingerprints(files)
    groups: list[RowGroup] = []
    shards: list[Shard] = []
    columns: tuple[str, ...] = ()
    names: list[str] = []
    labels: list[dict[str, Labels]] = []
    for number, file in enumerate(files):
        schema, listed = contents(file)
        names = schema.names
        marks = [name for name in names if wanted is None or name != "mask" or not _holds_bytes(schema, name)]
        columns = columns_to_read(file.path, marks, wanted, columns, paths[0])
        named = labels_in(schema.metadata, features)
        labels.append({column: inner for column, inner in named.items() if column in columns})
        if labels[-1]:  # what the rows mean depends on them
            content[number] += hashlib.sha256(repr(sorted(labels[-1].items())).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        first = 0
        for n, group in enumerate(listed(columns)):
            whole = RowGroup(f"{below(base, file.path)}[{n}]", number, group.part, first, 0, group.rows, group.length, group.head)
            for part, shard in parts(whole, f"{content[number]}[{n}]", group.size):
                groups.append(part)
                shards.append(shard)
            first += group.rows
    return Tables(tuple(files), tuple(groups), columns, tuple(shards), tuple(names), read, what, tuple(labels))


def _holds_bytes(schema: "arrow.Schema", name: str) -> bool:
    """Return whether a column holds images: a `mask` of such does not mark turns."""
    import pyarrow.types as types

    kind = schema.field(name).type
    return types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def row_groups(file: File) -> Contents:
    """The row groups that the footer of a file lists."""
    import pyarrow.parquet as parquet

    try:
        with FileSlice(file, 0, file.size) as window:
            opened = parquet.ParquetFile(window)
            about, schema = opened.metadata, opened.schema_arrow
    except (OSError, ValueError) as error:
        raise Refused(f"{file.path} is not a complete Parquet file: {str(error)[:300]}. Download it again") from error

    def listed(columns: tuple[str, ...]) -> Iterator[Listed]:
        for group in range(about.num_row_groups):
            row_group = about.row_group(group)
            rows = row_group.num_rows
            chunks = [row_group.column(c) for c in range(row_group.num_columns)]
            size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
            if size > MAX_GROUP_BYTES or rows > MAX_GROUP_ROWS:
                raise Refused(
                    f"{file.path}: row group {group} has {rows:,} rows (of at most {MAX_GROUP_ROWS:,}) of {size:,} bytes together (of at "
                    f"most {MAX_GROUP_BYTES:,}), and reading a row means reading its whole group. Write the file again with a "
                    f"row_group_size of "
                    "a few hundred rows"
                )
            yield Listed(group, rows, size)

    return schema, listed


def open_parquet(paths: list[Location], base: Location, wanted: tuple[str, ...] | None, retries: int) -> Tables:
    """List the row groups. Refused when pyarrow is missing, or a file cannot be used."""
    with_pyarrow(paths[0])
    return open_tables(paths, base, wanted, retries, row_groups, read_row_group, "Parquet")
