"""Offline packing: the same plan, stored. What comes of it is described, and read, in `packed.py`.

    packing_order       the rows in the order in which the first epoch's packs need them, cut into partitions
    write_partition     one partition -> one archive: a pure function of the job and a number, committed by a rename
    write_indexes       what is stored where -> an index of each shard
    complete_manifest   digests of the plan over these indexes, and its rejects

A run that was interrupted starts again and finds what is done.
"""

import hashlib
import io
import json
import os
import tarfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from eyeline.core.batch import Budget, EncodedImage, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.files import make_folder, read_json, sha256_of, storage_failed, sync_folder, write_atomically, write_json
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers.container import Place, persistent
from eyeline.data.containers.tars import BLOCK, UNUSABLE
from eyeline.data.images.decode import Size, size_of, upright
from eyeline.data.images.image_files import frames_of, image_key, in_memory
from eyeline.data.images.patches import units_of
from eyeline.data.index_progress import index_all
from eyeline.data.loader import PlannedWindow, planned_windows
from eyeline.data.plan.blend import Side
from eyeline.data.plan.plan import Pack, RowOf
from eyeline.data.plan.shard_index import INSIDE, WHOLE, Longs, ShardIndex, identity_of, index_path, to_bytes
from eyeline.data.prepared.packed import (
    MANIFEST,
    VERSION,
    Archive,
    Manifest,
    Prepared,
    StoredShard,
    StoredSource,
    open_manifest,
    packed_row,
)
from eyeline.data.reader import Reader, identity_of_plan, reader_of, sizing_of
from eyeline.data.rejects import Reject, Rejects
from eyeline.data.sets import choice, prepared_sides
from eyeline.data.sources.sources import Rows
from eyeline.data.validation import validation_packs

PARTITION_BYTES = 512 << 20  # about: large enough to be read from begin to end, small enough to be made again
TOKEN_TEXT_BYTES, ROW_BYTES = 5, 2048  # of a row in an archive, beside its images; about
PIXELS_BYTE = 4  # of an image whose size in bytes nobody knows before it is read; about
EXTENSIONS = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"GI": "gif", b"BM": "bmp"}  # how the accepted formats begin


@dataclass(frozen=True, eq=False)
class PackingJob:
    """All that the work on a partition depends on. Pickles."""

    sources: tuple[tuple[Rows, ...], tuple[Rows, ...]]  # those of training, and validation sources of their own
    row_R6: Longs  # in the order in which they are written: 1 for validation sources of their own, else 0; source; a Place there
    bounds_K1: Longs  # of the partitions
    bytes_K: Longs  # about
    judging: int  # the first partition of rows that are validated on
    folder: Path
    rule: ImageRule | None
    quality: int | None
    digest: str  # of all that

    def __len__(self) -> int:
        return len(self.bytes_K)

    def archive(self, number: int) -> Path:
        return self.folder / "shards" / f"{number:05d}.tar"

    def entries(self, number: int) -> Path:
        return self.folder / "entries" / f"{number:05d}.json"


class Entries(NamedTuple):
    """The contents of one archive."""

    job: str  # digest of the job that it belongs to
    bytes: int
    sha256: str
    rows: list[list[int]]  # begin, length, images of each, in order
    images: list[list[Any]]  # of these: hash of what it shows, begin, length, and height and width where it was scaled down

    @property
    def packed(self) -> "PackedEntries":
        """The entries as arrays, a tenth of the size."""
        keys_N = np.array([image[0] for image in self.images], "S32")
        lies_N4 = np.array([image[1:] for image in self.images], np.int64).reshape(-1, 4)
        return PackedEntries(self.bytes, self.sha256, np.array(self.rows, np.int64).reshape(-1, 3), keys_N, lies_N4)


class PackedEntries(NamedTuple):
    bytes: int
    sha256: str
    row_R3: Longs
    keys_N: NDArray[np.bytes_]
    lies_N4: Longs


