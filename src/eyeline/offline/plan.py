"""The plan of a job: its partitions, created once and never changed.

    plan.json               the head: what the plan depends on, and digests of the rest; its creation commits the plan
    plan/GROUP-DIGEST.json  the partitions of one group
    plan/files-…/           what the partitions share

Partitions are counted in groups of GROUP, so that no list is ever as long as the job.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import sha256_of
from eyeline.data.prepared.folder import differences
from eyeline.offline.store import Store, put_all

VERSION = 1
HEAD = "plan.json"
GROUP = 1000  # partitions
NAMED = 3  # inputs in a message


class Input(NamedTuple):
    """Something that a partition reads."""

    name: str
    bytes: int
    digest: str  # of its content; an e-tag where that is all there is


@dataclass(frozen=True)
class Partition:
    """A piece of a job's work."""

    number: int
    inputs: tuple[Input, ...]
    rows: int | None  # that come in; None: unknown before they are read
    work: Any = None  # what the job's function needs besides, as plain JSON


@dataclass(frozen=True)
class Draft:
    """What a plan is made of."""

    partitions: Iterable[Partition]  # numbered from 0
    notes: dict[str, Any] = field(default_factory=dict)  # what the job must know of itself later


@dataclass(frozen=True)
class Head:
    """The contents of plan.json."""

    version: int
    job: str
    identity: dict[str, Any]  # all that the plan depends on: inputs, settings, code, model
    count: int
    rows: int  # of partitions whose rows are known
    pieces: list[str]  # SHA-256 of each group
    files: dict[str, str]  # name -> SHA-256
    folder: str  # of the files
    notes: dict[str, Any]


@dataclass(eq=False)
class Plan:
    """A plan that exists. `digest` stands for all of it."""

    store: Store
    head: Head
    digest: str
    _open: tuple[int, list[Partition]] | None = None

    def __len__(self) -> int:
        return self.head.count

    @property
    def groups(self) -> range:
        return range(len(self.head.pieces))

    def numbers(self, group: int) -> range:
        return range(group * GROUP, min((group + 1) * GROUP, self.head.count))

    def partitions(self, group: int) -> list[Partition]:
        """The partitions of a group; those that were asked for last are remembered."""
        if self._open is None or self._open[0] != group:
            key = _piece_key(group, self.head.pieces[group])
            data = self.store.read(key)
            if data is None or hashlib.sha256(data).hexdigest() != self.head.pieces[group]:
                raise StorageFailed(f"{key} of the plan is missing or damaged. Restore it, or start the job in a new folder")
            self._open = group, _partitions(group, json.loads(data))
        return self._open[1]

    def partition(self, number: int) -> Partition:
        return self.partitions(number // GROUP)[number % GROUP]


def open_plan(
    store: Store,
    where: str,
    job: str,
    identity: dict[str, Any],
    draft: Callable[[Path], Draft],
    now: Sequence[Partition] | None = None,
) -> Plan:
    """The plan in a store, which is created if there is none. `draft` makes it; files that it writes into the folder are kept with it.

    Refused, with what differs, when the plan was made from something else; `now` are the partitions that it would have, where they are
    known, and `where` is the store's name.
    """
    data = store.read(HEAD)
    if data is None:
        data = _create(store, job, identity, draft)
    value = json.loads(data)
    if value.get("version") != VERSION:
        raise Refused(
            f"the job in {where} has format version {value.get('version')!r}; this Eyeline reads {VERSION}. Finish it with the version of "
            "Eyeline that started it, or use another folder"
        )
    plan = Plan(store, Head(**value), hashlib.sha256(data).hexdigest()[:16])
    differs = list(differences(plan.head.identity, json.loads(json.dumps(identity))))
    if differs or plan.head.job != job:
        differs += changed_inputs(plan, now) if now is not None else []
        raise Refused(
            f"{where} holds what was prepared from other inputs, settings or code. These differ: "
            f"{'; '.join(differs) or f'job ({plan.head.job} → {job})'}. Restore them, or use another folder"
        )
    return plan


def existing_plan(store: Store) -> Plan | None:
    """The plan in a store, whatever it was made from."""
    data = store.read(HEAD)
    return None if data is None else Plan(store, Head(**json.loads(data)), hashlib.sha256(data).hexdigest()[:16])


def _create(store: Store, job: str, identity: dict[str, Any], draft: Callable[[Path], Draft]) -> bytes:
    folder = f"plan/files-{uuid.uuid4().hex[:12]}"
    with store.scratch(folder) as here:
        made = draft(here)
        files = {path.name: sha256_of(path) for path in sorted(here.iterdir())}
        put_all(store, here, folder)
    pieces, count, rows = list[str](), 0, 0
    left = iter(made.partitions)
    while some := list(islice(left, GROUP)):
        assert [one.number for one in some] == list(range(count, count + len(some))), "partitions are numbered from 0"
        data = json.dumps([[one.inputs, one.rows, one.work] for one in some], separators=(",", ":")).encode()
        pieces.append(hashlib.sha256(data).hexdigest())
        store.create(_piece_key(len(pieces) - 1, pieces[-1]), data)  # if it exists it is the same
        count, rows = count + len(some), rows + sum(one.rows or 0 for one in some)
    head = json.dumps(asdict(Head(VERSION, job, identity, count, rows, pieces, files, folder, made.notes)), indent=1).encode()
    if store.create(HEAD, head):
        return head
    data = store.read(HEAD)  # another process has planned meanwhile, or the answer to our own request was lost
    assert data is not None, "what exists can be read"
    return data


def _piece_key(group: int, digest: str) -> str:
    return f"plan/{group:06d}-{digest[:16]}.json"


def _partitions(group: int, values: list[Any]) -> list[Partition]:
    return [Partition(group * GROUP + n, tuple(Input(*one) for one in inputs), rows, work) for n, (inputs, rows, work) in enumerate(values)]


def changed_inputs(plan: Plan, now: Iterable[Partition]) -> list[str]:
    """How the first inputs that differ from a plan's have changed, in words."""
    before = (one for group in plan.groups for partition in plan.partitions(group) for one in partition.inputs)
    after = (one for partition in now for one in partition.inputs)
    return list(islice(_changes(before, after), NAMED))


def _changes(before: Iterator[Input], after: Iterator[Input]) -> Iterator[str]:
    for old, new in zip_longest(before, after):
        if old is None:
            yield f"{new.name} is new"
        elif new is None:
            yield f"{old.name} is missing"
        elif old.name != new.name:
            yield f"{old.name} is now {new.name}"
        elif old != new:
            yield f"{old.name} has changed ({old.bytes:,} bytes, {old.digest[:8]} → {new.bytes:,}, {new.digest[:8]})"
