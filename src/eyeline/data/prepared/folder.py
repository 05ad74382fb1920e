"""A folder that `eyeline prepare` made: the same rows as the sources', in archives that the first epoch reads from start to end.

    prepared.json   what it was made from, and what is in it: written last
    shards/         WebDataset archives, samples in the order in which the first epoch's packs need them
    job/            the plans and manifests of the two jobs that made it; not read here
    index/          an index of each shard of the sources, with places in the archives
    where/          of each source with `where`, a bit per row
    rejects.jsonl   samples that cannot be used
    tokenizer/      where the recipe makes its own

Shards, row numbers, ids, sizes and fingerprints are the sources', so order, plan and state are, too. Only the locations of bytes differ.
"""

import errno
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, Literal, cast

from pydantic import ValidationError

from eyeline.core.batch import Budget, EncodedImage, Message, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.locations import Location, location
from eyeline.core.problems import lines_of
from eyeline.core.settings import Settings
from eyeline.data.containers.container import HASHED, RETRIES, File, Place, Shard, number_of
from eyeline.data.containers.tars import Tars
from eyeline.data.layouts.layouts import Layout, Mapping, Name, Shape
from eyeline.data.layouts.likely import likely_of, packed_likely
from eyeline.data.layouts.media import with_escapes, without_escapes
from eyeline.data.plan.shard_index import Shelf
from eyeline.data.signals.chosen import Bits, ByBits, Chosen
from eyeline.data.sources.folders import files_below, resolve_location
from eyeline.data.sources.sources import Rows, Source

VERSION = 4  # of the folder
MANIFEST = "prepared.json"
TOKENIZER = "tokenizer"


class StoredShard(Settings):
    """A shard of a source, as it was."""

    name: str
    fingerprint: str
    bytes: int
    held: int
    joined: bool
    file: str  # where it came from, for messages
    id: str  # of its rows, up to the number
    first_id: int
    first_row: int  # number of its first row in the file
    index: str  # name of its index, which is what that depends on

    @property
    def shard(self) -> Shard:
        return Shard(self.name, self.fingerprint, self.bytes, self.held, self.joined)


class StoredWhere(Settings):
    """What `where` left of a source."""

    text: str
    digest: str  # of the signals
    file: str  # a bit per row, of each shard from a whole byte
    bytes: int
    starts: tuple[int, ...]  # first byte of each shard
    rows: tuple[int, ...]


class StoredSource(Settings):
    """A source, as it was opened."""

    path: str
    root: str
    layout: str  # its identity
    why: str
    shards: tuple[StoredShard, ...]
    where: StoredWhere | None = None


class Archive(Settings):
    """One archive of the folder."""

    name: str
    bytes: int
    sha256: str
    rows: int
    validates: bool  # whether it is validated on


class Manifest(Settings):
    """The contents of a prepared folder."""

    version: Literal[4] = VERSION
    data: dict[str, Any]  # the settings that say which samples there are, and in which order
    identity: dict[str, Any]  # all that its plan depends on, as a reader states it
    tokens: int  # of the budget
    patches: int
    quality: int | None  # of the JPEG that images larger than the model looks at were made; None: all are as they were
    sources: tuple[StoredSource, ...]
    validation: tuple[StoredSource, ...]
    archives: tuple[Archive, ...]
    windows: tuple[str, ...]  # digest of the plan of each


