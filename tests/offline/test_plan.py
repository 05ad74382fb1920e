"""A plan is created once and never changes; a million partitions are planned, listed and resumed in few requests and little memory."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyeline.core.errors import Refused, StorageFailed
from eyeline.offline.manifests import Manifest, done_key, manifests, missing_numbers, roll_up
from eyeline.offline.plan import GROUP, Draft, Input, Partition, existing_plan, open_plan
from eyeline.offline.store import LocalStore
from tests.offline.fake_store import FakeStore
from tests.offline.rows_job import partitions, plan_of


def test_a_plan_is_made_once_and_read_after(tmp_path: Path) -> None:
    made = []

    def draft(here: Path) -> Draft:
        made.append(here)
        (here / "order").write_text("1 2 3")
        return Draft(partitions(5), {"windows": ["a"]})

    store = LocalStore(tmp_path)
    for _ in range(2):
        plan = open_plan(store, "here", "rows", {"seed": 1}, draft)
        assert [plan.partition(number) for number in range(5)] == list(partitions(5))
        assert plan.head.notes == {"windows": ["a"]}
        assert store.read(f"{plan.head.folder}/order") == b"1 2 3"
    assert len(made) == 1
    again = existing_plan(store)
    assert again is not None
    assert again.digest == plan.digest


def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan_of(store, 3, settings={"seed": 1}, code="1.0")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(Refused, match=r"the store holds what was prepared from other.*code \('1\.0' → '1\.1'\); settings\.seed \(1 → 2\)"):
        plan_of(store, 3, settings={"seed": 2}, code="1.1")
    now = list(partitions(4))
    now[1] = Partition(1, (Input("1.json", 5, "other"),), 5, [])
    with pytest.raises(Refused, match=r"count \(3 → 4\); 1\.json has changed \(5 bytes, digest 1 → 5, other\); 3\.json is new"):
        open_plan(store, "here", "rows", {"count": 4, "settings": {"seed": 1}, "code": "1.0"}, lambda _: Draft(now), now)
    with pytest.raises(Refused, match=r"job \(rows → words\)"):
        open_plan(store, "here", "words", {"count": 3, "settings": {"seed": 1}, "code": "1.0"}, lambda _: Draft(now))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    head = tmp_path / "plan.json"
    head.write_text(json.dumps(json.loads(head.read_text()) | {"version": 9}))
    with pytest.raises(Refused, match="has format version 9"):
        plan_of(store, 3)


def test_a_damaged_plan_or_a_foreign_manifest_stops_the_job(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = plan_of(store, 3)
    store.create(done_key(1), json.dumps(vars(manifest_of("another", 1))).encode())
    with pytest.raises(StorageFailed, match="belongs to plan another"):
        list(manifests(plan))
    [piece] = (tmp_path / "plan").glob("*.json")
    piece.write_text(piece.read_text().replace("digest 2", "digest 3"))
    with pytest.raises(StorageFailed, match="of the plan is missing or damaged"):
        plan_of(store, 3).partition(0)


def manifest_of(plan: str, number: int) -> Manifest:
    return Manifest(plan, number, "a" * 12, (), (), {}, 0.1, "host 1", "now")


class Sparse(FakeStore):
    """Partitions that are all committed but for the missing ones; their manifests take no room."""

    def __init__(self, count: int):
        super().__init__()
        self.count, self.missing, self.plan = count, frozenset[int](), ""

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        if not folder.startswith("done/"):
            yield from super().sizes(folder)
            return
        self.requests["list"] += 1
        first = int(folder[5:]) * GROUP
        yield from ((done_key(n), 100) for n in range(first, min(first + GROUP, self.count)) if n not in self.missing)

    def read(self, key: str) -> bytes | None:
        if not key.startswith("done/"):
            return super().read(key)
        self.requests["read"] += 1
        return json.dumps(vars(manifest_of(self.plan, int(key[-14:-5])))).encode()


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_partitions_take_few_requests_and_little_memory(count: int) -> None:
    """A request per thousand, and memory for one group, whatever their number."""
    groups = count // GROUP
    assert groups >= 20
    store = Sparse(count)
    every = (Partition(number, (Input(f"{number}.json", 10, f"{number:016x}"),), 10) for number in range(count))
    tracemalloc.start()
    plan = open_plan(store, "there", "rows", {}, lambda _: Draft(every))
    held = sum(map(len, store.objects.values()))
    peak = tracemalloc.get_traced_memory()[1] - held
    assert dict(store.requests) == {"read": 1, "create": groups + 1}
    store.plan, store.missing = plan.digest, frozenset({3456, count - 1})
    store.requests.clear()
    assert list(missing_numbers(plan)) == [3456, count - 1]
    assert dict(store.requests) == {"list": 1 + groups}
    assert not roll_up(plan, 3)
    store.missing = frozenset({count - 1})
    for group in range(4):
        assert roll_up(plan, group)
    held += sum(len(data) for key, data in store.objects.items() if key.startswith("rolled/"))
    store.objects |= {f"rolled/{group:06d}.json": b"" for group in range(4, groups - 1)}
    store.requests.clear()
    assert list(missing_numbers(plan)) == [count - 1]  # resumed: a list of roll-ups, and of the one group that is open
    assert dict(store.requests) == {"list": 2}
    store.requests.clear()
    some = manifests(plan)
    assert [next(some).number for _ in range(4 * GROUP)] == list(range(4 * GROUP))
    assert store.requests == {"list": 1, "read": 4}
    peak = max(peak, tracemalloc.get_traced_memory()[1] - held)
    tracemalloc.stop()
    assert peak < 10e6
