"""An index of each shard: where every row lies, its token ids, the sizes of its pictures. Made once, when a window needs it.

Text is tokenised here and never again; of pictures only the headers are read. What is kept depends on the shard and on the
tokenizer, not on budgets or on how pictures are resized, so that other settings need no other index. It is one file a shard,
mapped rather than loaded, so memory does not grow with the data. A file that is damaged, or whose pictures have changed, is made
anew. Processes that share a folder, such as the ranks of a run, make each index once: one does, the others wait for it.

Dims: R rows of a shard  U token ids, rows end to end  W placeholders of media  M media  N pictures: stills and frames  F files
"""

import errno
import hashlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import Picture, Sample, Span, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.facts import ImageRule
from eyeline.core.files import claimed, make_folder, storage_failed, write_atomically
from eyeline.core.locations import Location, Remote, Stamp, location
from eyeline.data.containers.container import File, Shard, number_of, persistent
from eyeline.data.files import stores
from eyeline.data.images.decode import Size, size_of
from eyeline.data.images.image_files import MAX_FILE_BYTES, frames_of, image_key, medium_key
from eyeline.data.sources.sources import Place, Rows
from eyeline.data.text.documents import Tokenised, answered, targeted, tokenised
from eyeline.data.text.tokenizer import Encoder

VERSION = 3
MAGIC = b"eyeline index\n"
KEPT_OPEN = 128  # shards whose index stays open: those of a window and of the ones beside it, and some that open bins still refer to
LONGEST_MESSAGE = 400  # characters of a reject's message that are kept
OWN, INSIDE = -1, -2  # in `file_N`: the file that the shard lies in; the row, which has the bytes of the picture
WHOLE = -1  # in `length_N`
# rows that are read, then looked at, then tokenised: a processor that does one thing many times has what it takes at hand, and objects
# of a store are asked for side by side
TOGETHER = 64
LOOKED_AT_ONCE = 16

