"""One partition of samples -> one archive, and what is stored where in it."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from eyeline.core.batch import EncodedImage, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import storage_failed
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers.container import Place, persistent
from eyeline.data.containers.tars import BLOCK
from eyeline.data.images.decode import Size, size_of, upright
from eyeline.data.images.image_files import frames_of, image_key, in_memory
from eyeline.data.images.patches import units_of
from eyeline.data.plan.shard_index import Longs
from eyeline.data.prepared.folder import packed_row
from eyeline.data.sources.sources import Rows
from eyeline.offline.attempt import Done
from eyeline.offline.plan import Partition

ARCHIVE, ENTRIES = "archive.tar", "entries.json"
EXTENSIONS = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"GI": "gif", b"BM": "bmp"}  # how the accepted formats begin


@dataclass(frozen=True, eq=False)
class WriteArchive:
    """`write_archive(partition, folder)`: the work on a partition of samples. Pickles."""

    sources: tuple[tuple[Rows, ...], tuple[Rows, ...]]  # those of training, and validation sources of their own
    rows: Path  # an array of all samples in order: 1 for validation sources of their own, else 0; source; a Place there. It is mapped
    rule: ImageRule | None
    quality: int | None  # of the JPEG that larger images are scaled down to; None: they stay

    def __call__(self, partition: Partition, folder: Path) -> Done:
        start, end, _ = partition.work
        entries = Entries([], [])
        at = 0
        path = folder / ARCHIVE
        try:
            with open(path, "wb") as file:
                for n, row in enumerate(np.load(self.rows, mmap_mode="r")[start:end].tolist()):
                    at += self._append(file, row, f"{partition.number:05d}-{n:07d}", at, entries)
                file.write(bytes(2 * BLOCK))
            (folder / ENTRIES).write_text(json.dumps(entries._asdict()))
        except OSError as error:
            raise storage_failed("write", path, error) from error
        return Done({ARCHIVE: end - start}, {})

    def _append(self, file: BinaryIO, row: list[int], key: str, at: int, entries: "Entries") -> int:
        """Append a sample, note what is stored where, and return its bytes."""
        own, source, shard, number, *where = row
        members, images = self._members(self.sources[own][source], Place(shard, number, *where), key)
        length = sum(map(len, members))
        file.writelines(members)
        entries.rows.append([at, length, len(images)])
        entries.images.extend([shown, at + inside, size, *scaled] for shown, inside, size, *scaled in images)
        return length

    def _members(self, rows: Rows, place: Place, key: str) -> tuple[list[bytes], list[list[Any]]]:
        """One sample as members of an archive, its JSON, then its images in order; and the images as in Entries, counted from the first
        member."""
        try:
            sample = rows.read(place)
            files = [found for item in sample.media for found in self._encoded_images(item, rows.retries)]
        except BadSample as bad:
            _, file, number = rows.origin_of(place)
            raise StorageFailed(
                f"{file} row {number}, or an image of it, has changed since it was indexed: {bad}. Restore it, then prepare again"
            ) from bad
        names = [f"{n}.{EXTENSIONS.get(data[:2], 'jpg')}" for n, (_, data, _) in enumerate(files)]
        row = json.dumps(packed_row(sample, names), ensure_ascii=False, separators=(",", ":"))
        members = [_member(f"{key}.json", row.encode())]
        images: list[list[Any]] = []
        at = len(members[0])
        for name, (shown, data, size) in zip(names, files, strict=True):
            members.append(_member(f"{key}.{name}", data))
            images.append([shown, at + BLOCK, len(data), *size])
            at += len(members[-1])
        return members, images

    def _encoded_images(self, item: EncodedImage | Video, retries: int) -> Iterator[tuple[str, bytes, tuple[int, int]]]:
        """(a hash that is equal for equal images, the encoded file, and its height and width if it was scaled down) of each image."""
        size = None if self.quality is None or self.rule is None else _largest(size_of(item), self.rule)
        for image in frames_of(item):
            name = image_key(image) + (f" {size}" if size else "")
            found = persistent(partial(_bytes, image), retries)
            smaller = None if size is None else self._scaled_down(replace(image, source=found), size)
            hashed = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            yield (hashed, found, (0, 0)) if size is None or smaller is None else (hashed, smaller, size)

    def _scaled_down(self, image: EncodedImage, size: tuple[int, int]) -> bytes | None:
        """The image as JPEG of this height and width; None where it cannot be decoded: training finds that out as of the source."""
        assert self.quality is not None and self.rule is not None
        try:
            rgb = upright(image)
        except BadSample:
            return None
        out = io.BytesIO()
        rgb.resize((size[1], size[0]), Pillow.Resampling[self.rule.resample.upper()]).save(out, "JPEG", quality=self.quality)
        return out.getvalue()


class Entries(NamedTuple):
    """The contents of one archive."""

    rows: list[list[int]]  # start, length, images of each, in order
    images: list[list[Any]]  # of these: hash of what it shows, start, length, and height and width where it was scaled down


class PackedEntries(NamedTuple):
    """The same as arrays, a tenth of the size."""

    row_R3: Longs
    keys_N: NDArray[np.bytes_]
    lies_N4: Longs


def packed_entries(data: bytes) -> PackedEntries:
    entries = Entries(**json.loads(data))
    keys_N = np.array([image[0] for image in entries.images], "S32")
    lies_N4 = np.array([image[1:] for image in entries.images], np.int64).reshape(-1, 4)
    return PackedEntries(np.array(entries.rows, np.int64).reshape(-1, 3), keys_N, lies_N4)


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _bytes(image: EncodedImage) -> bytes:
    read = in_memory(image)
    assert isinstance(read, EncodedImage) and isinstance(read.source, bytes)
    return read.source


def _largest(size: Size, rule: ImageRule) -> tuple[int, int] | None:
    """Height and width of what the model looks at most closely, if the image is larger both ways."""
    try:
        height, width = max((unit.canvas for unit in units_of(size, rule)), key=lambda canvas: canvas[0] * canvas[1])
    except BadSample:  # its shape is none that the model takes
        return None
    has = size[-2:]
    return (height, width) if has[0] >= height and has[1] >= width and has != (height, width) else None
