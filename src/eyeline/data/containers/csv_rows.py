"""Tables of text: CSV with a header, as RFC 4180 has it. A field in quotes may hold line breaks, so rows are found once, from the start.

Quotes inside of a field that has none around it are text. Where a quote is never closed, or a field continues behind the one that
closes it, the line that opened it is lost alone, and a row whose fields are not as many as the header's is rejected.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location
from eyeline.data.containers.container import SHARD_BYTES, SHARD_ROWS, File, Place, Shard, line_at

MAX_ROW_BYTES = 64 << 20
DELIMITERS = b",;\t"
_BOM = b"\xef\xbb\xbf"
OVER = -1  # the length of a row over the cap


@dataclass(frozen=True)
class Table:
    """The rows of one CSV file, in runs."""

    file: File
    header: tuple[str, ...]
    delimiter: bytes
    shards: tuple[Shard, ...]
    firsts: tuple[int, ...]  # number in the file of each shard's first row
    starts: tuple[int, ...]  # its location
    over: frozenset[int]  # shards that are one row over the cap
    what: str

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        first = self.starts[shard]
        if shard in self.over:
            yield Place(shard, 0, first, OVER), _over_the_cap()
            return
        data = self.file.read(first, self.shards[shard].bytes)
        number = 0
        for start, end in _rows_of(data, self.delimiter):
            if data[start:end].strip(b"\r\n"):
                yield Place(shard, number, first + start, end - start), self._try(data[start:end])
                number += 1

    def row(self, place: Place) -> Any:
        if place.length == OVER:
            raise _over_the_cap()
        return self._parsed(self.file.read(place.start, place.length))

    def file_of(self, shard: int) -> File:  # noqa: ARG002
        return self.file

    def id(self, place: Place) -> str:
        return f"{self.file.path.name}#{self.firsts[place.shard] + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        return self.id(place), str(self.file.path), self.firsts[place.shard] + place.number

    def line(self, place: Place) -> int:
        return line_at(self.file, place.start) + 1

    def _try(self, data: bytes) -> Any | BadSample:
        try:
            return self._parsed(data)
        except BadSample as bad:
            return bad

    def _parsed(self, data: bytes) -> dict[str, str | None]:
        values = fields_of(data, self.delimiter)
        if len(values) != len(self.header):
            lines = data.strip(b"\r\n").count(b"\n") + 1
            over = f", over {lines} lines; a quote may be missing" if lines > 1 else ""
            raise BadSample("table_row", "row", f"{len(values)} fields{over}, and the header has {len(self.header)}")
        return dict(zip(self.header, values, strict=True))


def _over_the_cap() -> BadSample:
    return BadSample("line_too_long", "row", f"the row has more than {MAX_ROW_BYTES:,} bytes")


# Rows and fields


@lru_cache(maxsize=8)
def _patterns(delimiter: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """(a field, a row with its line break). Neither ever goes back over what it matched."""
    quoted, plain = rb'[^"]*+(?:""[^"]*+)*+', rb'(?!")[^%s\r\n]*+' % re.escape(delimiter)
    field = rb'"%s"|%s' % (quoted, plain)
    row = rb"(?:%s)(?:%s(?:%s))*+(?:\r\n|\n|\r|\Z)" % (field, re.escape(delimiter), field)
    return re.compile(rb'"(%s)"|(%s)' % (quoted, plain)), re.compile(row)


def _rows_of(data: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each row, line break included. Where its quotes are broken, that is its line."""
    pattern = _patterns(delimiter)[1]
    at = 0
    while at < len(data):
        found = pattern.match(data, at)
        end = found.end() if found else data.find(b"\n", at) + 1 or len(data)
        yield at, end
        at = end


def fields_of(data: bytes, delimiter: bytes) -> list[str | None]:
    """The fields of one row; an empty one is None. Bytes that are not UTF-8 become lone surrogates, which make a text unusable."""
    line, pattern = data.rstrip(b"\r\n"), _patterns(delimiter)[0]
    values: list[str | None] = []
    at = 0
    while True:
        found = pattern.match(line, at)
        if found is None:
            raise BadSample("table_row", "row", f"the quote at byte {at:,} of the row is never closed")
        if line[found.end() : found.end() + 1] not in (b"", delimiter):
            raise BadSample("table_row", "row", f"the quote at byte {found.end() - 1:,} of the row closes a field that continues")
        value = found[2] if found[1] is None else found[1].replace(b'""', b'"')
        values.append(value.decode("utf-8", "surrogateescape") or None)
        at = found.end() + 1
        if at > len(line):
            return values