def pack_offline(
    reader: Reader,
    budget: Budget,
    folder: Path,
    *,
    packs: int | None = None,
    epochs: int = 1,
    quality: int | None = None,
) -> Manifest:
    """Write what `reader` plans, and all that it will fetch, into `folder`. What is there of the same job already is kept.

    `epochs` of the plan are stored, or, of `mix: interleave`, at most `packs` packs. With a `quality`, images that are larger than
    the model looks at are scaled down and kept as JPEG of that quality. Refused when the folder holds something else, or has no room.
    """
    if quality is not None and reader.rule is None:
        raise Refused("--resize scales images down to what the model sees, and this model reads text only. Leave it out")
    make_folder(folder / "shards")
    make_folder(folder / "entries")
    for left in folder.rglob(".*.tmp"):  # by somebody who was killed
        left.unlink()
    order = packing_order(reader, budget, packs)
    job = job_of(reader, budget, folder, order, quality)
    known = [_existing_entries(job, number) for number in range(len(job))]
    _refuse_small_disk(job, [number for number, one in enumerate(known) if one is None])
    entries: list[PackedEntries] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing", total=int(job.bytes_K.sum()))
        for number, one in enumerate(known):
            if one is None or not _whole(job.archive(number), one):
                made = write_partition(job, number)
                write_atomically(job.entries(number), json.dumps(made._asdict()))
                one = made.packed
            entries.append(one)
            bar.advance(task, int(job.bytes_K[number]))
    write_indexes(reader, job, positions_written(job, entries))
    draft = Manifest(
        data=choice(reader.data),
        identity={},
        tokens=budget.tokens,
        patches=budget.patches,
        quality=quality,
        sources=tuple(_stored_source(rows, job, reader) for rows in job.sources[0]),
        validation=tuple(_stored_source(rows, job, reader) for rows in job.sources[1]),
        archives=tuple(
            Archive(name=job.archive(n).name, bytes=one.bytes, sha256=one.sha256, rows=len(one.row_R3), judges=n >= job.judging)
            for n, one in enumerate(entries)
        ),
        windows=(),
    )
    manifest = complete_manifest(reader, open_manifest(folder, draft, reader.data.read_retries), folder, epochs, order.packs)
    both = min(len(manifest.windows), len(order.windows))
    if quality is None and list(manifest.windows[:both]) != order.windows[:both]:
        raise AssertionError(f"{folder}: the prepared data have another plan than their source")
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


# Order


class SampleOrder(NamedTuple):
    """The rows in the order in which they are first needed: source, shard, number of each."""

    rows_R3: Longs
    judged_R3: Longs
    windows: list[str]  # digests of those that were planned for it
    packs: int


def packing_order(reader: Reader, budget: Budget, packs: int | None) -> SampleOrder:
    """Every row to learn from as it is first needed, and every row to validate on.

    Of `mix: interleave` that is the order of the first `packs` packs, or fewer if all rows have come. Rows that never come, as they
    are too long, are last: planning may look at them. TooManyRejects as in training.
    """
    index_all(reader)
    rejects = Rejects(None, reader.data.max_reject_rate)
    sizing, once = sizing_of(reader, budget), reader.data.mix == "concat"
    usable = sum(int(sizing(s, h).usable_R[number_R].sum()) for s, h, number_R in _sound(reader.training))
    rows = _Rows()
    windows: list[str] = []
    count = 0
    for window, pack in packs_of_plan(planned_windows(reader, sizing, 1 if once else None), packs):
        if window.number == len(windows):
            windows.append(window.plan.digest)
        met = window.plan.rest if pack is None else pack.met
        rejects.seen += met.first
        for reject in met.rejects:
            rejects.add(reject)
        if pack is not None:
            count += 1
            rows.add(row for group in pack.groups for row in group.rows)
        if not once and len(rows) == usable:
            break
    if not len(rows):
        raise Refused(f"no sample can be used: all {rejects.seen} were rejected. `eyeline check` says why")
    rejects.check(once, lambda: sum(int(reader.training.kept_rows(s, h).sum()) for s, h, _ in _sound(reader.training)))
    rows.add((s, h, number) for s, h, number_R in _sound(reader.training) for number in number_R.tolist())
    judged = _Rows()
    if reader.validates:
        packed = validation_packs(reader, sizing_of(reader, budget, validation=True), [])
        judged.add(row for pack in packed for group in pack for row in group.rows)
        judged.add((s, h, number) for s, h, number_R in _sound(reader.validation) for number in number_R.tolist())
    return SampleOrder(rows.in_order, judged.in_order, windows, count)


