"""Strict JSON, row by row: what JSON forbids spoils its own row only, wherever a row can be told from the next."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location
from eyeline.data.containers.container import HASHED, SHARD_BYTES, SHARD_ROWS, File, Place, Shard, fingerprints, line_at

MAX_LINE_BYTES = 64 << 20  # a longer line of JSON lines is skipped without being held in memory
MAX_DIGITS = 40  # ids of 64 bits and of 128
MAX_DEPTH = 910  # of brackets in a row: below the limit of Python's decoder, which depends on the caller
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Broken:
    """Stands in a parsed value where something was that JSON forbids."""

    cause: str
    message: str


def _object(pairs: list[tuple[str, Any]]) -> Any:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        return Broken("duplicate_key", f"the key {twice!r} appears twice")
    return out


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_DIGITS else Broken("huge_number", f"a number of {len(digits)} digits")


def _constant(name: str) -> Any:
    return Broken("not_finite", f"{name} is not JSON")


def _number(text: str) -> Any:
    value = float(text)
    return value if abs(value) != float("inf") else Broken("not_finite", f"{text[:20]} is too large for a float")


def parse(text: str) -> tuple[Any, bool]:
    """The value, and whether there is a `Broken` in it. BadSample `not_json` or `nesting` when there is no value."""
    if text.count("[") + text.count("{") > MAX_DEPTH and (depth := _depth(text)) > MAX_DEPTH:
        raise BadSample("nesting", "row", f"brackets are nested {depth:,} deep, over {MAX_DEPTH}")
    flaws: list[Broken] = []

    def seen(value: Any) -> Any:
        if isinstance(value, Broken):
            flaws.append(value)
        return value

    decoder = json.JSONDecoder(
        object_pairs_hook=lambda pairs: seen(_object(pairs)),
        parse_int=lambda digits: seen(_integer(digits)),
        parse_float=lambda digits: seen(_number(digits)),
        parse_constant=lambda name: seen(_constant(name)),
    )
    try:
        return decoder.decode(text), bool(flaws)
    except json.JSONDecodeError as error:
        raise BadSample("not_json", "row", f"{error.msg.removesuffix(' at')} at character {error.pos}") from error
    except RecursionError as error:
        raise BadSample("nesting", "row", "brackets are nested too deep") from error


_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[{])|([\]}])', re.DOTALL)  # or a string, in which brackets are text


def _depth(text: str) -> int:
    """The nesting depth of brackets."""
    depth = most = 0
    for found in _BRACKET.finditer(text):
        depth += (found[1] is not None) - (found[2] is not None)
        most = max(most, depth)
    return most


def require_valid(row: Any) -> Any:
    """The row, if nothing `Broken` is in it, else BadSample with the place."""
    stack: list[tuple[str, Any]] = [("row", row)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, Broken):
            raise BadSample(value.cause, place, value.message)
        if isinstance(value, dict):
            stack += [(key if place == "row" else f"{place}.{key}", child) for key, child in value.items()]
        elif isinstance(value, list):
            stack += [(f"{place}[{n}]", child) for n, child in enumerate(value)]
    return row


def row_of(data: bytes) -> Any:
    """One row from its text. Bytes that are not UTF-8 become lone surrogates, which spoil only the row that uses them."""
    row, flawed = parse(data.decode("utf-8-sig", "surrogateescape"))
    return require_valid(row) if flawed else row


def _try(data: bytes) -> Any | BadSample:
    try:
        return row_of(data)
    except BadSample as bad:
        return bad


# A list: the locations of its rows are found once, when it is opened


@dataclass(frozen=True)
class JsonList:
    """The rows of one JSON list, in runs."""

    file: File
    shards: tuple[Shard, ...]
    firsts: tuple[int, ...]  # number in the file of each shard's first row
    starts: tuple[int, ...]  # its location
    what: str = "JSON list"
    header: tuple[str, ...] = ()

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        data = self.file.read(self.starts[shard], self.shards[shard].bytes)
        for number, (start, length) in enumerate(elements(data, inside=True)):
            yield Place(shard, number, self.starts[shard] + start, length), _try(data[start : start + length])

    def row(self, place: Place) -> Any:
        return row_of(self.file.read(place.start, place.length))

    def file_of(self, shard: int) -> File:  # noqa: ARG002
        return self.file

    def id(self, place: Place) -> str:
        return f"{self.file.path.name}#{self.firsts[place.shard] + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        return self.id(place), str(self.file.path), self.firsts[place.shard] + place.number

    def line(self, place: Place) -> int:
        return line_at(self.file, place.start) + 1


def elements(data: bytes, inside: bool = False) -> Iterator[tuple[int, int]]:
    """Offset and length of each row of a list, or of a run of rows with their commas. JSONDecodeError where there is no list.

    Nothing is decoded: structure is ASCII, and read as Latin-1 a character is a byte.
    """
    text = data.decode("latin-1")
    at = beyond_space(text, 0 if inside else len(BOM) * data.startswith(BOM))
    if not inside:
        at = beyond_space(text, at + 1)
        if text[at : at + 1] == "]":
            return
    while True:
        end = end_of(text, at)
        yield at, end - at
        at = beyond_space(text, end)
        if text[at : at + 1] == ",":
            at = beyond_space(text, at + 1)
            if at == len(text) and inside:
                return
        elif inside and at == len(text):
            return
        elif text[at : at + 1] == "]" and not inside:
            if beyond_space(text, at + 1) < len(text):
                raise json.JSONDecodeError("Extra data", "", at + 1)
            return
        else:
            raise json.JSONDecodeError("Expecting ',' delimiter", "", at)


SCANNER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)


def end_of(text: str, at: int) -> int:
    """The end of the value that starts here. One that is nested too deep for the decoder ends with its bracket."""
    try:
        return SCANNER.raw_decode(text, at)[1]
    except RecursionError:
        depth = 0
        for found in _BRACKET.finditer(text, at):
            depth += (found[1] is not None) - (found[2] is not None)
            if depth == 0:
                return found.end()
        raise json.JSONDecodeError("Brackets are nested too deep and never closed", "", at) from None


_SPACE = re.compile(r"[ \t\n\r]*")


def beyond_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def open_list(path: Location, retries: int) -> JsonList:
    """Find the rows of a JSON list. Refused when it is none."""
    file = File.of(path, retries)
    return list_in(file, file.read(0, file.size), 0)


def lists_in_lines(path: Location, retries: int) -> bool:
    """Return whether a file that starts with a bracket is JSON lines, each of which is a list, and not one list of rows."""
    file = File.of(path, retries)
    first, ended, more = b"", b"", b""
    for enough in (1 << 20, MAX_LINE_BYTES):
        first, ended, more = file.read(0, min(file.size, enough)).removeprefix(BOM).lstrip().partition(b"\n")
        if ended:
            break
    try:
        row, _ = parse(first.decode("utf-8", "surrogateescape"))
    except BadSample:
        return False
    if more.strip():
        return isinstance(row, list)
    turns = isinstance(row, list) and bool(row) and isinstance(row[0], dict) and not {"role", "from"}.isdisjoint(row[0])
    return turns and path.suffix.lower() in (".jsonl", ".ndjson")


def list_in(file: File, data: bytes, offset: int) -> JsonList:
    """The rows of the list that `data` are, which starts at `offset` of a file. Refused if it is not a list."""
    path = file.path
    runs: list[list[int]] = []  # begin, end, number of the first row, rows
    try:
        for number, (start, length) in enumerate(elements(data)):
            if not runs or runs[-1][3] == SHARD_ROWS or start + length - runs[-1][0] > SHARD_BYTES:
                runs.append([start, start, number, 0])
            runs[-1][1], runs[-1][3] = start + length, runs[-1][3] + 1
    except json.JSONDecodeError as error:
        raise Refused(f"{path} is not JSON: {_broken(error, data)}. It starts with [, so one list of rows was expected") from error
    shards = tuple(
        Shard(f"{path.name}#{first}", hashlib.sha256(memoryview(data)[start:end]).hexdigest(), end - start) for start, end, first, _ in runs
    )
    return JsonList(file, shards, tuple(run[2] for run in runs), tuple(offset + run[0] for run in runs))


def _broken(error: json.JSONDecodeError, data: bytes) -> str:
    """The position where a list breaks off, and the reason if it is obvious."""
    line = 1 + data.count(b"\n", 0, error.pos)
    where = f"{error.msg.removesuffix(' at')} at byte {error.pos:,}, in line {line:,}"
    if error.msg.startswith("Unterminated") or error.pos >= len(data.rstrip()):
        return f"{where}: it ends early, as if it was cut off"
    match data[error.pos : error.pos + 1], data[: error.pos].rstrip()[-1:]:
        case b"'", _:
            return f"{where}: JSON has double quotes. Write it with json.dump, not with print or str"
        case b"]" | b"}", b",":
            return f"{where}: there is a comma before the bracket that closes"
        case _:
            return where


# Lines: a shard is the lines that begin in its range of bytes, so that nothing has to be read to list them


@dataclass(frozen=True)
class JsonLines:
    """The rows of one file of JSON lines, in ranges."""

    file: File
    shards: tuple[Shard, ...]
    step: int  # bytes of a range
    what: str = "JSON lines"
    header: tuple[str, ...] = ()

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        number = 0
        for start, line in self._lines(shard):
            if line is None:
                yield Place(shard, number, start, OVER), _over_the_cap()
            elif line.strip():
                yield Place(shard, number, start, len(line)), _try(line)
            else:
                continue
            number += 1

    def row(self, place: Place) -> Any:
        if place.length == OVER:
            raise _over_the_cap()
        return row_of(self.file.read(place.start, place.length))

    def file_of(self, shard: int) -> File:  # noqa: ARG002
        return self.file

    def id(self, place: Place) -> str:
        start = place.shard * self.step  # rows of earlier ranges are not counted: that would read them
        return f"{self.file.path.name}{f'@{start}' if start else ''}#{place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        return self.id(place), str(self.file.path), self.line(place) - 1

    def line(self, place: Place) -> int:
        start = place.shard * self.step
        if place.start >= start:
            return line_at(self.file, place.start) + 1
        return line_at(self.file, start - 1) + 2  # the first line that starts in the range, whose place is not given

    def _lines(self, shard: int) -> Iterator[tuple[int, bytes | None]]:
        """Position and content of each line that starts in the range; None for the content of a line over the size limit."""
        start = shard * self.step
        before = int(start > 0)  # the byte that tells whether a line begins with the range
        data = self.file.read(start - before, min(self.step, self.file.size - start) + before)
        at = data.find(b"\n") + 1 if before else 0
        if before and at == 0:
            return
        while at < len(data):
            end = data.find(b"\n", at)
            line = data[at:end] if end >= 0 else self._whole(start - before + at, data[at:])
            yield start - before + at, line if line is not None and len(line) <= MAX_LINE_BYTES else None
            if end < 0:
                return
            at = end + 1

    def _whole(self, start: int, head: bytes) -> bytes | None:
        """The line that begins with `head`, or None when it is over the cap."""
        line = bytearray(head)
        while len(line) <= MAX_LINE_BYTES and start + len(line) < self.file.size:
            piece = self.file.read(start + len(line), min(1 << 20, self.file.size - start - len(line)))
            end = piece.find(b"\n")
            line += piece if end < 0 else piece[:end]
            if end >= 0:
                break
        return bytes(line) if len(line) <= MAX_LINE_BYTES else None


OVER = -1  # the length of a line over the cap


def _over_the_cap() -> BadSample:
    return BadSample("line_too_long", "row", f"the line has more than {MAX_LINE_BYTES:,} bytes")


def open_lines(path: Location, retries: int, hashed: int = HASHED) -> JsonLines:
    """A file of JSON lines in ranges of bytes. Of a large file nothing is read."""
    file, step = File.of(path, retries), SHARD_BYTES
    [content] = fingerprints([file], hashed)
    starts = range(0, file.size, step)
    shards = tuple(Shard(f"{path.name}@{b}", f"{content}@{b}+{step}", min(step, file.size - b)) for b in starts)
    return JsonLines(file, shards, step)
