"""A shard, read once -> its index. Text is tokenised here and never again; of images only the headers are read."""

import errno
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eyeline.core.batch import EncodedImage, Sample, Span, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.image_rule import ImageRule
from eyeline.core.locations import Location, Remote, Stamp
from eyeline.data.containers.container import number_of, persistent
from eyeline.data.files import stores
from eyeline.data.images.decode import size_of
from eyeline.data.images.image_files import MAX_FILE_BYTES, frames_of, hold_out_draw, image_key, media_key
from eyeline.data.plan.shard_index import INSIDE, OWN, WHOLE, ShardIndex
from eyeline.data.sources.sources import Place, Rows
from eyeline.data.text.documents import Tokenised, require_answer, require_targets, tokenise
from eyeline.data.text.tokenizer import Encoder

LONGEST_MESSAGE = 400  # characters of a reject's message that are kept
TOGETHER = 64  # rows are processed in batches: keeps caches warm, and overlaps requests to a store
LOOKED_AT_ONCE = 16


class _Row(NamedTuple):
    """A row as the index keeps it."""

    place: Place
    key: int  # as in `images_R`
    drawn: float
    kind: int
    known: Tokenised
    sizes: list[tuple[int, int, int]]
    locations: tuple[tuple[int, int, int], ...]


def shard_index_of(rows: Rows, shard: int, encoder: Encoder, rule: ImageRule | None) -> ShardIndex:
    """Read one shard from its start to its end."""
    kinds: dict[str, int] = {}
    rejects: dict[int, tuple[str, str, str]] = {}
    out: list[_Row] = []
    looked = _Looked(rows.root, rows.file_of(shard).path, rows.retries)
    found = rows.rows_in(shard)
    while some := list(islice(found, TOGETHER)):
        samples = [sample for _, _, sample in some]
        if isinstance(rows.root, Remote):
            looked.prefetch(samples)
        seen = [NO_MEDIA if isinstance(sample, BadSample) else looked.media_of(sample.media) for sample in samples]
        tokens = [_tokens_of(sample, media, encoder, rule) for sample, media in zip(samples, seen, strict=True)]
        for (place, kind, _), media, known in zip(some, seen, tokens, strict=True):
            assert place.number == len(out), f"{rows.path}: row {place.number} came as number {len(out)}"
            number = -1 if kind is None else kinds.setdefault(kind, len(kinds))
            chance = media.drawn if media.drawn >= 0 else hold_out_draw([rows.id(place)])
            if isinstance(known, BadSample):
                message = known.message if len(known.message) <= LONGEST_MESSAGE else known.message[:LONGEST_MESSAGE] + "…"
                rejects[place.number] = (known.cause, known.field, message)
                out.append(_Row(place, media.key, chance, number, NOTHING, [], ()))
            else:
                out.append(_Row(place, media.key, chance, number, known, media.usable_sizes(), media.locations))
    return _as_arrays(out, tuple(kinds), rejects, looked, rows.skipped(shard))


def _as_arrays(
    rows: Sequence[_Row], kinds: tuple[str, ...], rejects: dict[int, tuple[str, str, str]], looked: "_Looked", skipped: int
) -> ShardIndex:
    sizes_M3 = np.array([size for row in rows for size in row.sizes], np.int32).reshape(-1, 3)
    locations_N3 = np.array([one for row in rows for one in row.locations], np.int64).reshape(-1, 3)
    bad_R = np.zeros(len(rows), bool)
    bad_R[list(rejects)] = True
    return ShardIndex(
        start_R=np.array([row.place.start for row in rows], np.int64),
        length_R=np.array([row.place.length for row in rows], np.int64),
        ids_U=np.concatenate([NOTHING.ids_U, *(row.known.ids_U for row in rows)]),
        trained_U=np.concatenate([NOTHING.trained_U, *(row.known.trained_U for row in rows)]),
        bounds_R1=np.cumsum([0, *(len(row.known.ids_U) for row in rows)]),
        places_W=np.concatenate([NOTHING.places_W, *(row.known.places_W for row in rows)]),
        places_R1=np.cumsum([0, *(len(row.known.places_W) for row in rows)]),
        sizes_M3=sizes_M3,
        slices_M=np.array([n for row in rows for n in row.known.slices], np.int32),
        media_R1=np.cumsum([0, *(len(row.known.slices) for row in rows)]),
        file_N=locations_N3[:, 0].astype(np.int32),
        start_N=locations_N3[:, 1].copy(),
        length_N=locations_N3[:, 2].copy(),
        frames_M1=np.concatenate([[0], np.cumsum(np.maximum(sizes_M3[:, 0], 1, dtype=np.int64))]),
        images_R=np.array([row.key for row in rows], np.uint64),
        drawn_R=np.array([row.drawn for row in rows], np.float64),
        kind_R=np.array([row.kind for row in rows], np.int32),
        bad_R=bad_R,
        kinds=kinds,
        rejects=rejects,
        files=tuple(looked.stamps),
        stamps_F2=np.array(list(looked.stamps.values()), np.int64).reshape(-1, 2),
        skipped=skipped,
    )


