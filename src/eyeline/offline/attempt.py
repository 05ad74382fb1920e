"""One attempt at a partition: work, write, commit. What a worker does, wherever it runs."""

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import sha256_of
from eyeline.offline.manifests import Manifest, Output, commit, files_of, manifest_of
from eyeline.offline.plan import NAMED, Partition
from eyeline.offline.store import Store, put_all


class Done(NamedTuple):
    """What became of the rows of a partition: each is in one output, or is counted once."""

    rows: dict[str, int]  # name of each file -> rows of the input in it
    counts: dict[str, int]  # cause -> rows that are in none


@dataclass(frozen=True)
class Job:
    """A function of a partition, which writes files into an empty folder: the same bytes in every call, if it is `repeatable`. Pickles."""

    name: str
    work: Callable[[Partition, Path], Done]
    repeatable: bool = True  # else what another attempt committed may differ, and cannot be made again
    accelerated: bool = False  # it computes on a GPU where there is one


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    how: Literal["committed", "lost", "repaired"]
    manifest: Manifest  # the one that stands
    seconds: float


def attempt(job: Job, store: Store, plan: str, partition: Partition, repair: bool = False) -> Outcome:
    """Do a partition and commit it, unless another attempt has. To `repair` one is to put files of the same content in the place of
    those that it lost.

    Refused when the partition is committed with other content: something that the job depends on has changed.
    """
    assert job.repeatable or not repair, f"{job.name} cannot be repaired"
    start = time.monotonic()
    name = uuid.uuid4().hex[:12]
    folder = files_of(partition.number, name)
    try:
        with store.scratch(folder) as here:
            done = job.work(partition, here)
            outputs = tuple(_output(path, done.rows.get(path.name, 0)) for path in sorted(here.iterdir()))
            put_all(store, here, folder)
    except Exception:  # nothing refers to the files yet
        with suppress(StorageFailed):
            drop(store, folder)
        raise
    _require_every_row(job, partition, done, outputs)
    seconds = time.monotonic() - start
    worker = f"{socket.gethostname()} {os.getpid()}"
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    ours = Manifest(plan, partition.number, name, partition.inputs, outputs, done.counts, round(seconds, 3), worker, ended)
    standing = manifest_of(store, plan, partition.number) if repair else None
    standing = standing or commit(store, ours)
    if standing.attempt == name:
        return Outcome("committed", ours, seconds)
    if job.repeatable and (standing.outputs, standing.counts) != (outputs, done.counts):
        drop(store, folder)
        names = ", ".join(one.name for one in partition.inputs[:NAMED])
        raise Refused(
            f"partition {partition.number} of {job.name} was prepared from other inputs: {names}, or what they refer to, has changed "
            f"since. {_different(standing, ours)}. Restore it, or use another folder"
        )
    if repair:
        for one in outputs:
            store.move(ours.key(one.name), standing.key(one.name))
        return Outcome("repaired", standing, seconds)
    drop(store, folder)  # the other's manifest exists and ours can no longer be created, so no reader will want them
    return Outcome("lost", standing, seconds)


def drop(store: Store, folder: str) -> None:
    """Delete the files of an attempt."""
    for key, _ in store.sizes(folder):
        store.remove(key)


def _output(path: Path, rows: int) -> Output:
    return Output(path.name, path.stat().st_size, sha256_of(path), rows)


def _require_every_row(job: Job, partition: Partition, done: Done, outputs: tuple[Output, ...]) -> None:
    assert done.rows.keys() <= {one.name for one in outputs}, f"{job.name} counts rows of files that it has not written"
    counted = sum(done.rows.values()) + sum(done.counts.values())
    assert partition.rows in (None, counted), f"{job.name}: partition {partition.number} has {partition.rows} rows, and {counted} came out"


def _different(standing: Manifest, ours: Manifest) -> str:
    before, now = ({one.name: one for one in manifest.outputs} for manifest in (standing, ours))
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    return f"Now {', '.join(names) or 'the counts'} would be different"


def is_whole(path: Path, output: Output) -> bool:
    """Return whether a file here has the content of an output."""
    try:
        return path.stat().st_size == output.bytes and sha256_of(path) == output.sha256
    except FileNotFoundError:
        return False


def content_digest(manifests: Iterable[Manifest]) -> str:
    """A digest of what the outputs hold, independent of the writer."""
    digest = hashlib.sha256(b"[")
    for n, one in enumerate(manifests):
        digest.update((", " * bool(n) + repr((one.number, one.outputs))).encode())
    digest.update(b"]")
    return digest.hexdigest()