@dataclass(frozen=True)
class Packed:
    """The rows of one source, in archives. A row's `start` counts through all of them, one behind the other."""

    archives: Tars
    ends: tuple[int, ...]  # of the archives, so counted
    shards: tuple[Shard, ...]
    stored: tuple[StoredShard, ...]
    shelf: Shelf
    what: str = "prepared"
    header: tuple[str, ...] = ()

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        """The rows that were stored, and those that cannot be used; not those that the settings leave out."""
        index = self.shelf.read(self.stored[shard].index)
        for number, bad in enumerate(index.bad_R.tolist()):
            place = index.place(shard, number)
            if bad:
                yield place, BadSample(*index.rejects[number])
            elif place.length > 0:
                yield place, self.row(place)

    def row(self, place: Place) -> Any:
        if place.length < 0:
            known = self.shelf.read(self.stored[place.shard].index).rejects.get(place.number)
            # planning also measures long rows that the settings leave out, and then does not ask for them
            raise BadSample(*(known or ("too_long", "row", "the settings left this row out when the data were prepared")))
        archive = bisect_right(self.ends, place.start)
        return self.archives.row(Place(archive, place.number, place.start - (self.ends[archive - 1] if archive else 0), place.length))

    def id(self, place: Place) -> str:
        stored = self.stored[place.shard]
        return f"{stored.id}#{stored.first_id + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        stored = self.stored[place.shard]
        return self.id(place), stored.file, stored.first_row + place.number

    def line(self, place: Place) -> None:  # noqa: ARG002
        return None

    def file_of(self, shard: int) -> File:  # noqa: ARG002 - an index says it for each image
        return self.archives.files[0]


# Samples as rows


def packed_row(sample: Sample, names: Sequence[str]) -> dict[str, Any]:
    """A sample as a row of an archive, in the layout of OpenAI's messages; `names` are those of its images, in order."""
    left = iter(names)

    def part_of(part: Text | EncodedImage | Video) -> dict[str, Any]:
        match part:
            case Text(text):
                return {"type": "text", "text": with_escapes(text)}
            case EncodedImage(name):
                next(left)
                return {"type": "image", "name": name}
            case Video(name, frames, seconds):
                taken = list(islice(left, len(frames)))
                return {"type": "video", "name": name, "frames": taken, "names": [f.name for f in frames], "timestamps": list(seconds)}

    messages = [
        {"role": message.role, "content": [part_of(part) for part in message.parts]}
        | ({} if message.supervised else {"loss": False})
        | ({} if message.likely is None else {"likely": packed_likely(message.likely)})
        for message in sample.messages
    ]
    row = {"id": sample.id, "kind": sample.kind, "messages": messages}
    return row | ({"images": list(names)} if names else {})


def packed_sample(row: Any, id: str, root: Location) -> Sample:  # noqa: ARG001 - as every layout is called
    """The inverse of `packed_row`, with the present locations of images."""
    left = iter(row.get("images", ()))

    def part_of(part: dict[str, Any]) -> Text | EncodedImage | Video:
        match part["type"]:
            case "text":
                return Text(without_escapes(part["text"]))
            case "image":
                return replace(next(left), name=part["name"])
            case _:
                frames = tuple(replace(next(left), name=name) for name in part["names"])
                return Video(part["name"], frames, tuple(part["timestamps"]))

    messages = tuple(
        Message(m["role"], tuple(map(part_of, m["content"])), m.get("loss", True), likely_of(m, f"messages[{n}]"))
        for n, m in enumerate(row["messages"])
    )
    return Sample(id, messages, row["kind"])


def _layout(about: StoredSource, folder: Location) -> Layout:
    """It is known by the identity of the layout that the rows had, whatever that was."""
    shape = Shape(cast(Name, about.layout), packed_sample, (), (), kind=itemgetter("kind"))
    return Layout(shape, f"prepared in {folder}; {about.why}", Mapping())