# Opening


def open_table(path: Location, known: Iterable[str], retries: int) -> Table:
    """Find the rows of a CSV file. Refused when it has no header that can be used.

    The delimiter is the one under which the header has most of the `known` names, and of equals most names.
    """
    file = File.of(path, retries)
    head = file.read(0, min(file.size, 1 << 20))
    bom = len(_BOM) * head.startswith(_BOM)
    best: tuple[int, int] = (-1, 0)
    header, delimiter, data_start = (), b",", 0
    for tried in (bytes([d]) for d in DELIMITERS):
        found = _patterns(tried)[1].match(head, bom)
        names = [(name or "").strip() for name in fields_of(found[0], tried)] if found else []
        score = (len(set(known) & set(names)), len(names))
        if found and score > best:
            best, header, delimiter, data_start = score, tuple(names), tried, found.end()
    twice = [name for name in header if name and header.count(name) > 1]
    if not any(header) or twice or data_start == len(head) < file.size:
        what = f"names {twice[0]!r} twice" if twice else "names no columns"
        raise Refused(f"{path}: its first line {what}. A table needs a line of names first, such as image,caption")
    header = tuple(name or f"column {n}" for n, name in enumerate(header))  # pandas writes its row numbers without a name
    shards: list[Shard] = []
    firsts: list[int] = []
    starts: list[int] = []
    over: set[int] = set()
    said = hashlib.sha256(repr((header, delimiter)).encode("utf-8", "surrogateescape")).digest()
    number = 0
    for start, end, rows, digest in _runs(file, data_start, delimiter):
        if digest is None:
            over.add(len(shards))
        shards.append(Shard(f"{path.name}#{number}", hashlib.sha256(said + (digest or b"over")).hexdigest(), end - start))
        firsts.append(number)
        starts.append(start)
        number += rows
    what = {b",": "CSV", b";": "CSV with semicolons", b"\t": "TSV"}[delimiter]
    return Table(file, header, delimiter, tuple(shards), tuple(firsts), tuple(starts), frozenset(over), what)


def _runs(file: File, first_byte: int, delimiter: bytes) -> Iterator[tuple[int, int, int, bytes | None]]:
    """(start, end, rows, SHA-256) of runs of rows that are a shard each; None for the digest of a row over the cap, which is alone.

    Held are a piece of the file and the longest row, no more.
    """
    pattern = _patterns(delimiter)[1]
    data, base, at, start, count = (
        b"",
        first_byte,
        0,
        0,
        0,
    )  # `data` is at `base` of the file; in it the run begins at `start`, the row at `at`
    while base + at < file.size:
        found = pattern.match(data, at)
        if base + len(data) < file.size and (found is None or found.end() == len(data)):  # it may continue
            if len(data) - at <= MAX_ROW_BYTES:
                if count:
                    yield base + start, base + at, count, hashlib.sha256(memoryview(data)[start:at]).digest()
                first_byte = base + len(data)
                data = data[at:] + file.read(first_byte, min(SHARD_BYTES, file.size - first_byte))
                base, at, start, count = base + at, 0, 0, 0
                continue
            end = data.find(b"\n", at) + 1 if found is None else 0
            if not end:
                if count:
                    yield base + start, base + at, count, hashlib.sha256(memoryview(data)[start:at]).digest()
                first_byte = _beyond_line(file, base + len(data))
                yield base + at, first_byte, 1, None
                data, base, at, start, count = b"", first_byte, 0, 0, 0
                continue
        else:
            end = found.end() if found else data.find(b"\n", at) + 1 or len(data)
        if count and (count == SHARD_ROWS or end - start > SHARD_BYTES):
            yield base + start, base + at, count, hashlib.sha256(memoryview(data)[start:at]).digest()
            start, count = at, 0
        count += bool(data[at:end].strip(b"\r\n"))
        at = end
    if count:
        yield base + start, base + at, count, hashlib.sha256(memoryview(data)[start:at]).digest()


def _beyond_line(file: File, start: int) -> int:
    """The end of the line that continues at `start`."""
    while start < file.size:
        piece = file.read(start, min(1 << 20, file.size - start))
        end = piece.find(b"\n")
        if end >= 0:
            return start + end + 1
        start += len(piece)
    return file.size
