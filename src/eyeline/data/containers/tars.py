"""WebDataset archives: the members of a key, one after another, are a sample. A compressed one cannot be read from its middle."""

import io
import os
import re
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from eyeline.core.batch import EncodedImage, Span
from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location, Remote, below
from eyeline.data.containers.container import HEADER_BYTES, SHARD_ROWS, File, FileSlice, Place, Shard, fingerprints
from eyeline.data.containers.json_rows import parse, require_valid
from eyeline.data.containers.keys import IMAGE_SUFFIXES, TEXTS, WRITE, Member, member_of, split, stem_of, text_of, tops_of
from eyeline.data.files.names import is_skipped

MAX_MEMBER_BYTES = 256 << 20
MAX_TEXT_BYTES = 64 << 20
MAX_MEMBERS = 1 << 18  # of an archive, where they are small: all are listed at once
SMALL_BYTES = 2 << 10  # of a member with its header
MAX_TOGETHER = 10_000  # members whose names are equal up to the first dot
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
RUN_BYTES = 64 << 20  # of an archive that has an index: a larger one is read in runs
BLOCK = 512  # bytes; headers and members begin at multiples of it
AHEAD_BYTES = 64 << 10  # of an archive that is read in order: as many at once, whatever of them is looked at


class ArchivePart(NamedTuple):
    """Samples of an archive, one after another."""

    file: int
    start: int
    end: int
    first: int = 0  # number of the first of them in the archive
    count: int = 0
    index: File | None = None  # of the archive, by which it was cut; None: it is whole

    def starts(self) -> list[int] | None:
        """The start of each sample, as the index states it."""
        return None if self.index is None else offsets_in(self.index, self.first, self.count)


def offsets_in(index: File, first: int, count: int) -> list[int]:
    """Energon's `.tar.idx`: where each sample of an archive begins, 8 bytes each, and last where there is none any more."""
    return list(struct.unpack(f"<{count}Q", index.read(8 * first, 8 * count)))


def _header(file: File, at: int) -> str:
    """The name in the header at a place, as far as it is there. Empty where there is none."""
    head = file.read(at, min(BLOCK, file.size - at))
    name, prefix = (part.partition(b"\0")[0].decode("utf-8", "surrogateescape") for part in (head[:100], head[345:500]))
    return (f"{prefix}/{name}" if prefix else name) if head[257:262] == b"ustar" else ""


def _unfit(index: File | None, why: str) -> Refused:
    return Refused(f"{index.path if index else None} does not fit its archive: {why}. Run `energon prepare` again, or delete the index")