class _Rows:
    """Rows, each once, in the order in which they came: 25 bytes per row."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._seen: dict[tuple[int, int], bytearray] = {}

    def __len__(self) -> int:
        return len(self._numbers) // 3

    @property
    def in_order(self) -> Longs:
        return np.array(self._numbers, np.int64).reshape(-1, 3)

    def add(self, rows: Iterable[RowOf]) -> None:
        for source, shard, number in rows:
            seen = self._seen.setdefault((source, shard), bytearray())
            if number >= len(seen):
                seen.extend(bytes(number + 1 - len(seen)))
            if not seen[number]:
                seen[number] = 1
                self._numbers.extend((source, shard, number))


def packs_of_plan(windows: Iterator[PlannedWindow], most: int | None) -> Iterator[tuple[PlannedWindow, Pack | None]]:
    """Each pack with its window, up to so many; None stands for the rows behind a window's last pack."""
    count = 0
    for window in windows:
        for pack in window.packs:
            yield window, pack
            count += 1
            if count == most:
                return
        yield window, None


def _sound(side: Side) -> Iterator[tuple[int, int, Longs]]:
    """Source, shard, and numbers of the rows of a side there, without those that nobody could use."""
    for source in range(len(side.index.sources)):
        for shard in range(side.shards(source)):
            yield source, shard, np.flatnonzero(side.kept_rows(source, shard) & ~side.index.shard(source, shard).bad_R)


def job_of(reader: Reader, budget: Budget, folder: Path, order: SampleOrder, quality: int | None) -> PackingJob:
    """Cut into partitions of about equal size; none has rows to learn from and rows to validate on."""
    own = reader.validation.index is not reader.training.index
    sources = (reader.training.index.sources, reader.validation.index.sources if own else ())
    rows, judged = len(order.rows_R3), len(order.judged_R3)
    own_R1 = np.repeat([0, int(own)], [rows, judged])[:, None]
    row_R4 = np.concatenate([own_R1, np.concatenate([order.rows_R3, order.judged_R3])], 1)
    place_R2, bytes_R = np.zeros((len(row_R4), 2), np.int64), np.zeros(len(row_R4), np.int64)
    hashed = hashlib.sha256()
    shards, where_R = np.unique(row_R4[:, :3], axis=0, return_inverse=True)
    for n, (own, source, shard) in enumerate(shards.tolist()):
        here = np.flatnonzero(where_R.ravel() == n)
        index, number_R = (reader.validation if own else reader.training).index.shard(source, shard), row_R4[here, 3]
        place_R2[here] = np.stack([index.start_R[number_R], index.length_R[number_R]], 1)
        bytes_R[here] = _bytes_of(index)[number_R]
        hashed.update(index.stamps_F2.tobytes())  # images that have changed are others
    end_R = np.cumsum(bytes_R)
    start_R = end_R - bytes_R
    start_R[rows:] -= start_R[rows] if judged else 0
    part_R = start_R // PARTITION_BYTES
    part_R[rows:] += part_R[rows - 1] + 1
    bounds_K1 = np.concatenate([np.flatnonzero(np.diff(part_R, prepend=-1)), [len(row_R4)]])
    bytes_K = np.add.reduceat(bytes_R, bounds_K1[:-1])
    row_R6 = np.concatenate([row_R4, place_R2], 1)
    hashed.update(repr((VERSION, quality, identity_of_plan(reader, budget), choice(reader.data))).encode("utf-8", "surrogatepass"))
    hashed.update(row_R6.astype("<i8").tobytes() + bounds_K1.astype("<i8").tobytes())
    judging = int(np.searchsorted(bounds_K1, rows))
    return PackingJob(sources, row_R6, bounds_K1, bytes_K, judging, folder, reader.rule, quality, hashed.hexdigest())