Longs = NDArray[np.int64]
L = TypeVar("L", Path, Location)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The rows of one shard, as arrays. `number` of a row is its position here; rows that cannot be used are here, too."""

    begin_R: Longs  # `Place.begin` and `Place.length`
    length_R: Longs
    ids_U: NDArray[np.int32]
    trained_U: NDArray[np.bool_]
    bounds_R1: Longs  # of each row in U
    places_W: NDArray[np.int32]  # where in the row's ids each placeholder stands
    places_R1: Longs  # bounds of each row in W
    sizes_M3: NDArray[np.int32]  # frames (0: a still), height, width
    slices_M: NDArray[np.int32]  # placeholders that the medium has
    media_R1: Longs  # bounds of each row in M
    file_N: NDArray[np.int32]  # where each picture lies: number of its file, OWN or INSIDE
    begin_N: Longs
    length_N: Longs  # WHOLE: of a file of its own
    frames_M1: Longs  # bounds of each medium in N
    pictures_R: NDArray[np.uint64]  # equal for rows that look at the same media; 0 for none
    drawn_R: NDArray[np.float64]  # 0 to 1, by the names of the pictures alone: a row is held out when this is below the share
    kind_R: NDArray[np.int32]  # which of `kinds`; -1: the row cannot be parsed at all
    bad_R: NDArray[np.bool_]
    kinds: tuple[str, ...]
    rejects: dict[int, tuple[str, str, str]]  # number of a bad row -> cause, field, message
    files: tuple[str, ...]  # files of pictures, and their size and time of change when they were looked at (-1: absent)
    stamps_F2: Longs
    skipped: int  # members of the archive that belong to no data set

    def __len__(self) -> int:
        return len(self.begin_R)

    def place(self, shard: int, row: int) -> Place:
        return Place(shard, row, int(self.begin_R[row]), int(self.length_R[row]))

    def tokenised(self, row: int) -> Tokenised:
        ids, places, media = (slice(int(b[row]), int(b[row + 1])) for b in (self.bounds_R1, self.places_R1, self.media_R1))
        return Tokenised(self.ids_U[ids], self.trained_U[ids], self.places_W[places], tuple(self.slices_M[media].tolist()))

    def sizes(self, row: int) -> tuple[Size, ...]:
        """Of each medium of a row."""
        return tuple(_size(s) for s in self.sizes_M3[self.media_R1[row] : self.media_R1[row + 1]].tolist())

    def media(self, row: int, own: File) -> tuple[Picture | Video, ...] | None:
        """What a row shows, by where it lies; `own` is the file of the shard. None: the row has to be read. Films come without times:
        the ids say them already."""
        begin, end = self.media_R1[row : row + 2].tolist()
        bounds = self.frames_M1[begin : end + 1].tolist()
        if (self.file_N[bounds[0] : bounds[-1]] == INSIDE).any():
            return None
        frames = [self._picture(n, own) for n in range(bounds[0], bounds[-1])]
        media: list[Picture | Video] = []
        for first, last, still in zip(bounds, bounds[1:], (self.sizes_M3[begin:end, 0] == 0).tolist(), strict=False):
            of = frames[first - bounds[0] : last - bounds[0]]
            media.append(of[0] if still else Video(of[0].name, tuple(of), (0.0,) * len(of)))
        return tuple(media)

    def _picture(self, number: int, own: File) -> Picture:
        file, begin, length = int(self.file_N[number]), int(self.begin_N[number]), int(self.length_N[number])
        path = own.path if file == OWN else location(self.files[file])
        if length == WHOLE and isinstance(path, Path):
            return Picture(str(path), path)
        size, changed = own.stamp if file == OWN else self.stamps_F2[file].tolist()
        if length == WHOLE:  # an object: it is to be the one that was indexed, which asking for it tells at no cost
            return Picture(str(path), Span(path, 0, size, (size, changed)))
        return Picture(f"{path}@{begin}+{length}", Span(path, begin, length, (size, changed)))

    @cached_property
    def showing_R(self) -> Longs:
        """How many rows of the shard look at what each row looks at; 1 for text."""
        _, group_R, counts = np.unique(self.pictures_R, return_inverse=True, return_counts=True)
        return np.where(self.pictures_R == 0, 1, counts[group_R])

    def kept(self, kinds: Sequence[str] | None) -> NDArray[np.bool_]:
        """Which rows are of these kinds. One that cannot be parsed is of any: it is to be counted."""
        if kinds is None:
            return np.ones(len(self), bool)
        return np.isin(self.kind_R, [-1, *(self.kinds.index(kind) for kind in kinds if kind in self.kinds)])


def _size(frames_height_width: Sequence[int]) -> Size:
    frames, height, width = frames_height_width
    return (frames, height, width) if frames else (height, width)


# Making one


def drawn(names: Sequence[str]) -> float:
    """A number from 0 to 1 that depends on the names of a row's pictures alone (on its id for text): the least of theirs, so that no
    picture is on both sides."""
    return min(int.from_bytes(hashlib.sha256(("held out" + n).encode("utf-8", "surrogatepass")).digest()[:8], "big") for n in names) / 2**64


def names_of(sample: Sample | BadSample, id: str, root: Location) -> list[str]:
    """What `drawn` goes by: names below the root, so that it is the same wherever the data lies."""
    if isinstance(sample, BadSample):
        return [id]
    return [image_key(picture).removeprefix(str(root)) for picture in sample.pictures] or [id]


def made(rows: Rows, shard: int, encoder: Encoder, rule: ImageRule | None) -> ShardIndex:
    """Read one shard from its begin to its end."""
    begin, length, ids, trained, counts, places, place_counts = [], [], [], [], [], [], []
    sizes: list[tuple[int, int, int]] = []
    slices, media_counts, pictures, draws, kind_numbers = [], [], [], [], []
    lies: list[tuple[int, int, int]] = []
    kinds: dict[str, int] = {}
    rejects: dict[int, tuple[str, str, str]] = {}
    looked = _Looked(rows.root, rows.lies_in(shard).path, rows.retries)
    found = rows.rows_in(shard)
    while some := list(islice(found, TOGETHER)):
        samples = [sample for _, _, sample in some]
        if isinstance(rows.root, Remote):
            looked.ahead(samples)
        seen = [NO_MEDIA if isinstance(sample, BadSample) else looked.at(sample.media) for sample in samples]
        said = [_said(sample, media, encoder, rule) for sample, media in zip(samples, seen, strict=True)]
        for (place, kind, _), media, known in zip(some, seen, said, strict=True):
            assert place.number == len(begin), f"{rows.path}: row {place.number} came as number {len(begin)}"
            begin.append(place.begin)
            length.append(place.length)
            pictures.append(media.key)
            draws.append(media.drawn if media.drawn >= 0 else drawn([rows.id(place)]))
            kind_numbers.append(-1 if kind is None else kinds.setdefault(kind, len(kinds)))
            if isinstance(known, BadSample):
                message = known.message if len(known.message) <= LONGEST_MESSAGE else known.message[:LONGEST_MESSAGE] + "…"
                rejects[place.number] = (known.cause, known.field, message)
                known = NOTHING
            else:
                sizes += media.sound()
                lies += media.lies
            ids.append(known.ids_U)
            trained.append(known.trained_U)
            counts.append(len(known.ids_U))
            places.append(known.places_W)
            place_counts.append(len(known.places_W))
            slices += known.slices
            media_counts.append(len(known.slices))
    bad_R = np.zeros(len(begin), bool)
    sizes_M3, lies_N3 = np.array(sizes, np.int32).reshape(-1, 3), np.array(lies, np.int64).reshape(-1, 3)
    bad_R[list(rejects)] = True
    return ShardIndex(
        begin_R=np.array(begin, np.int64),
        length_R=np.array(length, np.int64),
        ids_U=np.concatenate([NOTHING.ids_U, *ids]),
        trained_U=np.concatenate([NOTHING.trained_U, *trained]),
        bounds_R1=np.cumsum([0, *counts]),
        places_W=np.concatenate([NOTHING.places_W, *places]),
        places_R1=np.cumsum([0, *place_counts]),
        sizes_M3=sizes_M3,
        slices_M=np.array(slices, np.int32),
        media_R1=np.cumsum([0, *media_counts]),
        file_N=lies_N3[:, 0].astype(np.int32),
        begin_N=lies_N3[:, 1].copy(),
        length_N=lies_N3[:, 2].copy(),
        frames_M1=np.concatenate([[0], np.cumsum(np.maximum(sizes_M3[:, 0], 1, dtype=np.int64))]),
        pictures_R=np.array(pictures, np.uint64),
        drawn_R=np.array(draws, np.float64),
        kind_R=np.array(kind_numbers, np.int32),
        bad_R=bad_R,
        kinds=tuple(kinds),
        rejects=rejects,
        files=tuple(looked.stamps),
        stamps_F2=np.array(list(looked.stamps.values()), np.int64).reshape(-1, 2),
        skipped=rows.skipped(shard),
    )


def _said(sample: Sample | BadSample, media: "_Media", encoder: Encoder, rule: ImageRule | None) -> Tokenised | BadSample:
    """A row tokenised, or what is wrong with it."""
    try:
        if isinstance(sample, BadSample):
            return sample
        answered(sample)
        known = targeted(tokenised(sample.messages, encoder, rule))
        media.sound()
    except BadSample as bad:
        return bad
    return known


NOTHING = Tokenised(np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.int32), ())


@dataclass(frozen=True)
class _Media:
    """The pictures and films of a row."""

    sizes: tuple[tuple[int, int, int] | BadSample, ...]  # as in `sizes_M3`
    lies: tuple[tuple[int, int, int], ...]  # of each picture: as in `file_N`, `begin_N` and `length_N`
    key: int
    drawn: float  # below 0: there are none

    def sound(self) -> list[tuple[int, int, int]]:
        """The sizes, if all can be used; else raises what is wrong with the first that cannot."""
        for size in self.sizes:
            if isinstance(size, BadSample):
                raise size
        return [size for size in self.sizes if not isinstance(size, BadSample)]


NO_MEDIA = _Media((), (), 0, -1.0)


@dataclass(frozen=True, eq=False)
class _Looked:
    """What was found of the media of a shard. Each is looked at once: rows share them."""

    root: Location
    own: Location  # the file that the shard lies in
    retries: int
    media: dict[tuple[str, ...], _Media] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int, int] | BadSample] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # of `stamps`

    def at(self, media: tuple[Picture | Video, ...]) -> _Media:
        keys = tuple(medium_key(medium) for medium in media)
        if keys not in self.media:
            sizes = tuple(self._size(key, medium) for key, medium in zip(keys, media, strict=True))
            hashed = hashlib.blake2b("\n".join(keys).encode("utf-8", "surrogatepass"), digest_size=8).digest()
            pictures = [p for m in media for p in frames_of(m)]
            names = [image_key(p).removeprefix(str(self.root)) for p in pictures]
            lies = tuple(map(self._lies, pictures))
            self.media[keys] = _Media(sizes, lies, (int.from_bytes(hashed, "big") or 1) if keys else 0, drawn(names) if names else -1.0)
        return self.media[keys]

    def _size(self, key: str, medium: Picture | Video) -> tuple[int, int, int] | BadSample:
        if key not in self.sizes:
            found = [self._found(picture) for picture in frames_of(medium)]
            known = replace(medium, frames=tuple(found)) if isinstance(medium, Video) else found[0]
            try:
                size = persistent(partial(size_of, known), self.retries)
                self.sizes[key] = size if len(size) == 3 else (0, *size)
            except BadSample as bad:
                self.sizes[key] = bad
        return self.sizes[key]

    def _lies(self, picture: Picture) -> tuple[int, int, int]:
        match picture.source:
            case bytes():
                return INSIDE, 0, 0
            case Span(path, begin, length):
                assert path == self.own, f"{picture.name} lies in {path}, and its row in {self.own}"
                return OWN, begin, length
            case Path() | Remote():
                return self._numbered(picture.source), 0, WHOLE

    def _found(self, picture: Picture) -> Picture:
        """The picture; an object of a store, as it was found, so that it need not be asked for again."""
        if isinstance(picture.source, bytes | Span):
            return picture
        self._numbered(picture.source)
        stamp = self.stamps[str(picture.source)]
        if isinstance(picture.source, Path) or not 0 <= stamp[0] <= MAX_FILE_BYTES:
            return picture
        return replace(picture, source=Span(picture.source, 0, stamp[0], stamp))

    def ahead(self, samples: Sequence[Sample | BadSample]) -> None:
        """Look at the objects that these show, several at a time: one after another, they would be mostly waited for."""
        wanted = {str(p.source): p.source for s in samples if isinstance(s, Sample) for p in s.pictures if isinstance(p.source, Remote)}
        new = [source for name, source in wanted.items() if name not in self.stamps]
        with ThreadPoolExecutor(LOOKED_AT_ONCE) as threads:
            for source, stamp in zip(new, threads.map(partial(stamp_of, retries=self.retries), new), strict=True):
                self._numbered(source, stamp)

    def _numbered(self, path: Location, stamp: Stamp | None = None) -> int:
        """The number of a file, which is looked at when it is met first."""
        name = str(path)
        if name not in self.stamps:
            self.numbers[name] = len(self.stamps)
            self.stamps[name] = stamp or stamp_of(path if isinstance(path, Remote) else name, self.retries)
        return self.numbers[name]


ABSENT: Stamp = (-1, -1)


def stamp_of(path: Remote | str, retries: int) -> Stamp:
    """Of a file; of an object its begin comes along, which `size_of` reads. ABSENT for what is not there, or may not be read."""
    if isinstance(path, Remote):
        try:
            return persistent(partial(stores.look, path, stores.HEAD_BYTES), retries)[0]
        except StorageFailed as failed:
            if number_of(failed) != errno.ENOENT:
                raise
            return ABSENT
    try:
        about = os.stat(path)
        return (about.st_size, about.st_mtime_ns) if os.access(path, os.R_OK) else ABSENT
    except (OSError, ValueError):
        return ABSENT


def _is_still(written: str, stamp: Stamp, retries: int) -> bool:
    """Whether a picture is as it was. Of objects only absent ones are asked for: the others tell when they are fetched, at no cost."""
    path = location(written) if "://" in written else written
    return (isinstance(path, Remote) and stamp != ABSENT) or stamp_of(path if isinstance(path, Remote) else written, retries) == stamp


# On disk: a line, the header's length, the header (JSON), arrays at multiples of 64 bytes, and the SHA-256 of all that


def to_bytes(index: ShardIndex, identity: str) -> bytes:
    """The file of an index."""
    arrays = {f.name: value for f in fields(index) if isinstance(value := getattr(index, f.name), np.ndarray)}
    header = {"identity": identity, "kinds": index.kinds, "rejects": index.rejects, "files": index.files, "skipped": index.skipped}
    header["arrays"] = {}
    at = 0
    for name, array in arrays.items():
        header["arrays"][name] = [array.dtype.str, list(array.shape), at]
        at += -(-array.nbytes // 64) * 64
    head = json.dumps(header).encode()
    start = len(MAGIC) + 8 + len(head)
    out = bytearray(MAGIC + len(head).to_bytes(8, "little") + head + bytes(-start % 64))
    for array in arrays.values():
        out += array.tobytes()
        out += bytes(-len(out) % 64)
    return bytes(out) + hashlib.sha256(out).digest()


def from_bytes(data: NDArray[np.uint8], identity: str) -> ShardIndex:
    """The index in a file, without a copy. ValueError for one that is damaged or another's."""
    if (
        len(data) < len(MAGIC) + 8 + 32
        or data[: len(MAGIC)].tobytes() != MAGIC
        or data[-32:].tobytes() != hashlib.sha256(data[:-32].data).digest()
    ):
        raise ValueError("it is damaged")
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8].tobytes(), "little")
    start = len(MAGIC) + 8 + length
    header = json.loads(data[len(MAGIC) + 8 : start].tobytes())
    if header["identity"] != identity:
        raise ValueError("it is another shard's")
    start += -start % 64
    arrays = {}
    for name, (dtype, shape, at) in header["arrays"].items():
        count = math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = data[start + at : start + at + count].view(dtype).reshape(shape)
    rejects = {int(row): (cause, where, message) for row, (cause, where, message) in header["rejects"].items()}
    return ShardIndex(**arrays, kinds=tuple(header["kinds"]), rejects=rejects, files=tuple(header["files"]), skipped=header["skipped"])