@dataclass(frozen=True)
class Tars:
    """A shard an archive, or a run of the samples of one."""

    files: tuple[File, ...]
    shards: tuple[Shard, ...]
    wanted: tuple[str, ...] = ()  # members that a mapping names: they are columns of their own
    what: str = "WebDataset"
    parts: tuple[ArchivePart, ...] = ()  # of each shard; none: it is a whole archive
    header: tuple[str, ...] = ()
    _skipped: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        run = self._part(shard)
        file = self.files[run.file]
        size = run.end - run.start
        starts = run.starts()
        known: set[str] = set()
        keys: set[str] = set()  # up to the first dot, as the index counts samples
        skipped: list[int] = []
        number = 0
        with _Archive(FileSlice(file, run.start, size), size) as archive:
            for group in _groups(_capped(_members(archive), file, skipped), archive, HEADER_BYTES, self.wanted):
                if isinstance(group, BadSample):
                    yield Place(shard, number, 0, UNUSABLE), group
                    break
                keys.add(group[0][0].key)
                samples, unclear = _samples(group, self.wanted)
                for sample in samples:
                    start, end = run.start + sample[0][0].start, run.start + _padded(sample[-1][0])
                    self._check(run, starts, number, start, samples)
                    try:
                        _new_names(sample, len(samples) == 1, known)
                        if unclear is not None:
                            raise unclear
                        row = _row(sample, file, run.start, self.wanted)
                    except BadSample as bad:
                        yield Place(shard, number, start, UNUSABLE), bad
                    else:
                        yield Place(shard, number, start, end - start), row
                    number += 1
            else:
                if starts is not None and (number < len(starts) or member_of(_header(file, run.end), 0, 0, 0, True).key in keys):
                    raise _unfit(run.index, f"sample {run.first + number} of the archive starts elsewhere")
        self._skipped[shard] = len(skipped)

    def _check(self, run: ArchivePart, starts: list[int] | None, number: int, start: int, samples: "list[Members]") -> None:
        """Refused where a sample is none of those that an index lists."""
        if starts is None:
            return
        if len(samples) > 1:
            names = " and ".join(repr(sample[0][0].name[-100:]) for sample in samples[:2])
            raise _unfit(run.index, f"it counts {names} as one sample, since their names are equal up to the first dot")
        if number >= len(starts) or starts[number] != start:
            raise _unfit(run.index, f"sample {run.first + number} starts at byte {start:,} of the archive, and not where the index says")

    def skipped(self, shard: int) -> int:
        """Members that no data set means, such as `._a.jpg` of macOS. Known once its rows were read."""
        return self._skipped.get(shard, 0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_skipped": {}}

    def row(self, place: Place) -> Any:
        if place.length == UNUSABLE:  # what its neighbours are tells why
            raise next(row for at, row in self.rows(place.shard) if at == place and isinstance(row, BadSample))
        file = self.file_of(place.shard)
        data = file.read(place.start, min(place.length, file.size - place.start)).ljust(place.length, b"\0")
        with _Archive(io.BytesIO(data), len(data)) as archive:
            [group] = _groups(_members(archive), archive, place.length, self.wanted)
        assert not isinstance(group, BadSample), f"{file.path} is as it was, and {place} is unusable now"
        [sample], _ = _samples(group, self.wanted)
        return _row(sample, file, place.start, self.wanted)

    def file_of(self, shard: int) -> File:
        return self.files[self._part(shard).file]

    def id(self, place: Place) -> str:
        run, name = self._part(place.shard), self.shards[place.shard].name
        return f"{name if run.index is None else name.rpartition('#')[0]}#{run.first + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        run = self._part(place.shard)
        return self.id(place), str(self.files[run.file].path), run.first + place.number

    def line(self, place: Place) -> None:  # noqa: ARG002
        return None

    def _part(self, shard: int) -> ArchivePart:
        return self.parts[shard] if self.parts else ArchivePart(shard, 0, self.files[shard].size)


class _Archive(io.BufferedReader):
    """An archive that is read in order. A read never makes room for more than there is, whatever a header says."""

    def __init__(self, file: Any, size: int):
        super().__init__(file, AHEAD_BYTES)
        self.size = size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))


UNUSABLE = -1  # the length of a row that cannot be read


def _short_name(name: str) -> str:
    return repr(name[:100])


