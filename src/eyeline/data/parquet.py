"""Parquet: a shard a row group, of which only the columns are read that a layout knows. The one file that imports pyarrow."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyeline.core.errors import BadSample, Refused
from eyeline.data.containers import File, Place, Shard, Window, fingerprints

if TYPE_CHECKING:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

MAX_GROUP_BYTES = 1 << 30  # a row of a group cannot be read alone
KEPT_BYTES = 256 << 20  # of groups read last, in each process


@dataclass(frozen=True)
class Parquet:
    """Row groups of several files."""

    files: tuple[File, ...]
    groups: tuple[tuple[int, int, int, int], ...]  # of each shard: file, row group, number of its first row in the file, rows
    columns: tuple[str, ...]
    shards: tuple[Shard, ...]
    header: tuple[str, ...]
    what: str = "Parquet"
    _kept: "OrderedDict[int, arrow.Table]" = field(default_factory=OrderedDict, repr=False, compare=False)

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        try:
            table = self._group(shard)
        except BadSample as bad:
            yield from ((Place(shard, row, row, 1), bad) for row in range(self.groups[shard][3]))
            return
        yield from ((Place(shard, row, row, 1), _row(table, row)) for row in range(len(table)))

    def row(self, place: Place) -> Any:
        row = _row(self._group(place.shard), place.begin)
        if isinstance(row, BadSample):
            raise row
        return row

    def lies_in(self, shard: int) -> File:
        return self.files[self.groups[shard][0]]

    def named(self, place: Place) -> tuple[str, str, int]:
        file, _, first, _ = self.groups[place.shard]
        path = self.files[file].path
        return f"{self.shards[place.shard].name}#{place.number}", str(path), first + place.number

    def _group(self, shard: int) -> "arrow.Table":
        """A whole row group; the last ones are kept. BadSample when it is damaged: then none of its rows can be read."""
        if shard in self._kept:
            self._kept.move_to_end(shard)
            return self._kept[shard]
        file, group, _, _ = self.groups[shard]

        with self._opened(file) as opened:
            try:
                table = self._kept[shard] = opened.read_row_group(group, list(self.columns), use_threads=False)
            except (OSError, ValueError) as error:  # as pyarrow's errors are; those of a store are StorageFailed
                raise BadSample("damaged_parquet", "row", str(error)[:300]) from error
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return table

    @contextmanager
    def _opened(self, file: int) -> "Iterator[parquet.ParquetFile]":
        import pyarrow.parquet as parquet

        about = self.files[file]
        with Window(about, 0, about.size) as window:
            yield parquet.ParquetFile(window, page_checksum_verification=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}


def _row(table: "arrow.Table", number: int) -> dict[str, Any] | BadSample:
    try:
        [row] = table.slice(number, 1).to_pylist()
    except UnicodeDecodeError as error:
        return BadSample("bad_unicode", "row", f"a text is not UTF-8: {error.reason} at byte {error.start}")
    return row


def open_parquet(paths: list[Path], base: Path, wanted: tuple[str, ...], retries: int) -> Parquet:
    """List the row groups from the files' footers. Refused when pyarrow is missing, or a file cannot be used."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise Refused(
            f"{paths[0]} is a Parquet file, which pyarrow reads, and it is not installed. Try: pip install 'eyeline[parquet]'"
        ) from error
    files: list[File] = []
    groups: list[tuple[int, int, int, int]] = []
    shards: list[Shard] = []
    columns: tuple[str, ...] | None = None
    names: list[str] = []
    for number, path in enumerate(paths):
        file = File.of(path, retries)
        try:
            with Window(file, 0, file.size) as window:
                about = parquet.ParquetFile(window).metadata
                names = about.schema.to_arrow_schema().names
        except (OSError, ValueError) as error:
            raise Refused(f"{path} is no whole Parquet file: {str(error)[:300]}. Download it again") from error
        has = tuple(sorted({name for name in wanted if name in names}))
        if not has:
            raise Refused(
                f"{path}: no known columns. It has {', '.join(names[:20])}. Wanted some of: {', '.join(wanted)}. Say by columns: "
                "{OURS: THEIRS} how they are called"
            )
        if columns is not None and has != columns:
            raise Refused(
                f"{path} has the columns {', '.join(has)}, and {paths[0]} has {', '.join(columns)}. Give them as sources of their own"
            )
        columns = has
        files.append(file)
        first = 0
        for group in range(about.num_row_groups):
            row_group = about.row_group(group)
            chunks = [row_group.column(c) for c in range(row_group.num_columns)]
            size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in has)
            if size > MAX_GROUP_BYTES:
                raise Refused(
                    f"{path}: row group {group} has {row_group.num_rows} rows of {size:,} bytes together, over {MAX_GROUP_BYTES:,}, and no "
                    "row can be read without its group. Write the file again with a row_group_size of a few hundred rows"
                )
            groups.append((number, group, first, row_group.num_rows))
            shards.append(Shard(f"{os.path.relpath(path, base)}[{group}]", "", size, held=size))
            first += row_group.num_rows
    content = fingerprints(files)
    named = tuple(
        Shard(shard.name, f"{content[file]}[{group}]", shard.bytes, shard.held)
        for shard, (file, group, *_) in zip(shards, groups, strict=True)
    )
    return Parquet(tuple(files), tuple(groups), columns or (), named, tuple(names))