def identity_of(about: Shard, layout: str, root: Location, encoder: Encoder, rule: ImageRule | None) -> str:
    """What an index depends on. Of the image rule that is whether pictures are taken at all, and how many frames one slice has."""
    taken = None if rule is None else (rule.frames, rule.film is not None)
    said = [VERSION, about.fingerprint, layout, str(root), about.name, encoder.identity, taken]
    return hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def index_path(folder: L, identity: str) -> L:
    return folder / identity[:2] / f"{identity}.index"


@dataclass(frozen=True, eq=False)
class Shelf:
    """Indexes that were made before, of prepared data: all pictures lie in archives, which they name by number."""

    folder: Location
    archives: tuple[File, ...]

    def read(self, identity: str) -> ShardIndex:
        """The index of one shard. StorageFailed where it is missing or damaged."""
        path = index_path(self.folder, identity)
        try:
            if isinstance(path, Remote):
                file = File.of(path, self.archives[0].retries)
                index = from_bytes(np.frombuffer(file.read(0, file.size), np.uint8), identity)
            else:
                index = from_bytes(np.asarray(np.memmap(path, np.uint8, "r")), identity)
        except ValueError as error:
            raise StorageFailed(f"{path}: {error}. Run `eyeline prepare` again: it mends what is damaged") from error
        except OSError as error:
            raise storage_failed("read", Path(str(path)), error) from error
        return replace(index, files=self._names, stamps_F2=self._stamps)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(str(file.path) for file in self.archives)

    @cached_property
    def _stamps(self) -> Longs:
        return np.array([file.stamp for file in self.archives], np.int64)


