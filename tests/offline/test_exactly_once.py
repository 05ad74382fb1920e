"""Whatever is killed, lost, late or raced: every row is in one committed output or one reject, and no file of a lost attempt is seen.

Workers are threads that take turns at a store in memory: a schedule says whose request is next, and what becomes of it.
"""

import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyeline.core.errors import StorageFailed
from eyeline.data.containers import container
from eyeline.offline.manifests import garbage, manifests
from eyeline.offline.plan import Plan, existing_plan
from eyeline.offline.run import Where, run
from eyeline.offline.store import Retried
from tests.offline.fake_store import FakeStore, Killed, Turns, no_answer
from tests.offline.rows_job import JOB, assert_every_row_once, plan_of, visible

SOAK_S = float(os.environ.get("SOAK_S", "600"))  # seconds
COUNT = 3  # partitions, in groups of two
Fault = Literal["killed before", "killed after", "no answer", "no request", "late"]
FAULTS: tuple[Fault, ...] = ("killed before", "killed after", "no answer", "no request", "late")


@pytest.fixture(autouse=True, scope="module")
def small_groups() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("plan", "manifests"):
            patch.setattr(f"eyeline.offline.{module}.GROUP", 2)
        patch.setattr(container.time, "sleep", lambda _: None)
        yield


@dataclass(eq=False)
class World:
    """What all workers share."""

    objects: dict[str, bytes] = field(default_factory=dict)
    late: list[tuple[int, str, Callable[[], Any]]] = field(default_factory=list)  # requests that arrive a number of requests later
    committed: dict[str, bytes] = field(default_factory=dict)  # all that was ever seen

    def pass_time(self) -> None:
        """A request more; those arrive whose time has come."""
        due, self.late = [one for one in self.late if one[0] <= 1], [(n - 1, *rest) for n, *rest in self.late if n > 1]
        for *_, arrive in due:
            arrive()
        self.check()

    def check(self) -> None:
        """What is committed is there, whole, and as it always was."""
        for key, data in list(self.objects.items()):
            if key.startswith(("done/", "rolled/")) or key == "plan.json":
                assert self.committed.setdefault(key, data) == data, f"{key} has changed"
            if key.startswith("done/"):
                manifest = json.loads(data)
                for name, size, digest, _ in manifest["outputs"]:
                    file = self.objects.get(f"files/{manifest['number'] // 2:06d}/{manifest['number']:09d}-{manifest['attempt']}/{name}")
                    assert file is not None, f"{key} names a file that is not there"
                    assert (len(file), hashlib.sha256(file).hexdigest()) == (size, digest)


@dataclass(eq=False)
class FaultyStore(FakeStore):
    """The store as one worker finds it: its request number n meets `faults[n]`."""

    world: World = field(default_factory=World)
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)
    wait: Callable[[], None] = lambda: None
    count: int = 0
    met: tuple[Fault, int] | None = None

    def _request(self, name: str, key: str) -> None:
        self.wait()
        self.world.pass_time()
        self.met = self.faults.get(self.count)
        self.count += 1
        self.requests[name] += 1
        if self.met is not None and self.met[0] == "killed before":
            raise Killed
        if self.met is not None and self.met[0] == "no request":
            raise no_answer(key)

    def create(self, key: str, data: bytes) -> bool:
        self._request("create", key)
        return self._answer(key, lambda: self._created(key, data))

    def _created(self, key: str, data: bytes) -> bool:
        created = key not in self.objects
        self.objects.setdefault(key, data)
        return created

    def remove(self, key: str) -> None:
        self._request("remove", key)
        self._answer(key, lambda: self.objects.pop(key, None))

    def put(self, path: Path, key: str) -> None:
        data = path.read_bytes()
        self._request("put", key)
        self._answer(key, lambda: self.objects.__setitem__(key, data))

    def _answer(self, key: str, change: Callable[[], Any]) -> Any:
        if self.met is not None and self.met[0] == "late":
            self.world.late.append((self.met[1], key, change))
            raise no_answer(key)
        answer = change()
        if self.met is not None and self.met[0] == "killed after":
            raise Killed
        if self.met is not None and self.met[0] == "no answer":
            raise no_answer(key)
        return answer


