"""Runs the partitions of a job, here, in processes of this machine, or as one of several jobs that share a store.

No process owns a partition: two that work on the same one waste time, and do no harm, since only one can commit it. So there is
nothing to be cleaned up or waited for after a kill, and the same command resumes.
"""

import pickle
import selectors
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TypeVar

from eyeline.core.errors import Quarantined, Refused
from eyeline.data.workers import At, Failed, Worker, receive
from eyeline.offline.attempt import Job, Outcome, attempt
from eyeline.offline.manifests import QUARANTINED, missing_numbers, quarantine, quarantined_numbers, roll_up, rolled_groups
from eyeline.offline.on_ray import connected, results_on_ray
from eyeline.offline.plan import Partition, Plan
from eyeline.offline.store import Store

TRIES = 3  # of a partition that has crashed a worker, each with nothing else at work
MOST_CRASHES = 100  # of different partitions, before no more are begun
NAMED = 5  # partitions in a message

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Where:
    """Where a job runs."""

    workers: int = 0  # processes on this machine; 0: this one does all
    shard: int = 0  # which of `shards` jobs this one is: it does every `shards`-th partition
    shards: int = 1
    ray: str | None = None  # the address of a Ray cluster: the workers are its actors, and 0 of them means one for each CPU

    def has(self, number: int) -> bool:
        return number % self.shards == self.shard


def shard_of(text: str | None) -> tuple[int, int]:
    """The two numbers of `--shard i/n`. Refused for others."""
    if text is None:
        return 0, 1
    first, found, second = text.partition("/")
    if not found or not first.isdecimal() or not second.isdecimal() or not int(first) < int(second):
        raise Refused(f"--shard {text}: wanted I/N, the number of this job, from 0 to N-1, and how many there are: --shard 0/16")
    return int(first), int(second)


def where_of(workers: int, shard: str | None, ray: str | None) -> Where:
    """Where the options of a command say that a job runs. Refused for a share that does not exist, and a cluster that does not answer."""
    where = Where(workers, *shard_of(shard), ray)
    if ray is not None:
        connected(ray)
    return where


@dataclass(frozen=True)
class Asked:
    """A partition to be done."""

    partition: Partition
    repair: bool = False


@dataclass(frozen=True)
class Working:
    """`working(asked, at)`: what a worker does."""

    job: Job
    store: Store
    plan: str

    def __call__(self, asked: Asked, at: At | None = None) -> Outcome:  # noqa: ARG002 - a partition has no parts
        return attempt(self.job, self.store, self.plan, asked.partition, asked.repair)


@dataclass(frozen=True)
class RollingUp:
    """`rolling_up(group, at)`: what a worker does when the partitions are done."""

    plan: Plan

    def __call__(self, group: int, at: At | None = None) -> bool:  # noqa: ARG002
        return roll_up(self.plan, group)


def run(job: Job, plan: Plan, where: Where, tell: Callable[[Outcome], None], damaged: frozenset[int] = frozenset()) -> bool:
    """Do all partitions of this job that are not committed, and repair those that are `damaged`. Return whether the plan is complete:
    other jobs may still be at work on it.

    Quarantined when partitions have crashed every worker that tried them; all others are done then.
    """
    given_up = quarantined_numbers(plan.store)
    working = Working(job, plan.store, plan.digest)
    suspects: list[Asked] = []
    asked = (one for one in _asked(plan, where, damaged) if one.partition.number not in given_up)
    for one, result in results(working, takewhile(lambda _: len(suspects) < MOST_CRASHES, asked), where, job.accelerated):
        if isinstance(result, str):
            suspects.append(one)
        else:
            tell(result)
    for one in suspects:
        why = _tried_alone(working, one, where, tell)
        if why is not None:
            quarantine(plan.store, one.partition.number, why)
            given_up[one.partition.number] = why
    mine = {number: why for number, why in given_up.items() if where.has(number)}
    if mine:
        raise _quarantined(job, plan, mine)
    return _rolled_up(plan, where)


def _rolled_up(plan: Plan, where: Where) -> bool:
    """Roll up the groups that are complete. Return whether all are: then the job is done."""
    rolled = rolled_groups(plan.store)
    left = [group for group in plan.groups if group not in rolled]
    return all([done is True for _, done in results(RollingUp(plan), iter(left), where if len(left) > 1 else Where())])  # noqa: C419 - all


def _asked(plan: Plan, where: Where, damaged: frozenset[int]) -> Iterator[Asked]:
    for number in sorted(damaged):
        yield Asked(plan.partition(number), repair=True)
    for number in missing_numbers(plan):
        if where.has(number):
            yield Asked(plan.partition(number))


def _tried_alone(working: Working, asked: Asked, where: Where, tell: Callable[[Outcome], None]) -> str | None:
    """Try a partition with nothing else at work. Return how the last worker crashed, if all did."""
    why = ""
    for _ in range(TRIES):
        [(_, result)] = results(working, iter([asked]), replace(where, workers=1), working.job.accelerated)
        if not isinstance(result, str):
            tell(result)
            return None
        why = result
    return why


def _quarantined(job: Job, plan: Plan, why: dict[int, str]) -> Quarantined:
    named = "; ".join(f"{number} ({how.strip().splitlines()[-1]})" for number, how in islice(sorted(why.items()), NAMED))
    more = f" and {len(why) - NAMED} more" if len(why) > NAMED else ""
    return Quarantined(
        f"{job.name}: {len(why):,} of {len(plan):,} partitions were given up, since each crashed a worker {TRIES} times while alone: "
        f"{named}{more}. The others of this job are done. {QUARANTINED}/ in the job's folder says more of each; to have one tried again, "
        "delete its file there and run the same command"
    )


# Where the work is done


def results(work: Callable[[A], R], asked: Iterator[A], where: Where, accelerated: bool = False) -> Iterator[tuple[A, R | str]]:
    """Each task with its result, or with a text that says how its worker crashed. Here, without workers, a crash is this process's.
    `accelerated`: the work computes on a GPU where there is one."""
    if where.ray is not None:
        return results_on_ray(work, asked, where.workers, where.ray, accelerated)
    if where.workers:
        return results_of_processes(work, asked, where.workers)
    return ((one, work(one)) for one in asked)


def results_of_processes(work: Callable[[A], R], asked: Iterator[A], count: int) -> Iterator[tuple[A, R | str]]:
    """Have the work done by several processes, one task at a time each. Expected errors of the work are raised."""
    parcel = pickle.dumps(work)
    with selectors.DefaultSelector() as selector:
        busy: dict[Worker, A] = {}
        idle: list[Worker] = []
        try:
            while True:
                for one in islice(asked, count - len(busy)):
                    worker = idle.pop() if idle else Worker(parcel, most_bytes=None)
                    selector.register(worker.socket, selectors.EVENT_READ, worker)
                    busy[worker] = one
                    worker.send_parcel((0, one))
                if not busy:
                    return
                for key, _ in selector.select():
                    worker: Worker = key.data
                    selector.unregister(worker.socket)
                    one = busy.pop(worker)
                    try:
                        _, result = receive(worker.socket)
                        idle.append(worker)
                    except EOFError:
                        result = f"the worker crashed ({worker.end(dying=True)})"
                    if isinstance(result, Failed) and result.kind:
                        raise result.raised()
                    yield one, result.message if isinstance(result, Failed) else result
        finally:
            for worker in (*busy, *idle):
                worker.end()