def _tokens_of(sample: Sample | BadSample, media: "_Media", encoder: Encoder, rule: ImageRule | None) -> Tokenised | BadSample:
    """A row tokenised, or what is wrong with it."""
    try:
        if isinstance(sample, BadSample):
            return sample
        require_answer(sample)
        known = require_targets(tokenise(sample.messages, encoder, rule))
        media.usable_sizes()
    except BadSample as bad:
        return bad
    return known


NOTHING = Tokenised(np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.int32), ())


@dataclass(frozen=True)
class _Media:
    """The images and videos of a row."""

    sizes: tuple[tuple[int, int, int] | BadSample, ...]  # as in `sizes_M3`
    locations: tuple[tuple[int, int, int], ...]  # of each image: as in `file_N`, `start_N` and `length_N`
    key: int
    drawn: float  # below 0: there are none

    def usable_sizes(self) -> list[tuple[int, int, int]]:
        """The sizes, if all can be used; else raises what is wrong with the first that cannot."""
        for size in self.sizes:
            if isinstance(size, BadSample):
                raise size
        return [size for size in self.sizes if not isinstance(size, BadSample)]


NO_MEDIA = _Media((), (), 0, -1.0)


@dataclass(frozen=True, eq=False)
class _Looked:
    """The media of a shard. Each is examined once, since rows share them."""

    root: Location
    own: Location  # the file that the shard is in
    retries: int
    media: dict[tuple[str, ...], _Media] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int, int] | BadSample] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # of `stamps`

    def media_of(self, media: tuple[EncodedImage | Video, ...]) -> _Media:
        keys = tuple(media_key(item) for item in media)
        if keys not in self.media:
            sizes = tuple(self._size(key, item) for key, item in zip(keys, media, strict=True))
            hashed = hashlib.blake2b("\n".join(keys).encode("utf-8", "surrogatepass"), digest_size=8).digest()
            images = [p for m in media for p in frames_of(m)]
            names = [image_key(p).removeprefix(str(self.root)) for p in images]
            locations = tuple(map(self._location, images))
            self.media[keys] = _Media(
                sizes, locations, (int.from_bytes(hashed, "big") or 1) if keys else 0, hold_out_draw(names) if names else -1.0
            )
        return self.media[keys]

    def _size(self, key: str, item: EncodedImage | Video) -> tuple[int, int, int] | BadSample:
        if key not in self.sizes:
            found = [self._located(image) for image in frames_of(item)]
            known = replace(item, frames=tuple(found)) if isinstance(item, Video) else found[0]
            try:
                size = persistent(partial(size_of, known), self.retries)
                self.sizes[key] = size if len(size) == 3 else (0, *size)
            except BadSample as bad:
                self.sizes[key] = bad
        return self.sizes[key]

    def _location(self, image: EncodedImage) -> tuple[int, int, int]:
        match image.source:
            case bytes():
                return INSIDE, 0, 0
            case Span(path, start, length):
                assert path == self.own, f"{image.name} is in {path}, and its row in {self.own}"
                return OWN, start, length
            case Path() | Remote():
                return self._numbered(image.source), 0, WHOLE

    def _located(self, image: EncodedImage) -> EncodedImage:
        """The image; an object of a store, as it was found, so that it need not be asked for again."""
        if isinstance(image.source, bytes | Span):
            return image
        self._numbered(image.source)
        stamp = self.stamps[str(image.source)]
        if isinstance(image.source, Path) or not 0 <= stamp[0] <= MAX_FILE_BYTES:
            return image
        return replace(image, source=Span(image.source, 0, stamp[0], stamp))

    def prefetch(self, samples: Sequence[Sample | BadSample]) -> None:
        """Look at the objects that these show, several at a time: one after another, they would be mostly waited for."""
        wanted = {str(p.source): p.source for s in samples if isinstance(s, Sample) for p in s.images if isinstance(p.source, Remote)}
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
    """The stamp of a file, or of an object, whose head is read along for `size_of`. ABSENT if it is missing or unreadable."""
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
