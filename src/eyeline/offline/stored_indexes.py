"""What was stored where -> the indexes of prepared data, and what their manifest says of sources."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from eyeline.core.files import make_folder, write_atomically
from eyeline.data.containers.container import Place
from eyeline.data.containers.tars import UNUSABLE
from eyeline.data.plan.shard_index import INSIDE, Longs, ShardIndex, identity_of, index_path, to_bytes
from eyeline.data.prepared.folder import StoredShard, StoredSource, StoredWhere
from eyeline.data.reader import Reader
from eyeline.data.signals.chosen import Chosen, bits_of
from eyeline.data.sources.sources import Rows
from eyeline.offline.archives import PackedEntries, WriteArchive


@dataclass(frozen=True, eq=False)
class Stored:
    """All samples in the order in which they are stored, and the archives that hold them."""

    write: WriteArchive
    row_R6: Longs  # as in WriteArchive
    bounds_K1: Longs  # of the archives
    bytes_K: Longs
    folder: Path


@dataclass(frozen=True, eq=False)
class Written:
    """The positions of everything that was written. Dims: R rows as they are stored  N their images, in order"""

    start_R: Longs  # through all archives, one behind the other
    length_R: Longs
    first_R: Longs  # of its images
    archive_N: Longs
    lies_N4: Longs  # start and length in the archive; height and width where it was scaled down


def positions_written(job: Stored, entries: Sequence[PackedEntries]) -> Written:
    """An image that several samples show is in the archives with each of them, and all use the first: equal images have
    equal places, as they have in the source."""
    archive_R = np.repeat(np.arange(len(job.bytes_K)), np.diff(job.bounds_K1))
    row_R3 = np.concatenate([one.row_R3 for one in entries])
    start_R = row_R3[:, 0] + (np.cumsum(job.bytes_K) - job.bytes_K)[archive_R]
    archive_N = np.repeat(archive_R, row_R3[:, 2])
    _, first, same_N = np.unique(np.concatenate([one.keys_N for one in entries]), return_index=True, return_inverse=True)
    from_N, lies_N4 = first[same_N.ravel()], np.concatenate([one.lies_N4 for one in entries])
    return Written(start_R, row_R3[:, 1], np.cumsum(row_R3[:, 2]) - row_R3[:, 2], archive_N[from_N], lies_N4[from_N])


def write_indexes(reader: Reader, job: Stored, found: Written) -> None:
    """Write the index of every shard that was looked at, with places in the archives. Sources of one file have one index."""
    order_R = np.lexsort(job.row_R6[:, 2::-1].T)
    addresses, starts = np.unique(job.row_R6[order_R, :3], axis=0, return_index=True)
    written = dict(zip(map(tuple, addresses.tolist()), np.split(order_R, starts[1:]), strict=True))
    shards: dict[str, list[tuple[int, int, int]]] = {}
    for own, (sources, side) in enumerate(zip(job.write.sources, (reader.training, reader.validation), strict=True)):
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


def _moved_index(index: ShardIndex, at_R: Longs, job: Stored, found: Written) -> ShardIndex:
    """The index with the rows `at_R` of the job where they were written: the first of the same, which is the last here. The others are
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


def stored_source(rows: Rows, job: Stored, reader: Reader, name: str) -> StoredSource:
    """What the manifest says of a source. The rows that `where` leaves are written into a file of this name."""
    shards = tuple(_stored_shard(rows, shard, job, reader) for shard in range(len(rows.shards)))
    where = None if rows.chosen is None else _stored_where(rows.chosen, len(shards), job.folder, f"where/{name}.bits")
    root, layout = str(rows.root), rows.layout
    return StoredSource(path=str(rows.path), root=root, layout=layout.identity, why=layout.why, shards=shards, where=where)


def _stored_where(chosen: Chosen, shards: int, folder: Path, name: str) -> StoredWhere:
    data, where = bits_of(chosen, shards)
    make_folder((folder / name).parent)
    write_atomically(folder / name, data)
    starts, rows = tuple(one.start for one in where), tuple(one.rows for one in where)
    return StoredWhere(text=chosen.text, digest=chosen.digest, file=name, bytes=len(data), starts=starts, rows=rows)


def _stored_shard(rows: Rows, shard: int, job: Stored, reader: Reader) -> StoredShard:
    about = rows.shards[shard]
    if job.write.quality is not None:  # other images, and so other data
        about = replace(about, fingerprint=f"{about.fingerprint} JPEG {job.write.quality} {job.write.rule}")
    first, file, row = rows.origin_of(Place(shard, 0, 0, 0))
    id, _, number = first.rpartition("#")
    name = identity_of(about, rows.layout.identity, rows.root, reader.encoder, reader.rule)
    return StoredShard(**asdict(about), file=file, id=id, first_id=int(number), first_row=row, index=name)
