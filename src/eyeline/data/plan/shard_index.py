"""The index of a shard: where every row is stored, its token ids, the sizes of its images; and the file that keeps it.

What is kept depends on the shard and on the tokenizer, not on budgets or on how images are resized, so that other settings need no
other index. It is one file per shard, mapped rather than loaded, so memory does not grow with the data.

Dims: R rows of a shard  U token ids, rows end to end  W placeholders of media  M media  N images: stills and frames  F files
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import EncodedImage, Span, Video
from eyeline.core.errors import StorageFailed
from eyeline.core.files import storage_failed
from eyeline.core.image_rule import ImageRule
from eyeline.core.locations import Location, Remote, location
from eyeline.data.containers.container import File, Shard
from eyeline.data.images.decode import Size
from eyeline.data.sources.sources import Place
from eyeline.data.text.documents import Tokenised
from eyeline.data.text.tokenizer import Encoder

VERSION = 4
MAGIC = b"eyeline index\n"
OWN, INSIDE = -1, -2  # in `file_N`: the file that holds the shard; the row, which has the bytes of the image
WHOLE = -1  # in `length_N`

Longs = NDArray[np.int64]
L = TypeVar("L", Path, Location)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The rows of one shard, as arrays. `number` of a row is its position here; rows that cannot be used are here, too."""

    start_R: Longs  # `Place.start` and `Place.length`
    length_R: Longs
    ids_U: NDArray[np.int32]
    trained_U: NDArray[np.bool_]
    bounds_R1: Longs  # of each row in U
    places_W: NDArray[np.int32]  # where in the row's ids each placeholder stands
    places_R1: Longs  # bounds of each row in W
    sizes_M3: NDArray[np.int32]  # frames (0: a still), height, width
    slices_M: NDArray[np.int32]  # placeholders of the media item
    media_R1: Longs  # bounds of each row in M
    file_N: NDArray[np.int32]  # the location of each image: number of its file, OWN or INSIDE
    start_N: Longs
    length_N: Longs  # WHOLE: of a file of its own
    frames_M1: Longs  # bounds of each media item in N
    images_R: NDArray[np.uint64]  # equal for rows that look at the same media; 0 for none
    drawn_R: NDArray[np.float64]  # 0 to 1, by the names of the images alone: a row is held out when this is below the share
    kind_R: NDArray[np.int32]  # which of `kinds`; -1: the row cannot be parsed at all
    bad_R: NDArray[np.bool_]
    kinds: tuple[str, ...]
    rejects: dict[int, tuple[str, str, str]]  # number of a bad row -> cause, field, message
    files: tuple[str, ...]  # files of images, and their size and time of change when they were looked at (-1: absent)
    stamps_F2: Longs
    skipped: int  # members of the archive that belong to no data set

    def __len__(self) -> int:
        return len(self.start_R)

    def place(self, shard: int, row: int) -> Place:
        return Place(shard, row, int(self.start_R[row]), int(self.length_R[row]))

    def tokenised(self, row: int) -> Tokenised:
        ids, places, media = (slice(int(b[row]), int(b[row + 1])) for b in (self.bounds_R1, self.places_R1, self.media_R1))
        return Tokenised(self.ids_U[ids], self.trained_U[ids], self.places_W[places], tuple(self.slices_M[media].tolist()))

    def sizes(self, row: int) -> tuple[Size, ...]:
        """The size of each media item of a row."""
        return tuple(_size(s) for s in self.sizes_M3[self.media_R1[row] : self.media_R1[row + 1]].tolist())

    def media(self, row: int, own: File) -> tuple[EncodedImage | Video, ...] | None:
        """The media of a row, by location; `own` is the file of the shard. None: the row has to be read. Videos come without times:
        the ids say them already."""
        start, end = self.media_R1[row : row + 2].tolist()
        bounds = self.frames_M1[start : end + 1].tolist()
        if (self.file_N[bounds[0] : bounds[-1]] == INSIDE).any():
            return None
        frames = [self._image(n, own) for n in range(bounds[0], bounds[-1])]
        media: list[EncodedImage | Video] = []
        for first, last, still in zip(bounds, bounds[1:], (self.sizes_M3[start:end, 0] == 0).tolist(), strict=False):
            of = frames[first - bounds[0] : last - bounds[0]]
            media.append(of[0] if still else Video(of[0].name, tuple(of), (0.0,) * len(of)))
        return tuple(media)

    def _image(self, number: int, own: File) -> EncodedImage:
        file, start, length = int(self.file_N[number]), int(self.start_N[number]), int(self.length_N[number])
        path = own.path if file == OWN else location(self.files[file])
        if length == WHOLE and isinstance(path, Path):
            return EncodedImage(str(path), path)
        size, changed = own.stamp if file == OWN else self.stamps_F2[file].tolist()
        if length == WHOLE:  # an object: it is to be the one that was indexed, which asking for it tells at no cost
            return EncodedImage(str(path), Span(path, 0, size, (size, changed)))
        return EncodedImage(f"{path}@{start}+{length}", Span(path, start, length, (size, changed)))

    @cached_property
    def showing_R(self) -> Longs:
        """For each row the number of rows of the shard with the same media; 1 for text."""
        _, group_R, counts = np.unique(self.images_R, return_inverse=True, return_counts=True)
        return np.where(self.images_R == 0, 1, counts[group_R])

    def kept_rows(self, kinds: Sequence[str] | None) -> NDArray[np.bool_]:
        """A mask of the rows of these kinds. A row that cannot be parsed counts as any kind."""
        if kinds is None:
            return np.ones(len(self), bool)
        return np.isin(self.kind_R, [-1, *(self.kinds.index(kind) for kind in kinds if kind in self.kinds)])


def _size(frames_height_width: Sequence[int]) -> Size:
    frames, height, width = frames_height_width
    return (frames, height, width) if frames else (height, width)


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
    """A digest of all that an index depends on. Of the image rule that is whether images are taken at all, and how many frames one slice
    has."""
    taken = None if rule is None else (rule.frames, rule.video is not None)
    said = [VERSION, about.fingerprint, layout, str(root), about.name, encoder.identity, taken]
    return hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def index_path(folder: L, identity: str) -> L:
    return folder / identity[:2] / f"{identity}.index"


@dataclass(frozen=True, eq=False)
class Shelf:
    """Indexes that were made before, of prepared data: all images are in archives, which they name by number."""

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
            raise StorageFailed(f"{path}: {error}. Run `eyeline prepare` again: it repairs what is damaged") from error
        except OSError as error:
            raise storage_failed("read", Path(str(path)), error) from error
        return replace(index, files=self._names, stamps_F2=self._stamps)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(str(file.path) for file in self.archives)

    @cached_property
    def _stamps(self) -> Longs:
        return np.array([file.stamp for file in self.archives], np.int64)
