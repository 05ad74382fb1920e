"""What is done: a manifest of each partition, committed by its creation; and roll-ups of groups of them, committed in the same way.

    files/GROUP/NUMBER-ATTEMPT/   what one attempt wrote. It counts only if the manifest of NUMBER names that attempt
    done/GROUP/NUMBER.json        the manifest of a partition
    rolled/GROUP.json             all manifests of a group that is complete
    quarantined/NUMBER.json       why a partition was given up

A manifest never changes and is never deleted. So files of an attempt that the manifest of its partition does not name can never count.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from eyeline.core.errors import StorageFailed
from eyeline.offline.plan import GROUP, Input, Plan
from eyeline.offline.store import Store

ROLLED, QUARANTINED = "rolled", "quarantined"


class Output(NamedTuple):
    """A file that an attempt wrote."""

    name: str
    bytes: int
    sha256: str
    rows: int  # rows of the input that it holds


@dataclass(frozen=True)
class Manifest:
    """What one attempt made of a partition."""

    plan: str  # its digest
    number: int
    attempt: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    counts: dict[str, int]  # rows of the input that no output holds, by cause
    seconds: float
    worker: str  # host and process
    ended: str  # the time, for people

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.outputs)

    def key(self, name: str) -> str:
        """The key of an output."""
        return f"{files_of(self.number, self.attempt)}/{name}"


def files_of(number: int, attempt: str) -> str:
    return f"files/{number // GROUP:06d}/{number:09d}-{attempt}"


def done_key(number: int) -> str:
    return f"done/{number // GROUP:06d}/{number:09d}.json"


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Commit a partition unless it is committed. Return the manifest that stands: this one, or that of another attempt.

    After a StorageFailed it is unknown which it is: the request may still arrive, so the attempt's files must stay.
    """
    data = json.dumps(asdict(manifest), separators=(",", ":")).encode()
    while True:
        if store.create(done_key(manifest.number), data):
            return manifest
        standing = manifest_of(store, manifest.plan, manifest.number)
        if standing is not None:  # of an attempt whose answer was lost, it is the own one
            return standing


def manifest_of(store: Store, plan: str, number: int) -> Manifest | None:
    """The manifest of a partition, if it is committed. StorageFailed for one of another plan."""
    data = store.read(done_key(number))
    return None if data is None else _manifest(json.loads(data), plan, done_key(number))


def _manifest(value: dict[str, Any], plan: str, key: str) -> Manifest:
    if value["plan"] != plan:
        raise StorageFailed(f"{key} belongs to plan {value['plan']}, and the job's is {plan}. Start the job in a new folder")
    inputs, outputs = (tuple(Input(*one) for one in value["inputs"]), tuple(Output(*one) for one in value["outputs"]))
    return Manifest(**{**value, "inputs": inputs, "outputs": outputs})


# Groups


def rolled_groups(store: Store) -> set[int]:
    """The groups whose manifests are rolled up. A request per thousand."""
    return {int(key.rpartition("/")[2].removesuffix(".json")) for key, _ in store.sizes(ROLLED)}


def committed_numbers(store: Store, group: int) -> set[int]:
    """The partitions of a group that are committed, by name alone. One request."""
    return {int(key.rpartition("/")[2].removesuffix(".json")) for key, _ in store.sizes(f"done/{group:06d}")}


def missing_numbers(plan: Plan) -> Iterator[int]:
    """The partitions that are not committed, in order. A request per thousand partitions at most, when they are reached."""
    rolled = rolled_groups(plan.store)
    for group in plan.groups:
        if group not in rolled:
            done = committed_numbers(plan.store, group)
            yield from (number for number in plan.numbers(group) if number not in done)


def roll_up(plan: Plan, group: int) -> bool:
    """Commit all manifests of a group as one object. Return whether the group is complete."""
    store = plan.store
    if len(committed_numbers(store, group)) < len(plan.numbers(group)):
        return False
    found = [manifest_of(store, plan.digest, number) for number in plan.numbers(group)]
    values = [asdict(one) for one in found if one is not None]
    assert len(values) == len(found), "a manifest is never deleted"
    store.create(f"{ROLLED}/{group:06d}.json", json.dumps(values, separators=(",", ":")).encode())  # the same, whichever process creates it
    return True


def manifests(plan: Plan) -> Iterator[Manifest]:
    """The manifests of all partitions that are committed, in order: one group of them is in memory. A request for each roll-up."""
    rolled = rolled_groups(plan.store)
    for group in plan.groups:
        if group in rolled:
            key = f"{ROLLED}/{group:06d}.json"
            data = plan.store.read(key)
            if data is None:
                raise StorageFailed(f"{key} has vanished. Restore it, or start the job in a new folder")
            yield from (_manifest(value, plan.digest, key) for value in json.loads(data))
        else:
            for number in sorted(committed_numbers(plan.store, group)):
                found = manifest_of(plan.store, plan.digest, number)
                if found is not None:
                    yield found


# What was given up, and what does not count


def quarantine(store: Store, number: int, why: str) -> None:
    """Give a partition up."""
    store.create(f"{QUARANTINED}/{number:09d}.json", json.dumps({"number": number, "why": why}).encode())


def quarantined_numbers(store: Store) -> dict[int, str]:
    """The partitions that were given up, and why each was."""
    found = {}
    for key, _ in store.sizes(QUARANTINED):
        data = store.read(key)
        if data is not None:
            found[int(key.rpartition("/")[2].removesuffix(".json"))] = json.loads(data)["why"]
    return found


def garbage(plan: Plan) -> Iterator[tuple[str, int]]:
    """Keys, with their bytes, of files whose attempt was lost: their partition is committed by another. A group at a time.

    Files of a partition that is not committed are left out: an attempt may be writing them.
    """
    for group in plan.groups:
        files = list(plan.store.sizes(f"files/{group:06d}"))  # before the manifests: an attempt that starts later is not among them
        standing: dict[int, str] = {}
        for key, size in files:
            number, _, attempt = key.split("/")[2].partition("-")
            if int(number) not in standing:
                found = manifest_of(plan.store, plan.digest, int(number))
                standing[int(number)] = "" if found is None else found.attempt
            if standing[int(number)] not in ("", attempt):
                yield key, size
