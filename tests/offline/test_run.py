"""The same bytes come out of every way to run a job, with a worker killed in each; what crashes every worker is given up by name."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from eyeline.core.errors import Quarantined, Refused, StorageFailed
from eyeline.offline.attempt import Done, Job, Outcome
from eyeline.offline.manifests import manifests, quarantined_numbers
from eyeline.offline.plan import GROUP, Partition, Plan
from eyeline.offline.report import report_of
from eyeline.offline.run import Where, run, shard_of
from eyeline.offline.store import LocalStore
from tests.forked import Forked
from tests.offline.rows_job import JOB, Crash, assert_every_row_once, plan_of, visible, work

COUNT = 12


def done(plan: Plan, where: Where, job: Job = JOB, damaged: frozenset[int] = frozenset()) -> tuple[bool, list[Outcome]]:
    told: list[Outcome] = []
    return run(job, plan, where, told.append, damaged), told


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    plan = plan_of(LocalStore(tmp_path_factory.mktemp("whole")), COUNT)
    assert done(plan, Where())[0]
    return visible(plan)


@pytest.mark.parametrize("mode", ["here", "workers", "shards", "shards of workers"])
def test_every_mode_writes_the_same_with_a_worker_killed(tmp_path: Path, wanted: dict[str, bytes], mode: str) -> None:
    plan = plan_of(LocalStore(tmp_path / "job"), COUNT)
    alarm = tmp_path / "alarm"
    alarm.touch()
    job = Job("rows", Crash((7,), alarm))
    if mode == "workers":
        whole, told = done(plan, Where(2), job)
        assert whole
        assert sorted(one.manifest.number for one in told) == list(range(COUNT))
    else:
        shards = 1 if mode == "here" else 3
        where = [Where(2 if mode == "shards of workers" else 0, shard, shards) for shard in range(shards)]
        for one in where:  # in processes of their own: some are killed
            Forked(lambda one=one: run(job, plan, one, lambda _: None)).wait()
        whole = [done(plan, one, job)[0] for one in where]
        assert whole[-1]
    assert not alarm.exists()
    assert visible(plan) == wanted
    assert_every_row_once(plan)


def test_partitions_that_crash_every_worker_are_given_up(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    plan = plan_of(LocalStore(tmp_path), COUNT)
    with pytest.raises(Quarantined, match=r"rows: 2 of 12 partitions were given up.* 3 \(the worker crashed \(SIGKILL\)\); 5") as raised:
        done(plan, Where(2), Job("rows", Crash((3, 5))))
    assert raised.value.code == 8
    assert visible(plan) == {name: data for name, data in wanted.items() if name.split("/")[0] not in ("3", "5")}
    assert "given up: 3 (the worker crashed (SIGKILL)), 5" in report_of(plan)
    with pytest.raises(Quarantined):
        done(plan, Where(2))  # they stay so, whatever the work is now
    for number in quarantined_numbers(plan.store):
        plan.store.remove(f"quarantined/{number:09d}.json")
    assert done(plan, Where(2))[0]
    assert visible(plan) == wanted


def test_a_defect_is_told_with_its_traceback(tmp_path: Path) -> None:
    plan = plan_of(LocalStore(tmp_path), 3)
    with pytest.raises(Quarantined, match=r"1 \(ZeroDivisionError: the disk is on fire\)"):
        done(plan, Where(1), Job("rows", Crash((1,), error=ZeroDivisionError)))
    assert "in __call__" in quarantined_numbers(plan.store)[1]


def test_an_expected_failure_ends_the_run_as_itself(tmp_path: Path) -> None:
    for workers in (0, 2):
        plan = plan_of(LocalStore(tmp_path / str(workers)), COUNT)
        with pytest.raises(StorageFailed, match="the disk is on fire"):
            done(plan, Where(workers), Job("rows", Crash((4,), error=StorageFailed)))
        assert not quarantined_numbers(plan.store)
        assert done(plan, Where(workers))[0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("8 requested and 3 written")], ids=["system", "numpy"])
def test_a_full_disk_ends_the_run_and_gives_nothing_up(tmp_path: Path, error: OSError) -> None:
    for workers in (0, 2):
        plan = plan_of(LocalStore(tmp_path / str(workers)), COUNT)
        with pytest.raises(StorageFailed, match=r"could not write \S+/000000004-.*(No space left|requested).*bytes are free there"):
            done(plan, Where(workers), Job("rows", Full(str(error), error.errno)))
        assert not quarantined_numbers(plan.store)


@dataclass(frozen=True)
class Full:
    """Work that finds a full disk. Pickles."""

    text: str
    number: int | None

    def __call__(self, partition: Partition, folder: Path) -> Done:
        if partition.number == 4:
            raise OSError(self.text) if self.number is None else OSError(self.number, "No space left on device")
        return work(partition, folder)


def test_shares_are_disjoint_and_complete(tmp_path: Path) -> None:
    plan = plan_of(LocalStore(tmp_path), COUNT)
    numbers = []
    for shard in (2, 0, 1):
        whole, told = done(plan, Where(0, shard, 3))
        assert whole == (shard == 1)  # the last to run
        numbers.append([one.manifest.number for one in told])
    assert numbers == [list(range(shard, COUNT, 3)) for shard in (2, 0, 1)]


def test_groups_are_rolled_up_when_they_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plan", "manifests"):
        monkeypatch.setattr(f"eyeline.offline.{module}.GROUP", 5)
    assert GROUP == 1000
    plan = plan_of(LocalStore(tmp_path), COUNT)
    assert not done(plan, Where(0, 0, 2))[0]
    assert not list((tmp_path / "rolled").glob("*"))
    assert done(plan, Where(0, 0, 2))[1] == []  # none is done again
    single = list(manifests(plan))
    assert done(plan, Where(2, 1, 2))[0]
    assert sorted(path.name for path in (tmp_path / "rolled").iterdir()) == ["000000.json", "000001.json", "000002.json"]
    assert [one for one in manifests(plan) if one.number % 2 == 0] == single
    assert_every_row_once(plan)
    assert done(plan, Where())[1] == []


def test_what_is_damaged_is_written_again_with_the_same_manifest(tmp_path: Path) -> None:
    plan = plan_of(LocalStore(tmp_path), COUNT)
    done(plan, Where())
    before, standing = visible(plan), list(manifests(plan))
    (tmp_path / standing[3].key("rows.txt")).write_text("broken")
    (tmp_path / standing[4].key("sum.txt")).unlink()
    _, told = done(plan, Where(), damaged=frozenset({3, 4}))
    assert [one.how for one in told] == ["repaired"] * 2
    assert visible(plan) == before
    assert list(manifests(plan)) == standing

    def other(partition: Partition, folder: Path) -> Done:
        found = work(partition, folder)
        (folder / "sum.txt").write_text("1")
        return found

    with pytest.raises(Refused, match=r"prepared from other inputs: 3\.json, or what they refer to.*Now sum\.txt would be different"):
        done(plan, Where(), Job("rows", other), frozenset({3}))
    assert visible(plan) == before


def test_rows_that_come_out_must_be_those_that_went_in(tmp_path: Path) -> None:
    plan = plan_of(LocalStore(tmp_path), 2)
    for wrong in (Done({"rows.txt": 1}, {}), Done({"rows.txt": 3, "none.txt": 2}, {})):

        def miscounting(partition: Partition, folder: Path, wrong: Done = wrong) -> Done:
            work(partition, folder)
            return wrong

        with pytest.raises(AssertionError):
            done(plan, Where(), Job("rows", miscounting))
    assert not list(manifests(plan))


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "1/0", "/"])
def test_shards_are_checked(text: str) -> None:
    assert shard_of("2/3") == (2, 3)
    assert shard_of(None) == (0, 1)
    with pytest.raises(Refused, match="wanted I/N"):
        shard_of(text)
