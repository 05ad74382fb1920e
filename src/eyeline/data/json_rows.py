"""Strict JSON, row by row: what JSON forbids spoils its own row only, wherever a row can be told from the next."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.files import storage_failed

MAX_LINE_BYTES = 64 << 20  # a longer JSONL line is skipped without being held in memory
MAX_DIGITS = 18


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
        return Broken("duplicate_key", f"the key {twice!r} is there twice")
    return out


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_DIGITS else Broken("huge_number", f"a number of {len(digits)} digits")


def _constant(name: str) -> Any:
    return Broken("not_finite", f"{name} is not JSON")


def _number(text: str) -> Any:
    value = float(text)
    return value if abs(value) != float("inf") else Broken("not_finite", f"{text[:20]} is beyond all floats")


def parse(text: str) -> tuple[Any, bool]:
    """The value, and whether there is a `Broken` in it. BadSample `not_json` or `nesting` when there is no value."""
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
        raise BadSample("not_json", "row", f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise BadSample("nesting", "row", "brackets are nested too deep") from error


def sound(row: Any) -> Any:
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


@dataclass(frozen=True)
class Container:
    """Rows of one file: `raw(n)` parses row n or raises BadSample. `digest` is the SHA-256 of the file."""

    what: str
    digest: str
    count: int
    raw: Callable[[int], Any]


@dataclass(frozen=True)
class _Listed:
    rows: list[Any]
    flawed: bool

    def __call__(self, n: int) -> Any:
        return sound(self.rows[n]) if self.flawed else self.rows[n]


@dataclass(frozen=True)
class _Lines:
    path: Path
    bounds: list[tuple[int, int]]  # offset and length of each line that is not blank; length -1: over the cap
    stamp: tuple[int, int]  # of the file when it was listed

    def __call__(self, n: int) -> Any:
        offset, length = self.bounds[n]
        if length < 0:
            raise BadSample("line_too_long", "row", f"the line has more than {MAX_LINE_BYTES:,} bytes")
        try:
            with open(self.path, "rb") as file:
                stamp = _stamp(file)
                file.seek(offset)
                line = file.read(length)
        except OSError as error:
            raise storage_failed("read", self.path, error) from error
        if stamp != self.stamp:  # its lines would be read in pieces, and what was planned would not be what is trained
            raise StorageFailed(f"{self.path} has changed since it was opened. Put it back as it was, or begin a new run with the new data")
        row, flawed = parse(_text(line))
        return sound(row) if flawed else row


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """Size and time of the last change: other ones mean other content."""
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns


def _text(data: bytes) -> str:
    """Bytes that are not UTF-8 become lone surrogates, which spoil only the row that uses them."""
    return data.decode("utf-8-sig", "surrogateescape")


def open_container(path: Path) -> Container:
    """A JSON list or JSON lines, told apart by the first byte that is not a space."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            return _list(path)
        if head.startswith(b"{"):
            return _lines(path)
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    kinds = {b"PAR1": "a Parquet file", b"\x1f\x8b": "gzip", b"PK": "a zip archive", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    what = next((name for magic, name in kinds.items() if head.startswith(magic)), f"something that begins with {head[:12]!r}")
    raise Refused(f"{path} is {what if head else 'empty'}; wanted: a JSON list of rows, or JSON lines (UTF-8)")


def _list(path: Path) -> Container:
    data = path.read_bytes()
    try:
        rows, flawed = parse(_text(data))
    except BadSample as bad:
        raise Refused(f"{path} is not JSON: {bad.message}. It starts with [, so one list of rows was expected") from bad
    return Container("JSON list", hashlib.sha256(data).hexdigest(), len(rows), _Listed(rows, flawed))


def _lines(path: Path) -> Container:
    bounds: list[tuple[int, int]] = []
    digest = hashlib.sha256()
    offset = 0
    with open(path, "rb") as file:
        stamp = _stamp(file)
        while line := file.readline(MAX_LINE_BYTES + 1):
            digest.update(line)
            begin, length = offset, len(line)
            offset += length
            if length > MAX_LINE_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 20)
                    digest.update(line)
                    offset += len(line)
                length = -1
            if length < 0 or line.strip():
                bounds.append((begin, length))
    return Container("JSON lines", digest.hexdigest(), len(bounds), _Lines(path, bounds, stamp))
