"""WebDataset archives: the members of a key, one after another, are a sample. A compressed one cannot be read from its middle."""

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyeline.core.batch import Picture, Span
from eyeline.core.errors import BadSample, Refused
from eyeline.data.containers import File, Place, Shard, Window, fingerprints
from eyeline.data.json_rows import parse, sound

PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
MAX_MEMBER_BYTES = 256 << 20
MAX_TEXT_BYTES = 64 << 20
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
BLOCK = 512  # bytes; headers and members begin at multiples of it


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    key: str  # its name without what follows the first dot
    part: str  # what follows it
    begin: int  # of its header
    data: int  # where its content begins
    size: int
    plain: bool  # a regular file, inside the archive


@dataclass(frozen=True)
class Tars:
    """A shard an archive."""

    files: tuple[File, ...]
    shards: tuple[Shard, ...]
    what: str = "WebDataset"
    header: tuple[str, ...] = ()

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        file = self.files[shard]
        known: set[str] = set()
        number = 0
        with Window(file, 0, file.size) as window:
            for group in _groups(_members(window)):
                if isinstance(group, BadSample):
                    yield Place(shard, number, 0, UNUSABLE), group
                    return
                begin, end = group[0].begin, _padded(group[-1])
                try:
                    if group[0].key in known:
                        raise BadSample("tar_key", "row", f"the key {_shown(group[0].key)} was there before, with others between")
                    known.add(group[0].key)
                    row = _row(group, file, None, 0)
                except BadSample as bad:
                    yield Place(shard, number, begin, UNUSABLE), bad
                else:
                    yield Place(shard, number, begin, end - begin), row
                number += 1

    def row(self, place: Place) -> Any:
        if place.length == UNUSABLE:  # what its neighbours are tells why
            raise next(row for at, row in self.rows(place.shard) if at == place and isinstance(row, BadSample))
        file = self.files[place.shard]
        data = file.read(place.begin, min(place.length, file.size - place.begin)).ljust(place.length, b"\0")
        [group] = _groups(_members(io.BytesIO(data)))
        assert not isinstance(group, BadSample), f"{file.path} is as it was, and {place} is unusable now"
        return _row(group, file, data, place.begin)

    def lies_in(self, shard: int) -> File:
        return self.files[shard]

    def named(self, place: Place) -> tuple[str, str, int]:
        path = self.files[place.shard].path
        return f"{self.shards[place.shard].name}#{place.number}", str(path), place.number


UNUSABLE = -1  # the length of a row that cannot be read


def _shown(name: str) -> str:
    return repr(name[:100])