def _padded(member: Member) -> int:
    """The position of the next member."""
    return member.data + -(-member.size // BLOCK) * BLOCK


_NUMBERS = re.compile(rb"(?:[0-7]{7}[ \0]|[0-7]{6} \0){3}([0-7]{11})[ \0][0-7]{11}[ \0]([0-7]{6})\0 ([0x5])")  # mode ... type
_DEVICE = re.compile(rb"(?:[0-7]{7}\0|\0{8}){2}")
_TIME = re.compile(rb"([0-9]{1,3}) [amc]time=[0-9.]+\n")  # an attribute that says nothing about the location of a member


def _plain(file: _Archive, at: int) -> tuple[bytes, str, int, int] | None:
    """Type, name, place of the content and size of the member whose header begins at `at`; None unless it is an ordinary one."""
    file.seek(at)
    head = file.read(BLOCK)
    numbers = _NUMBERS.fullmatch(head, 100, 157)
    ordinary = len(head) == BLOCK and head[0] and head[257:265] in (b"ustar\x0000", b"ustar  \0") and _DEVICE.fullmatch(head, 329, 345)
    if numbers is None or not ordinary:
        return None
    if sum(head) - sum(head[148:156]) + 8 * ord(" ") != int(numbers[2], 8):
        return None
    name, prefix = (part.partition(b"\0")[0].decode("utf-8", "surrogateescape") for part in (head[:100], head[345:500]))
    return numbers[3], f"{prefix}/{name}" if prefix else name, at + BLOCK, int(numbers[1], 8)


def _idle(attributes: bytes, size: int) -> bool:
    """Return whether a block of attributes holds times alone."""
    at = 0
    while at < size and (found := _TIME.match(attributes, at)) is not None and len(found[0]) == int(found[1]):
        at = found.end()
    return at == size and not attributes[size:].strip(b"\0")


def _members(file: _Archive) -> Iterator[Member | BadSample]:
    """The members in order. A BadSample is the last where an archive is damaged: what followed is unknown.

    Ordinary headers are read here, as `tarfile` reads them and much faster; from the first other one on, all is left to it.
    """
    size, at = file.size, 0
    while at <= size:
        found = _plain(file, at)
        if found is not None and found[0] == b"x" and 0 < found[3] <= BLOCK and _idle(file.read(BLOCK), found[3]):
            found = _plain(file, found[2] + BLOCK)
            if found is not None and found[0] != b"0":
                break
        if found is None or found[0] == b"x" or (found[0] == b"5" and found[3]):
            break
        kind, name, data, length = found
        if kind == b"0":
            yield member_of(name, at, data, length, True)
        if data + length > size:
            yield _cut_short(name, length)
            return
        at = data + -(-length // BLOCK) * BLOCK
    else:
        yield BadSample("damaged_tar", "row", "unexpected end of data")
        return
    file.seek(at)
    if at == 0 or file.read(BLOCK).strip(b"\0"):  # else it ends here
        yield from _odd_members(file, at)


def _cut_short(name: str, size: int) -> BadSample:
    return BadSample("damaged_tar", "row", f"{_short_name(name)} has {size:,} bytes, and the archive ends before")


def _odd_members(file: _Archive, start: int) -> Iterator[Member | BadSample]:
    """The members from the header at `start` on, whatever they are."""
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[arg-type]
            while (info := archive.next()) is not None:
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]  # else it keeps all that it has seen
                if info.isdir():
                    continue
                yield member_of(info.name, info.offset, info.offset_data, info.size, info.isreg() and not info.issparse())
                if info.offset_data + info.size > file.size:
                    yield _cut_short(info.name, info.size)
                    return
            file.seek(archive.offset)  # it silently stops at an invalid header
            if file.read(BLOCK).strip(b"\0"):
                yield BadSample("damaged_tar", "row", f"no member starts at byte {archive.offset:,}, and the archive does not end there")
    except tarfile.ReadError as error:
        if file.size:
            yield BadSample("damaged_tar", "row", str(error))
        else:
            yield BadSample("damaged_tar", "row", "the archive is empty: even its end marker is missing")


def _capped(members: Iterator[Member | BadSample], file: File, skipped: list[int]) -> Iterator[Member | BadSample]:
    """The members, and where those begin that are skipped. Refused where there are too many to be listed."""
    for count, member in enumerate(members, 1):
        if count > max(MAX_MEMBERS, file.size // SMALL_BYTES):
            raise Refused(
                f"{file.path} has more than {MAX_MEMBERS:,} members, most empty or small, and an archive is listed as a whole. Write "
                "several archives of at most some ten thousand samples each, or Parquet"
            )
        if not isinstance(member, BadSample) and is_skipped(member.name):
            skipped.append(member.start)
        yield member


Members = list[tuple[Member, bytes]]  # members, and what is read of each


def _samples(group: Members, wanted: tuple[str, ...]) -> tuple[list[Members], BadSample | None]:
    """The samples of neighbours; all as one, and why, where it cannot be told what they are."""
    try:
        if len(group) > MAX_TOGETHER:
            name = _short_name(group[0][0].key)
            raise BadSample("tar_key", "row", f"more than {MAX_TOGETHER:,} members have names that are {name} up to the first dot. {WRITE}")
        parts = split([member for member, _ in group], wanted)
    except BadSample as bad:
        return [group], bad
    content = {member.start: content for member, content in group}
    return [[(member, content[member.start]) for member in part] for part in parts], None


def _new_names(sample: Members, whole: bool, known: set[str]) -> None:
    """Remember what a sample is called. BadSample where an earlier one was called so: it is only a part of a sample, perhaps."""
    key = sample[0][0].key
    names = {key} if whole else set()
    if any(text_of(member, ()) for member, _ in sample):
        names = {key}
    else:  # a text of the same name may be elsewhere
        names |= {f"{key}.{stem}" for member, _ in sample if (stem := stem_of(member))}
    if twice := names & known:
        raise BadSample("tar_key", "row", f"the key {_short_name(min(twice))} appeared before, with others between")
    known |= names


def _groups(members: Iterator[Member | BadSample], archive: _Archive, most: int, wanted: tuple[str, ...]) -> Iterator[Members | BadSample]:
    """Neighbours of the same key, with their texts, and the first bytes of each image. Those before a damage are lost with it:
    it is unknown whether they are all."""
    group: Members = []
    for member in members:
        if isinstance(member, BadSample):
            yield member
            return
        if is_skipped(member.name):
            continue
        if group and member.key != group[0][0].key:
            yield group
            group = []
        if len(group) >= MAX_TOGETHER:  # nothing more of it is read
            group[MAX_TOGETHER:] = [(member, b"")]
            continue
        text = member.kind in TEXTS or member.part in wanted
        length = min(member.size, most) if member.kind in IMAGE_SUFFIXES else member.size if text else 0
        archive.seek(member.data)
        group.append((member, archive.read(length if length <= MAX_TEXT_BYTES else 0)))
    if group:
        yield group


def _row(group: Members, file: File, offset: int, wanted: tuple[str, ...]) -> dict[str, Any]:
    """A row of what the members are: the columns of the JSON member, `images`, texts by their names, and members that are `wanted` by
    theirs. A text without a name is the `caption`. What is not read is None.

    Places of members count from `offset` in the archive.
    """
    row: dict[str, Any] = {}
    own: dict[str, Any] = {}
    images: dict[str, EncodedImage] = {}
    texts: dict[str, str] = {}
    tops = tops_of(text for member, _ in group if (text := text_of(member, wanted)) is not None)
    parts: set[str] = set()
    for member, content in group:
        name, text = member.name, text_of(member, wanted)
        if not member.plain:
            raise BadSample(
                "tar_member",
                "row",
                f"{_short_name(name)} is a link, a device, too long a name, or has a path that leads out of the archive",
            )
        if member.part in parts:
            raise BadSample("tar_key", "row", f"{_short_name(name)} appears twice")
        parts.add(member.part)
        if member.kind in IMAGE_SUFFIXES:
            if member.size > MAX_MEMBER_BYTES:
                raise BadSample("file_too_large", "row", f"{_short_name(name)} has {member.size:,} bytes, over {MAX_MEMBER_BYTES:,}")
            images[member.part] = EncodedImage(name, Span(file.path, member.data + offset, member.size, file.stamp, content))
            if member.part in wanted:
                own[member.part] = images[member.part]
        elif member.part in wanted or (text is not None and text.base in tops):
            if member.size > MAX_TEXT_BYTES:
                raise BadSample("file_too_large", "row", f"{_short_name(name)} has {member.size:,} bytes, over {MAX_TEXT_BYTES:,}")
            if member.kind == "json":
                value, flawed = parse(content.decode("utf-8-sig", "surrogateescape"))
                value = require_valid(value) if flawed else value
                if not isinstance(value, dict):
                    raise BadSample("wrong_type", name, "wanted an object")
                row |= value
                if member.part in wanted:
                    own[member.part] = value
            elif member.part in wanted:
                own[member.part] = content.decode("utf-8-sig", "surrogateescape").strip()
            elif text is not None:
                texts[text.slot] = content.decode("utf-8-sig", "surrogateescape").strip()
        else:
            own[member.part] = None
    caption = texts.pop("txt", None)
    if texts:
        row = texts | row
    elif caption is not None and not {"caption", "text", "conversations", "messages"} & row.keys():
        row["caption"] = caption
    row = {part: value for part, value in own.items() if value is None} | row | {p: v for p, v in own.items() if v is not None}
    if images:
        row = {column: value for column, value in row.items() if column not in ("image", "images")} | {"images": _in_row_order(row, images)}
    return row


def _in_row_order(row: dict[str, Any], images: dict[str, EncodedImage]) -> list[EncodedImage]:
    """The images as the row names them; in the order of the archive, if it names none."""
    names = row.get("image") if row.get("image") is not None else row.get("images")
    names = [names] if isinstance(names, str) else names
    if len(images) == 1 or not isinstance(names, list):
        return list(images.values())
    found: list[EncodedImage] = []
    for name in names:
        fits = [
            p
            for part, p in images.items()
            if isinstance(name, str) and (name.lower() == part or os.path.basename(p.name) == os.path.basename(name) or _dotted(p, name))
        ]
        if len(fits) != 1:
            raise BadSample("tar_member", "images", f"{str(name)[:100]!r} names none of the images {', '.join(images)}")
        found += fits
    return found


def _dotted(image: EncodedImage, name: str) -> bool:
    """Return whether a name is what follows the first dot, of a key that has dots itself."""
    return os.path.basename(image.name).partition(".")[2].lower() == name.lower()


def open_tars(
    paths: list[Location], base: Location, wanted: tuple[str, ...], note: str, indexes: dict[Location, Location], retries: int
) -> Tars:
    """A shard an archive, in the order given, or of a large one that has an index a run of its samples.

    Nothing is read but how they begin; of a store, where that is a request each, only of the first. Refused when one is compressed,
    or has the index of another. `note` is said of them.
    """
    files = [File.of(path, retries) for path in paths]
    for file in files[:1] if isinstance(paths[0], Remote) else files:
        if file.read(0, min(8, file.size)).startswith(COMPRESSED):
            raise Refused(
                f"{file.path} is compressed (gzip or another), and reading a sample would mean reading everything before it. "
                f"Decompress it: the "
                "images in it are compressed already"
            )
    shards: list[Shard] = []
    parts: list[ArchivePart] = []
    for number, (file, content) in enumerate(zip(files, fingerprints(files), strict=True)):
        name, index = below(base, file.path), indexes.get(file.path)
        cut = _cut_up(number, file, File.of(index, retries)) if index is not None and file.size > RUN_BYTES else []
        for run in cut or [ArchivePart(number, 0, file.size)]:
            of = f"{content}[{run.start}:{run.end}]" if cut else content
            shards.append(Shard(f"{name}#{run.first}" if cut else name, of, run.end - run.start))
            parts.append(run)
    return Tars(tuple(files), tuple(shards), wanted, f"WebDataset ({note})" if note else "WebDataset", tuple(parts))


def _cut_up(number: int, file: File, index: File) -> list[ArchivePart]:
    """Runs of samples, by an index. Refused when it cannot be the archive's; `rows` looks at every sample."""
    if index.size % 8 or not index.size:
        raise _unfit(index, f"it has {index.size:,} bytes, which is not a multiple of 8")
    starts = offsets_in(index, 0, index.size // 8)
    wrong = next((a for a, b in pairwise((-1, *starts)) if not a < b <= file.size or b % BLOCK), None)
    if wrong is not None:
        raise _unfit(index, f"after {wrong:,} comes no position of a sample in {file.size:,} bytes")
    if file.read(starts[-1], min(BLOCK, file.size - starts[-1])).strip(b"\0"):
        raise _unfit(index, f"the archive continues at byte {starts[-1]:,}, where it says that there is no more")
    parts: list[ArchivePart] = []
    first = 0
    for n in range(1, len(starts)):
        if first == n - 1 and not _header(file, starts[first]):
            raise _unfit(index, f"no sample starts at byte {starts[first]:,} of the archive")
        if n == len(starts) - 1 or n - first == SHARD_ROWS or starts[n + 1] - starts[first] > RUN_BYTES:
            parts.append(ArchivePart(number, starts[first], starts[n], first, n - first, index))
            first = n
    return parts