# The folder


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared folder, opened."""

    folder: Location
    manifest: Manifest
    archives: Tars
    shelf: Shelf

    @property
    def budget(self) -> Budget:
        return Budget(self.manifest.tokens, self.manifest.patches)

    def rows(self, stored: Sequence[StoredSource], sources: Sequence[Source]) -> tuple[Rows, ...]:
        """Sources as they were, read from the archives."""
        ends = tuple(accumulate(file.size for file in self.archives.files))
        return tuple(
            Rows(
                source,
                location(about.path),
                location(about.root),
                _layout(about, self.folder),
                Packed(self.archives, ends, tuple(s.shard for s in about.shards), about.shards, self.shelf),
                self.archives.files[0].retries,
                None if about.where is None else self._chosen(about.where),
            )
            for about, source in zip(stored, sources, strict=True)
        )

    def _chosen(self, about: StoredWhere) -> Chosen:
        file = File.of(self.folder / about.file, self.archives.files[0].retries)
        if file.size != about.bytes:
            raise StorageFailed(f"{file.path} is damaged or another file. Run `eyeline prepare` again: it repairs what is damaged")
        return Chosen(about.text, about.digest, ByBits(file, tuple(map(Bits, about.starts, about.rows))))

    def samples(self) -> Iterator[Sample]:
        """All training samples, once, in the order of the archives, from start to end."""
        for number, archive in enumerate(self.manifest.archives):
            if archive.validates:
                continue
            for _, row in self.archives.rows(number):
                if isinstance(row, BadSample):
                    raise StorageFailed(
                        f"{self.archives.files[number].path}: {row}. Run `eyeline prepare` again: it repairs what is damaged"
                    )
                yield packed_sample(row, row["id"], self.folder)

    def refuse_other(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        """Refused, naming what differs from what the folder was made for."""
        differs = list(differences(before, now))
        if differs:
            raise Refused(
                f"{self.folder} was prepared from other data or settings. These differ: {'; '.join(differs)}. Restore them, or prepare "
                "the data again, in another folder"
            )

    def refuse_other_plan(self, window: int, digest: str) -> None:
        """StorageFailed when a window is planned otherwise than was stored."""
        stored = self.manifest.windows
        if window < len(stored) and stored[window] != digest:
            raise StorageFailed(
                f"{self.folder}: window {window} has plan {digest}, and {stored[window]} is stored. Its indexes differ from "
                "those that it was made with. Run `eyeline prepare` again"
            )


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """In what two values of plain JSON differ: the path, and both sides."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and any(isinstance(v, dict) for v in before):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{path}.{number}")
    elif before != now:
        yield f"{path} ({_short(before)} → {_short(now)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


def open_prepared(path: str, retries: int = RETRIES) -> Prepared:
    """Open a prepared folder, here or in a store. Refused where there is none; StorageFailed where something of it is missing or damaged.

    Archives of up to 64 MiB together are known by their content, larger ones by their size; `eyeline prepare`, called again,
    looks at every byte.
    """
    folder = resolve_location(path, retries)
    about = folder / MANIFEST
    try:
        file = File.of(about, retries)
        value = json.loads(file.read(0, file.size))
    except StorageFailed as failed:
        if number_of(failed) not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise Refused(
            f"{folder} is not a folder of prepared data, or preparing it did not finish: it has no {MANIFEST}. Run `eyeline prepare "
            "RECIPE --out FOLDER` (again: it resumes)"
        ) from failed
    except ValueError as error:
        raise Refused(f"{about} is not JSON ({error}). Delete it, and run `eyeline prepare` again") from error
    version = value.get("version") if isinstance(value, dict) else None
    if version != VERSION:
        raise Refused(f"{about} has format version {version!r}; this Eyeline reads {VERSION}. Prepare the data again, into a new folder")
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        raise Refused(f"{about} is damaged: {lines_of(Manifest, value, error)[0]}. Delete it, and run `eyeline prepare` again") from error
    return open_manifest(folder, manifest, retries)


def open_manifest(folder: Location, manifest: Manifest, retries: int) -> Prepared:
    """The folder that a manifest describes. StorageFailed as for `open_prepared`."""
    there = {found.name: found for found in files_below(folder / "shards", retries)}
    names = [archive.name for archive in manifest.archives]
    files = tuple(File.of(there.get(name, folder / "shards" / name), retries) for name in names)
    small = sum(file.size for file in files) <= HASHED
    for file, archive in zip(files, manifest.archives, strict=True):
        if file.size != archive.bytes or (small and hashlib.sha256(file.read(0, file.size)).hexdigest() != archive.sha256):
            raise StorageFailed(f"{file.path} is damaged or another file. Run `eyeline prepare` again: it repairs what is damaged")
    shards = tuple(Shard(archive.name, archive.sha256, archive.bytes) for archive in manifest.archives)
    return Prepared(folder, manifest, Tars(files, shards), Shelf(folder / "index", files))