def _padded(member: Member) -> int:
    """Where the next member begins."""
    return member.data + -(-member.size // BLOCK) * BLOCK


def _members(file: io.BufferedIOBase | Window) -> Iterator[Member | BadSample]:
    """The members in order. A BadSample is the last where an archive is damaged: nobody knows what was behind."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[arg-type]
            while (info := archive.next()) is not None:
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]  # else it keeps all that it has seen
                if info.isdir():
                    continue
                folder, _, name = info.name.rpartition("/")
                key, _, part = name.partition(".")
                inside = not info.name.startswith("/") and ".." not in info.name.split("/") and "\0" not in info.name
                key = f"{folder}/{key}" if folder else key
                yield Member(key, part.lower(), info.offset, info.offset_data, info.size, info.isreg() and not info.issparse() and inside)
                if info.offset_data + info.size > size:
                    yield BadSample("damaged_tar", "row", f"{_shown(info.name)} has {info.size:,} bytes, and the archive ends before")
                    return
            file.seek(archive.offset)  # it stops without a word at a header that is none
            if file.read(BLOCK).strip(b"\0"):
                yield BadSample("damaged_tar", "row", f"no member begins at byte {archive.offset:,}, and the archive does not end there")
    except tarfile.ReadError as error:
        if size:
            yield BadSample("damaged_tar", "row", str(error))
        else:
            yield BadSample("damaged_tar", "row", "the archive is empty: not even its end is there")


def _groups(members: Iterator[Member | BadSample]) -> Iterator[list[Member] | BadSample]:
    """Neighbours of the same key. Those before a damage are lost with it: nobody knows whether they are all."""
    group: list[Member] = []
    for member in members:
        if isinstance(member, BadSample):
            yield member
            return
        if group and member.key != group[0].key:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _row(group: list[Member], file: File, data: bytes | None, offset: int) -> dict[str, Any]:
    """A row of what the members are: the columns of the JSON member, `images`, and a text member as `caption`.

    `data` are the bytes of the archive from `offset` on, where they are there; else texts are read and pictures are not.
    """
    row: dict[str, Any] = {}
    pictures: dict[str, Picture] = {}
    texts: dict[str, str] = {}
    parts: set[str] = set()
    for member in group:
        name = f"{member.key}.{member.part}"
        if not member.plain:
            raise BadSample("tar_member", "row", f"{_shown(name)} is a link, a device, or has a path that leads out of the archive")
        if member.part in parts:
            raise BadSample("tar_key", "row", f"{_shown(name)} is there twice")
        parts.add(member.part)
        kind = member.part.rpartition(".")[2]
        at = member.data + offset
        if kind in PICTURES:
            if member.size > MAX_MEMBER_BYTES:
                raise BadSample("file_too_large", "row", f"{_shown(name)} has {member.size:,} bytes, over {MAX_MEMBER_BYTES:,}")
            content = None if data is None else data[member.data : member.data + member.size]
            pictures[member.part] = Picture(name, Span(file.path, at, member.size, file.stamp, content))
        elif kind in ("json", "txt"):
            if member.size > MAX_TEXT_BYTES:
                raise BadSample("file_too_large", "row", f"{_shown(name)} has {member.size:,} bytes, over {MAX_TEXT_BYTES:,}")
            content = file.read(at, member.size) if data is None else data[member.data : member.data + member.size]
            if kind == "json":
                value, flawed = parse(content.decode("utf-8-sig", "surrogateescape"))
                if not isinstance(value, dict):
                    raise BadSample("wrong_type", name, "an object was wanted")
                row |= sound(value) if flawed else value
            else:
                texts[member.part] = content.decode("utf-8-sig", "surrogateescape")
    if texts and not {"caption", "text", "conversations", "messages"} & row.keys():
        row["caption"] = next(iter(texts.values())).strip()
    if pictures:
        row = {column: value for column, value in row.items() if column not in ("image", "images")} | {"images": _ordered(row, pictures)}
    return row


def _ordered(row: dict[str, Any], pictures: dict[str, Picture]) -> list[Picture]:
    """The pictures as the row names them; as they lie in the archive, where it names none."""
    names = row.get("image") if row.get("image") is not None else row.get("images")
    names = [names] if isinstance(names, str) else names
    if len(pictures) == 1 or not isinstance(names, list):
        return list(pictures.values())
    found: list[Picture] = []
    for name in names:
        fits = [
            p
            for part, p in pictures.items()
            if isinstance(name, str) and (name.lower() == part or os.path.basename(p.name) == os.path.basename(name))
        ]
        if len(fits) != 1:
            raise BadSample("tar_member", "images", f"{str(name)[:100]!r} names none of the pictures {', '.join(pictures)}")
        found += fits
    return found


def open_tars(paths: list[Path], base: Path, retries: int) -> Tars:
    """A shard an archive, in the order given. Nothing is read. Refused when one is compressed."""
    files = [File.of(path, retries) for path in paths]
    for file in files:
        if file.read(0, min(8, file.size)).startswith(COMPRESSED):
            raise Refused(
                f"{file.path} is compressed (gzip or another), and no sample could be read without all before it. Decompress it: the "
                "pictures in it are compressed already"
            )
    names = [os.path.relpath(path, base) for path in paths]
    return Tars(tuple(files), tuple(map(Shard, names, fingerprints(files), [file.size for file in files])))


# Megatron-Energon's folders: archives, and beside them a list of those that count


def energon_shards(folder: Path) -> list[Path] | None:
    """The training archives of a folder that Energon has prepared; None for any other folder. Refused when some are missing."""
    about = folder / ".nv-meta"
    if not about.is_dir():
        return None
    try:
        split = yaml.safe_load((about / "split.yaml").read_text())
        listed = split["split_parts"]["train"]
        if not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
            raise TypeError("split_parts.train is no list of names")
        excluded = set(split.get("exclude") or ())
        if not excluded <= set(listed):
            raise TypeError("exclude names more than archives")
    except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise Refused(
            f"{about / 'split.yaml'} does not list the archives to train on ({error}). Run `energon prepare` again, or give a pattern"
        ) from error
    paths = [Path(os.path.normpath(folder / name)) for name in listed if name not in excluded]
    bad = [path for path in paths if not path.is_relative_to(folder) or not path.is_file()]
    if bad:
        raise Refused(
            f"{about / 'split.yaml'} lists {len(bad)} archives that are not there, such as {bad[0]}. Restore them, or prepare it again"
        )
    return paths