@dataclass(frozen=True, eq=False)
class Index:
    """The indexes of all shards of some sources, each made when it is first asked for."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None
    folder: Path | None  # None: they are remembered only, as far as there is room
    shelf: Shelf | None = None  # of prepared data: they are read there, and none is made
    _open: OrderedDict[tuple[int, int], ShardIndex] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": OrderedDict()}

    @property
    def written(self) -> bool:
        """Whether other processes find here what this one makes, and the other way round."""
        return self.folder is not None and self.shelf is None

    def absent(self, source: int, shard: int) -> bool:
        """Whether nobody has written the index of a shard yet, as far as it can be told: who reads it is told why it cannot be read."""
        path = self._path(self._identity(source, shard))
        return path is None or not os.path.exists(path)

    def shard(self, source: int, shard: int) -> ShardIndex:
        """The index of one shard: remembered, read, made, or waited for."""
        known = self._found(source, shard, wait=True)
        assert known is not None, "what was waited for is there"
        return known

    def begin(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Read or make those that no other process is making: so many processes make different ones."""
        for source, shard in wanted:
            self._found(source, shard, wait=False)

    def _found(self, source: int, shard: int, wait: bool) -> ShardIndex | None:
        known = self._open.get((source, shard))
        if known is None and self.shelf is not None:
            known = self.shelf.read(self._identity(source, shard))
        if known is None:
            known = self._read(source, shard)
        if known is None:
            known = self._made(source, shard, wait)
        if known is not None:
            self._open[source, shard] = known
            self._open.move_to_end((source, shard))
            while len(self._open) > KEPT_OPEN:
                self._open.popitem(last=False)
        return known

    def _identity(self, source: int, shard: int) -> str:
        rows = self.sources[source]
        return identity_of(rows.shards[shard], rows.layout.identity, rows.root, self.encoder, self.rule)

    def _path(self, identity: str) -> Path | None:
        return index_path(self.folder, identity) if self.folder else None

    def _read(self, source: int, shard: int) -> ShardIndex | None:
        """The index on disk, if there is one that is sound and still true."""
        identity = self._identity(source, shard)
        path = self._path(identity)
        if path is None:
            return None
        try:
            index = from_bytes(np.asarray(np.memmap(path, np.uint8, "r")), identity)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise storage_failed("read", path, error) from error
        retries = self.sources[source].retries
        if not all(
            _is_still(file, (size, change), retries) for file, (size, change) in zip(index.files, index.stamps_F2.tolist(), strict=True)
        ):
            return None
        return index

    def _made(self, source: int, shard: int, wait: bool) -> ShardIndex | None:
        """The index, made here unless another process has made it meanwhile. None: another one is at it, and we do not wait."""
        identity = self._identity(source, shard)
        path = self._path(identity)
        if path is None:
            return made(self.sources[source], shard, self.encoder, self.rule)
        make_folder(path.parent)
        with claimed(path, wait) as mine:
            if not mine:
                return None
            read = self._read(source, shard)
            if read is None:
                write_atomically(path, to_bytes(made(self.sources[source], shard, self.encoder, self.rule), identity), durable=False)
                read = self._read(source, shard)
        if read is None:
            raise StorageFailed(f"{self.sources[source].path} or its pictures change while they are read. Let them rest, then start again")
        return read