def worker(store: FaultyStore) -> None:
    """Plan and do the whole job; be killed, or give up, where a fault says so."""
    with suppress(Killed, StorageFailed):
        run(JOB, plan_of(Retried(store, 1), COUNT), Where(), lambda _: None)


def cleaner(store: FaultyStore) -> None:
    """`--clean`, again and again."""
    with suppress(Killed, StorageFailed):
        for _ in range(20):
            plan = existing_plan(store)
            for key, _ in list(garbage(plan)) if plan is not None else ():
                store.remove(key)


def finished(world: World) -> Plan:
    """The job after one more command without faults, and after every request has arrived."""
    store = FaultyStore(objects=world.objects, world=world)
    plan = plan_of(store, COUNT)
    assert run(JOB, plan, Where(), lambda _: None)
    for *_, arrive in world.late:
        arrive()
    world.late.clear()
    world.check()
    assert_every_row_once(plan)
    seen = visible(plan)
    for key, _ in list(garbage(plan)):
        store.remove(key)
    named = {one.key(output.name) for one in manifests(plan) for output in one.outputs}
    assert {key for key in world.objects if key.startswith("files/")} == named  # all garbage was named
    assert visible(plan) == seen == WANTED
    return plan


def _wanted() -> dict[str, bytes]:
    plan = plan_of(FakeStore(), COUNT)
    run(JOB, plan, Where(), lambda _: None)
    return visible(plan)


WANTED = _wanted()


TWICE: list[tuple[Fault, ...]] = [("late", "no request"), ("no answer", "no answer"), ("no answer", "killed before"), ("late", "late")]


@pytest.mark.parametrize("some", [*((fault,) for fault in FAULTS), *TWICE], ids=", then ".join)
def test_a_fault_at_every_border_of_a_partition(some: tuple[Fault, ...]) -> None:
    number, met = 0, True
    while met:  # until there is no such request
        world = World()
        faults = {number + n: (fault, 3) for n, fault in enumerate(some)}
        store = FaultyStore(objects=world.objects, world=world, faults=faults)
        worker(store)
        met = store.count > number
        finished(world)
        number += 1
    assert number > 20


schedule = st.lists(st.integers(0, 2), max_size=120)
one_fault: Any = st.tuples(st.sampled_from(FAULTS), st.integers(1, 30))
some_faults = st.builds(  # one after another, too: a request is tried twice
    lambda single, twice: single | {n + m: fault for n, both in twice.items() for m, fault in enumerate(both)},
    st.dictionaries(st.integers(0, 40), one_fault, max_size=3),
    st.dictionaries(st.integers(0, 40), st.tuples(one_fault, one_fault), max_size=2),
)


def raced(order: list[int], faults: list[dict[int, tuple[Fault, int]]]) -> None:
    """Two workers and a cleaner at the same job, in this order of their requests."""
    world, turns = World(), Turns(list(order))
    turns.alive = set(range(len(faults)))
    errors: list[BaseException] = []

    def live(number: int) -> None:
        store = FaultyStore(objects=world.objects, world=world, faults=faults[number], wait=lambda: turns.wait(number))
        try:
            (cleaner if number == 2 else worker)(store)
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's own thread
            errors.append(error)
        finally:
            turns.end(number)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(len(faults))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    finished(world)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=schedule, faults=st.tuples(some_faults, some_faults, some_faults))
def test_any_schedule_of_racing_workers(order: list[int], faults: tuple[dict[int, tuple[Fault, int]], ...]) -> None:
    raced(order, list(faults))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_long_soak_of_schedules() -> None:
    """Ten minutes of them, or as long as SOAK_S says."""
    end, seed = time.monotonic() + SOAK_S, 0
    kinds = Counter[str]()
    while time.monotonic() < end:
        draw = random.Random(seed)
        faults = [{draw.randrange(40): (draw.choice(FAULTS), draw.randrange(1, 30)) for _ in range(draw.randrange(5))} for _ in range(3)]
        kinds.update(fault for one in faults for fault, _ in one.values())
        try:
            raced([draw.randrange(3) for _ in range(draw.randrange(150))], faults)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seed += 1
    assert min(kinds[fault] for fault in FAULTS) > SOAK_S / 6
