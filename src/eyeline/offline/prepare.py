"""`eyeline prepare`: a stage's data packed offline, as two jobs with a barrier between them.

    indexes   each shard of the sources -> its index
    (then one sequential pass over all indexes: the order in which the first epoch needs the samples, since open bins carry over)
    packs     each partition of the samples -> an archive

What comes of it is described, and read, in `data/prepared/folder.py`. Both jobs are in `job/`; the same command resumes them.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eyeline import __version__
from eyeline.core.batch import Budget
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import claimed, make_folder, storage_failed, write_atomically, write_json
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers.tars import BLOCK
from eyeline.data.loader import planned_windows
from eyeline.data.plan import shard_index
from eyeline.data.plan.blend import pool_of
from eyeline.data.plan.index import Index
from eyeline.data.plan.shard_index import INSIDE, WHOLE, Longs, ShardIndex, identity_of, index_path, to_bytes
from eyeline.data.prepared import folder as prepared_folder
from eyeline.data.prepared.folder import MANIFEST, Archive, Manifest, Prepared, open_manifest, open_prepared
from eyeline.data.reader import Reader, digest_of, identity_of_plan, reader_of, sizing_of, training_pools, validation_sources
from eyeline.data.rejects import Reject
from eyeline.data.sets import choice, prepared_sides
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_packs
from eyeline.offline.archives import ARCHIVE, ENTRIES, WriteArchive, packed_entries
from eyeline.offline.attempt import Done, Job, content_digest, is_whole
from eyeline.offline.local_jobs import open_job, output_path, planned_file, run_job
from eyeline.offline.manifests import Manifest as Committed
from eyeline.offline.manifests import manifests, missing_numbers
from eyeline.offline.plan import Draft, Input, Partition, Plan, existing_plan
from eyeline.offline.report import JOBS
from eyeline.offline.run import Where
from eyeline.offline.sample_order import SampleOrder, packs_of_plan, sample_order
from eyeline.offline.store import LocalStore
from eyeline.offline.stored_indexes import Stored, positions_written, stored_source, write_indexes

HERE = Where()  # this process does all
INDEXES = "source-index"  # of the sources, until all is done
INDEX = "index"  # the output of a partition of the first job
PARTITION_BYTES = 512 << 20  # about: large enough to be read from start to end, small enough to be made again
TOKEN_TEXT_BYTES, ROW_BYTES = 5, 2048  # of a row in an archive, without its images; about
PIXELS_BYTE = 4  # of an image whose size in bytes is unknown before it is read; about
CODE = {"eyeline": __version__, "index version": shard_index.VERSION, "prepared version": prepared_folder.VERSION}


def pack_offline(
    reader: Reader,
    budget: Budget,
    folder: Path,
    *,
    packs: int | None = None,
    epochs: int = 1,
    quality: int | None = None,
    where: Where = HERE,
) -> Manifest | None:
    """Write what `reader` plans, and all that it will fetch, into `folder`. What is there of the same job already is kept, or repaired.

    `epochs` of the plan are stored, or, of `mix: interleave`, at most `packs` packs. With a `quality`, images that are larger than
    the model looks at are scaled down and kept as JPEG of that quality. Returns None where other jobs (`where`) have to do their share
    first. Refused when the folder holds something else, or has no room.
    """
    if quality is not None and reader.rule is None:
        raise Refused("--resize scales images down to what the model sees, and this model reads text only. Leave it out")
    make_folder(folder / "shards")
    if where.shards == 1:
        for left in folder.rglob(".*.tmp"):  # of an attempt that was killed
            left.unlink(missing_ok=True)
    reader = _over_indexes(reader, folder / INDEXES)
    indexes = _Indexes.of(reader, folder)
    if existing_plan(LocalStore(folder / JOBS / "packs")) is not None:
        _plan_of_packs(reader, budget, folder, packs, quality, indexes)  # what differs is said before anything is made again
    if _completed(folder, where):
        return open_prepared(str(folder)).manifest
    try:
        if not indexes.make(where):
            return None
    except StorageFailed:
        if _completed(folder, where):  # meanwhile, by another job, which removes the indexes then
            return open_prepared(str(folder)).manifest
        raise
    plan = _plan_of_packs(reader, budget, folder, packs, quality, indexes)
    write = WriteArchive(_sources(reader), planned_file(plan, "rows.npy"), reader.rule, quality)
    archives = _made_archives(plan, folder, write, where)
    if archives is None:
        return None
    with claimed(folder / MANIFEST, wait=True):
        if _completed(folder, where):
            return open_prepared(str(folder)).manifest
        manifest = _finished(reader, budget, plan, archives, folder, write, epochs)
        shutil.rmtree(folder / INDEXES, ignore_errors=True)
    return manifest


def _completed(folder: Path, where: Where) -> bool:
    """Return whether this is one of several jobs, and another has completed the folder. A job of its own looks at every byte again."""
    return where.shards > 1 and (folder / MANIFEST).exists()


def _over_indexes(reader: Reader, folder: Path) -> Reader:
    """The same reader, whose indexes are kept in a folder."""
    training = Index(reader.training.index.sources, reader.encoder, reader.rule, folder)
    own = reader.validation.index is not reader.training.index
    validation = Index(reader.validation.index.sources, reader.encoder, reader.rule, folder) if own else training
    sides = {"training": replace(reader.training, index=training), "validation": replace(reader.validation, index=validation)}
    return replace(reader, **sides, sizings={}, fetches={})


def _sources(reader: Reader) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    return reader.training.index.sources, validation_sources(reader)


# The first job


@dataclass(frozen=True, eq=False)
class WriteIndex:
    """`write_index(partition, folder)`: the work on a shard of the sources. Pickles."""

    sources: tuple[tuple[Rows, ...], tuple[Rows, ...]]
    encoder: Encoder
    rule: ImageRule | None
    cache: Path | None  # data.cache, where training finds it later
    made: Path  # where it may be already

    def __call__(self, partition: Partition, folder: Path) -> Done:
        own, source, shard = partition.work
        sources = self.sources[own]
        index = Index(sources, self.encoder, self.rule, self.made).read(source, shard)
        if index is None:  # without a folder it is made, in memory; in the cache it is read, made or waited for
            index = Index(sources, self.encoder, self.rule, self.cache).shard(source, shard)
        path = folder / INDEX
        try:
            path.write_bytes(to_bytes(index, self.name(partition)))
        except OSError as error:
            raise storage_failed("write", path, error) from error
        causes = [cause for cause, *_ in index.rejects.values()]
        return Done({INDEX: len(index) - len(causes)}, {cause: causes.count(cause) for cause in sorted(set(causes))})

    def name(self, partition: Partition) -> str:
        """The name of the index."""
        own, source, shard = partition.work
        rows = self.sources[own][source]
        return identity_of(rows.shards[shard], rows.layout.identity, rows.root, self.encoder, self.rule)


@dataclass(frozen=True, eq=False)
class _Indexes:
    """The job that makes the index of every shard which the plan needs."""

    plan: Plan
    work: WriteIndex
    folder: Path

    @staticmethod
    def of(reader: Reader, folder: Path) -> "_Indexes":
        cache = Path(reader.data.cache).expanduser() if reader.data.cache else None
        work = WriteIndex(_sources(reader), reader.encoder, reader.rule, cache, folder / INDEXES)
        partitions = _shards(reader, work)
        sources = [{str(rows.path): [rows.layout.identity, digest_of(rows)]} for rows in (*work.sources[0], *work.sources[1])]
        taken = None if reader.rule is None else [reader.rule.frames, reader.rule.video is not None]
        identity = {"sources": sources, "tokenizer": reader.encoder.identity, "images": taken, "shards": len(partitions), "code": CODE}
        return _Indexes(open_job(folder, "indexes", identity, lambda _: Draft(partitions), partitions), work, folder)

    def make(self, where: Where) -> bool:
        """Make those that are not there. Return whether all are: other jobs may not have done theirs yet."""
        _settle(self.plan, INDEX, self._home, missing=True)
        mine = [one.number for one in manifests(self.plan) if where.has(one.number)]
        damaged = {number for number in mine if not self._is_current(self.plan.partition(number))}
        if not run_job(Job("indexes", self.work), self.plan, where, self.folder, damaged):
            return False
        _settle(self.plan, INDEX, self._home)
        return True

    def _home(self, partition: Partition) -> Path:
        return index_path(self.folder / INDEXES, self.work.name(partition))

    def _is_current(self, partition: Partition) -> bool:
        """Return whether the index is there, and the images are as they were."""
        own, source, shard = partition.work
        return Index(self.work.sources[own], self.work.encoder, self.work.rule, self.folder / INDEXES).read(source, shard) is not None


def _shards(reader: Reader, work: WriteIndex) -> list[Partition]:
    """A partition for each shard that the plan needs. Sources of one file have one index."""
    wanted = [(0, *entry) for entry in sorted({entry for pool in training_pools(reader) for entry in pool.entries})]
    if work.sources[1]:
        wanted += [(1, *entry) for entry in sorted(set(pool_of(reader.validation, 1, None, repeated=False).entries))]
    found: dict[str, Partition] = {}
    for own, source, shard in wanted:
        about = work.sources[own][source].shards[shard]
        one = Partition(len(found), (Input(about.name, about.bytes, about.fingerprint),), None, [own, source, shard])
        found.setdefault(work.name(one), one)
    return list(found.values())


# The second job


def _plan_of_packs(reader: Reader, budget: Budget, folder: Path, packs: int | None, quality: int | None, indexes: _Indexes) -> Plan:
    """Which samples go into which archive: stored, or found in one pass over all indexes."""
    identity = {
        **identity_of_plan(reader, budget),
        "settings": choice(reader.data),
        "packs": packs,
        "resize": quality,
        "images": content_digest(manifests(indexes.plan)),
        "code": CODE,
    }

    def draft(here: Path) -> Draft:
        order = sample_order(reader, budget, packs)
        row_R6, bytes_R = _places(reader, order)
        bounds_K1 = _bounds(bytes_R, len(order.rows_R3))
        np.save(here / "rows.npy", row_R6)
        validating = int(np.searchsorted(bounds_K1, len(order.rows_R3)))
        notes = {"windows": order.windows, "packs": order.packs, "validating": validating, "bounds": bounds_K1.tolist()}
        return Draft(_partitions(reader, row_R6, bounds_K1, bytes_R), notes)

    return open_job(folder, "packs", identity, draft)


def _places(reader: Reader, order: SampleOrder) -> tuple[Longs, Longs]:
    """All samples as WriteArchive takes them, and about how many bytes each will have."""
    own = reader.validation.index is not reader.training.index
    own_R1 = np.repeat([0, int(own)], [len(order.rows_R3), len(order.validation_R3)])[:, None]
    row_R4 = np.concatenate([own_R1, np.concatenate([order.rows_R3, order.validation_R3])], 1)
    place_R2, bytes_R = np.zeros((len(row_R4), 2), np.int64), np.zeros(len(row_R4), np.int64)
    shards, where_R = np.unique(row_R4[:, :3], axis=0, return_inverse=True)
    by_shard_R = np.argsort(where_R.ravel(), kind="stable")
    for (own, source, shard), here in zip(shards.tolist(), np.split(by_shard_R, _firsts(where_R.ravel()[by_shard_R])), strict=True):
        index, number_R = (reader.validation if own else reader.training).index.shard(source, shard), row_R4[here, 3]
        place_R2[here] = np.stack([index.start_R[number_R], index.length_R[number_R]], 1)
        bytes_R[here] = _bytes_of(index)[number_R]
    return np.concatenate([row_R4, place_R2], 1), bytes_R


def _firsts(sorted_R: Longs) -> Longs:
    """Where a sorted array has another value than before."""
    return np.flatnonzero(np.diff(sorted_R)) + 1


def _bounds(bytes_R: Longs, rows: int) -> Longs:
    """Partitions of about equal size; none has rows to learn from (the first `rows`) and rows to validate on."""
    end_R = np.cumsum(bytes_R)
    start_R = end_R - bytes_R
    start_R[rows:] -= start_R[rows] if rows < len(start_R) else 0
    part_R = start_R // PARTITION_BYTES
    part_R[rows:] += part_R[rows - 1] + 1
    return np.concatenate([np.flatnonzero(np.diff(part_R, prepend=-1)), [len(bytes_R)]])


def _partitions(reader: Reader, row_R6: Longs, bounds_K1: Longs, bytes_R: Longs) -> Iterator[Partition]:
    sources = _sources(reader)
    for number, (start, end) in enumerate(zip(bounds_K1[:-1].tolist(), bounds_K1[1:].tolist(), strict=True)):
        shards = [sources[own][source].shards[shard] for own, source, shard in np.unique(row_R6[start:end, :3], axis=0).tolist()]
        inputs = dict.fromkeys(Input(about.name, about.bytes, about.fingerprint) for about in shards)
        yield Partition(number, tuple(inputs), end - start, [start, end, int(bytes_R[start:end].sum())])


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


def _made_archives(plan: Plan, folder: Path, write: WriteArchive, where: Where) -> list[Committed] | None:
    """Write every archive that is not there yet. None where other jobs have not done theirs yet."""

    def home(partition: Partition) -> Path:
        return folder / "shards" / f"{partition.number:05d}.tar"

    damaged = set[int]()
    for one in _settle(plan, ARCHIVE, home, missing=True):
        if where.has(one.number) and not all(
            is_whole(home(plan.partition(one.number)) if output.name == ARCHIVE else output_path(plan, one, output.name), output)
            for output in one.outputs
        ):
            damaged.add(one.number)
    needed = sum(plan.partition(number).work[2] for number in (*damaged, *missing_numbers(plan)))
    _refuse_small_disk(folder, needed)
    if not run_job(Job("packs", write), plan, where, folder, damaged):
        return None
    return _settle(plan, ARCHIVE, home)


def _refuse_small_disk(folder: Path, needed: int) -> None:
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if needed > free:
        raise Refused(f"{folder} has room for {free:,} bytes, and about {needed:,} are needed. Choose a folder with more room")


# What both jobs do


def _settle(plan: Plan, name: str, home: Callable[[Partition], Path], missing: bool = False) -> list[Committed]:
    """Move the outputs of this name to where readers look for them, and return all manifests. Another process may do the same.

    StorageFailed where one is missing, unless that is allowed.
    """
    found = list(manifests(plan))
    for one in found:
        path, there = home(plan.partition(one.number)), output_path(plan, one, name)
        if there.exists():
            make_folder(path.parent)
            with suppress(FileNotFoundError):  # it has been moved meanwhile
                os.replace(there, path)
        elif not missing and not path.exists():
            raise StorageFailed(f"{path} has vanished. Run `eyeline prepare` again, without --shard: it repairs what is damaged")
    return found


# When both are done


def _finished(
    reader: Reader, budget: Budget, plan: Plan, archives: Sequence[Committed], folder: Path, write: WriteArchive, epochs: int
) -> Manifest:
    """Write the indexes, the rejects and the manifest of the prepared folder."""
    about = [next(output for output in one.outputs if output.name == ARCHIVE) for one in archives]
    notes, bytes_K = plan.head.notes, np.array([one.bytes for one in about], np.int64)
    stored = Stored(write, np.load(write.rows), np.array(notes["bounds"], np.int64), bytes_K, folder)
    entries = [packed_entries(output_path(plan, one, ENTRIES).read_bytes()) for one in archives]
    write_indexes(reader, stored, positions_written(stored, entries))
    draft = Manifest(
        data=choice(reader.data),
        identity={},
        tokens=budget.tokens,
        patches=budget.patches,
        quality=write.quality,
        sources=tuple(stored_source(rows, stored, reader, f"training-{n}") for n, rows in enumerate(write.sources[0])),
        validation=tuple(stored_source(rows, stored, reader, f"validation-{n}") for n, rows in enumerate(write.sources[1])),
        archives=tuple(
            Archive(name=f"{n:05d}.tar", bytes=one.bytes, sha256=one.sha256, rows=one.rows, validates=n >= notes["validating"])
            for n, one in enumerate(about)
        ),
        windows=(),
    )
    manifest = complete_manifest(reader, open_manifest(folder, draft, reader.data.read_retries), folder, epochs, notes["packs"])
    both = min(len(manifest.windows), len(notes["windows"]))
    if write.quality is None and list(manifest.windows[:both]) != notes["windows"][:both]:
        raise AssertionError(f"{folder}: the prepared data have another plan than their source")
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


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