def _bytes_of(index: ShardIndex) -> Longs:
    """The approximate bytes of each row in an archive."""
    pixels_M = index.sizes_M3[:, 1].astype(np.int64) * index.sizes_M3[:, 2]
    size_N = np.repeat(pixels_M // PIXELS_BYTE, np.diff(index.frames_M1))
    file_N, length_N = index.file_N, index.length_N
    whole_N = (file_N >= 0) & (length_N == WHOLE)
    size_N[whole_N] = index.stamps_F2[file_N[whole_N], 0]
    part_N = (file_N != INSIDE) & ~whole_N
    size_N[part_N] = length_N[part_N]
    size_R = np.diff(np.concatenate([[0], np.cumsum(size_N + 2 * BLOCK)])[index.frames_M1][index.media_R1])
    return size_R + TOKEN_TEXT_BYTES * np.diff(index.bounds_R1) + ROW_BYTES


# One partition


def write_partition(job: PackingJob, number: int) -> Entries:
    """Write one archive. The same bytes whoever does it, where, and how often; it appears whole."""
    path = job.archive(number)
    beside = path.with_name(f".{path.name}.tmp")
    hashed, rows, images, at = hashlib.sha256(), [], [], 0
    start, end = job.bounds_K1[number : number + 2].tolist()
    try:
        with open(beside, "wb") as file:
            for n, (own, source, shard, row, *where) in enumerate(job.row_R6[start:end].tolist()):
                written = _archive_members(job, job.sources[own][source], Place(shard, row, *where), f"{number:05d}-{n:07d}")
                rows.append([at, sum(map(len, written.members)), len(written.images)])
                for one in written.members:
                    file.write(one)
                    hashed.update(one)
                images += [[key, at + inside, length, *size] for key, inside, length, *size in written.images]
                at += rows[-1][1]
            file.write(bytes(2 * BLOCK))
            hashed.update(bytes(2 * BLOCK))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise storage_failed("write", path, error) from error
    return Entries(job.digest, at + 2 * BLOCK, hashed.hexdigest(), rows, images)


class _Written(NamedTuple):
    members: list[bytes]  # as they follow one another, each padded
    images: list[list[Any]]  # as in Entries, counted from the first member


def _archive_members(job: PackingJob, rows: Rows, place: Place, key: str) -> _Written:
    """One sample as members of an archive: its JSON, then its images in order."""
    try:
        sample = rows.read(place)
        files = [found for medium in sample.media for found in _encoded_images(job, medium, rows.retries)]
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
    return _Written(members, images)


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _encoded_images(job: PackingJob, medium: EncodedImage | Video, retries: int) -> Iterator[tuple[str, bytes, tuple[int, int]]]:
    """(a hash that is equal for equal images, the encoded file, and its height and width if it was scaled down) of each image."""
    size = None if job.quality is None or job.rule is None else _largest(size_of(medium), job.rule)
    for image in frames_of(medium):
        name = image_key(image) + (f" {size}" if size else "")
        found = persistent(partial(_bytes, image), retries)
        smaller = None if size is None else _scaled_down(replace(image, source=found), size, job)
        hashed = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        yield (hashed, found, (0, 0)) if size is None or smaller is None else (hashed, smaller, size)


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


def _scaled_down(image: EncodedImage, size: tuple[int, int], job: PackingJob) -> bytes | None:
    """The image as JPEG of this height and width; None where it cannot be decoded: training finds that out as it would of the source."""
    assert job.quality is not None and job.rule is not None
    try:
        rgb = upright(image)
    except BadSample:
        return None
    out = io.BytesIO()
    rgb.resize((size[1], size[0]), Pillow.Resampling[job.rule.resample.upper()]).save(out, "JPEG", quality=job.quality)
    return out.getvalue()


# Done before, and room


def _existing_entries(job: PackingJob, number: int) -> PackedEntries | None:
    """The entries of a partition that exists already. Refused if they belong to another job."""
    path = job.entries(number)
    try:
        known = Entries(**read_json(path))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    except OSError as error:
        raise storage_failed("read", path, error) from error
    if known.job != job.digest:
        raise Refused(f"{job.folder} holds data prepared from other sources, settings or images. Choose another folder, or delete this one")
    return known.packed


def _whole(archive: Path, known: PackedEntries) -> bool:
    return archive.is_file() and archive.stat().st_size == known.bytes and sha256_of(archive) == known.sha256


def _refuse_small_disk(job: PackingJob, missing: Sequence[int]) -> None:
    needed, about = int(job.bytes_K[missing].sum()), os.statvfs(job.folder)
    free = about.f_bavail * about.f_frsize
    if needed > free:
        raise Refused(f"{job.folder} has room for {free:,} bytes, and about {needed:,} are needed. Choose a folder with more room")


# What lies where


@dataclass(frozen=True, eq=False)
class Written:
    """The positions of everything that was written. Dims: R rows as in the job  N their images, in order"""

    start_R: Longs  # through all archives, one behind the other
    length_R: Longs
    first_R: Longs  # of its images
    archive_N: Longs
    lies_N4: Longs  # begin and length in the archive; height and width where it was scaled down


def positions_written(job: PackingJob, entries: Sequence[PackedEntries]) -> Written:
    """An image that several samples show lies in the archives with each of them, and all are given the first: equal images have
    equal places, as they have in the source."""
    archive_R = np.repeat(np.arange(len(job)), np.diff(job.bounds_K1))
    row_R3 = np.concatenate([one.row_R3 for one in entries])
    start_R = row_R3[:, 0] + np.cumsum([0, *(one.bytes for one in entries)])[archive_R]
    archive_N = np.repeat(archive_R, row_R3[:, 2])
    _, first, same_N = np.unique(np.concatenate([one.keys_N for one in entries]), return_index=True, return_inverse=True)
    from_N, lies_N4 = first[same_N.ravel()], np.concatenate([one.lies_N4 for one in entries])
    return Written(start_R, row_R3[:, 1], np.cumsum(row_R3[:, 2]) - row_R3[:, 2], archive_N[from_N], lies_N4[from_N])


def write_indexes(reader: Reader, job: PackingJob, found: Written) -> None:
    """Write the index of every shard that was looked at, with places in the archives. Sources of one file have one index."""
    order_R = np.lexsort(job.row_R6[:, 2::-1].T)
    addresses, starts = np.unique(job.row_R6[order_R, :3], axis=0, return_index=True)
    written = dict(zip(map(tuple, addresses.tolist()), np.split(order_R, starts[1:]), strict=True))
    shards: dict[str, list[tuple[int, int, int]]] = {}
    for own, (sources, side) in enumerate(zip(job.sources, (reader.training, reader.validation), strict=True)):
        for source, rows in enumerate(sources):
            for shard in range(side.shards(source)):
                shards.setdefault(_stored_shard(rows, shard, job, reader).index, []).append((own, source, shard))
    for name, same in shards.items():
        at_R = np.concatenate([written.get(address, np.empty(0, np.int64)) for address in same])
        own, source, shard = same[0]
        moved = _moved_index((reader.validation if own else reader.training).index.shard(source, shard), np.sort(at_R)[::-1], job, found)
        path = index_path(job.folder / "index", name)
        make_folder(path.parent)
        write_atomically(path, to_bytes(moved, name))


def _moved_index(index: ShardIndex, at_R: Longs, job: PackingJob, found: Written) -> ShardIndex:
    """The index with the rows `at_R` of the job where they were written: the first of the same, which is the last here. The others lie
    nowhere."""
    number_R = job.row_R6[at_R, 3]
    start_R, length_R = np.full((2, len(index)), UNUSABLE, np.int64)
    start_R[number_R], length_R[number_R] = found.start_R[at_R], found.length_R[at_R]
    first_R, end_R = index.frames_M1[index.media_R1[number_R]], index.frames_M1[index.media_R1[number_R + 1]]
    counts_R = end_R - first_R
    within = np.arange(int(counts_R.sum())) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
    here_N, there_N = np.repeat(first_R, counts_R) + within, np.repeat(found.first_R[at_R], counts_R) + within
    file_N, lies_N4 = np.full_like(index.file_N, INSIDE), np.zeros((len(index.file_N), 4), np.int64)
    file_N[here_N], lies_N4[here_N] = found.archive_N[there_N], found.lies_N4[there_N]
    sizes_M3, scaled_M2 = index.sizes_M3.copy(), lies_N4[index.frames_M1[:-1], 2:]
    sizes_M3[scaled_M2[:, 0] > 0, 1:] = scaled_M2[scaled_M2[:, 0] > 0]
    return replace(
        index,
        start_R=start_R,
        length_R=length_R,
        sizes_M3=sizes_M3,
        file_N=file_N,
        start_N=lies_N4[:, 0].copy(),
        length_N=lies_N4[:, 1].copy(),
        files=(),
        stamps_F2=np.empty((0, 2), np.int64),
    )


def _stored_source(rows: Rows, job: PackingJob, reader: Reader) -> StoredSource:
    shards = tuple(_stored_shard(rows, shard, job, reader) for shard in range(len(rows.shards)))
    return StoredSource(path=str(rows.path), root=str(rows.root), layout=rows.layout.identity, why=rows.layout.why, shards=shards)


def _stored_shard(rows: Rows, shard: int, job: PackingJob, reader: Reader) -> StoredShard:
    about = rows.shards[shard]
    if job.quality is not None:  # other images, and so other data
        about = replace(about, fingerprint=f"{about.fingerprint} JPEG {job.quality} {job.rule}")
    first, file, row = rows.origin_of(Place(shard, 0, 0, 0))
    id, _, number = first.rpartition("#")
    name = identity_of(about, rows.layout.identity, rows.root, reader.encoder, reader.rule)
    return StoredShard(**asdict(about), file=file, id=id, first_id=int(number), first_row=row, index=name)


# The plan


def complete_manifest(reader: Reader, draft: Prepared, folder: Path, epochs: int, packs: int) -> Manifest:
    """Plan over what was prepared, write the rejects, and complete the manifest with each window's digest. Of `mix: interleave` `packs`
    packs are planned."""
    data = reader.data

    def over(prepared: Prepared) -> Reader:
        found = prepared_sides(data, prepared)
        return reader_of(data, reader.encoder, reader.rule, reader.seed, longest=reader.longest, found=found)

    manifest = draft.manifest.model_copy(update={"identity": identity_of_plan(over(draft), draft.budget)})
    planner = over(replace(draft, manifest=manifest))
    sizing = sizing_of(planner, draft.budget)
    windows: list[str] = []
    rejects: dict[Reject, None] = {}
    once = data.mix == "concat"
    for window, pack in packs_of_plan(planned_windows(planner, sizing, epochs if once else None), None if once else packs):
        if window.number == len(windows):
            windows.append(window.plan.digest)
        met = window.plan.rest if pack is None else pack.met
        rejects |= dict.fromkeys((*met.rejects, *met.again))
    if planner.validates:
        bad: list[Reject] = []
        for _ in validation_packs(planner, sizing_of(planner, draft.budget, validation=True), bad):
            pass
        rejects |= dict.fromkeys(bad)
    write_atomically(folder / "rejects.jsonl", "".join(json.dumps(vars(reject)) + "\n" for reject in rejects))
    return manifest.model_copy(update={"windows": tuple(windows)})
