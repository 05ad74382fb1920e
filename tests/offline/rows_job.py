"""A small job: rows are numbers, some of which are rejected."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyeline.offline.attempt import Done, Job
from eyeline.offline.manifests import Manifest, manifests
from eyeline.offline.plan import Draft, Input, Partition, Plan, open_plan
from eyeline.offline.store import Store


def work(partition: Partition, folder: Path) -> Done:
    """Keep what is not a multiple of 3, or of 7."""
    kept = [row for row in partition.work if row % 3 and row % 7]
    threes = sum(not row % 3 for row in partition.work)
    (folder / "rows.txt").write_text("".join(f"{row}\n" for row in kept))
    (folder / "sum.txt").write_text(str(sum(kept)))
    return Done({"rows.txt": len(kept)}, {"threes": threes, "sevens": len(partition.work) - threes - len(kept)})


@dataclass(frozen=True)
class Crash:
    """Work that crashes at some partitions: always, or as long as there is a file."""

    numbers: tuple[int, ...]
    once: Path | None = None
    error: type[Exception] | None = None

    def __call__(self, partition: Partition, folder: Path) -> Done:
        found = work(partition, folder)
        if partition.number in self.numbers and (self.once is None or self.once.exists()):
            if self.once is not None:
                self.once.unlink()
            if self.error is not None:
                raise self.error("the disk is on fire")
            os.kill(os.getpid(), signal.SIGKILL)
        return found


JOB = Job("rows", work)


def partitions(count: int, rows: int = 5) -> Iterator[Partition]:
    for number in range(count):
        mine = list(range(number * rows, (number + 1) * rows))
        yield Partition(number, (Input(f"{number}.json", rows, f"digest {number}"),), rows, mine)


def plan_of(store: Store, count: int, rows: int = 5, **identity: Any) -> Plan:
    return open_plan(store, "the store", "rows", {"count": count, **identity}, lambda _: Draft(partitions(count, rows)))


def visible(plan: Plan, read=None) -> dict[str, bytes]:
    """What a reader sees: each output of each manifest, by partition and name."""
    found: dict[str, bytes] = {}
    for manifest in manifests(plan):
        for output in manifest.outputs:
            data = (read or plan.store.read)(manifest.key(output.name))
            assert data is not None, f"partition {manifest.number} is committed without its files"
            found[f"{manifest.number}/{output.name}"] = data
    return found


def assert_every_row_once(plan: Plan, rows: int = 5) -> None:
    """Each row of the input is in one output or is counted once."""
    seen: list[int] = []
    done: list[Manifest] = list(manifests(plan))
    assert [one.number for one in done] == list(range(len(plan)))
    for one in done:
        data = plan.store.read(one.key("rows.txt"))
        assert data is not None
        kept = [int(row) for row in data.split()]
        mine = range(one.number * rows, (one.number + 1) * rows)
        assert set(kept) <= set(mine)
        assert len(kept) + sum(one.counts.values()) == rows
        assert one.counts == {"threes": sum(not row % 3 for row in mine), "sevens": rows - len(kept) - one.counts["threes"]}
        seen += kept
    assert seen == [row for row in range(len(plan) * rows) if row % 3 and row % 7]
