"""A key is created once, by one, whole: in a folder, S3, Azure and Google Cloud Storage. A store that cannot do that is refused."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import make_folder
from eyeline.core.locations import Remote
from eyeline.data.containers import container
from eyeline.data.files import stores
from eyeline.offline.attempt import attempt
from eyeline.offline.manifests import garbage, manifests
from eyeline.offline.run import Where, run
from eyeline.offline.store import LocalStore, RemoteStore, Retried, Store, put_all, refuse_unconditional, store_at
from tests.data import store as bad
from tests.data.store import Store as Server
from tests.offline.azurite import ACCOUNT, CONTAINER, KEY, azurite
from tests.offline.fake_store import FakeStore, no_answer
from tests.offline.gcs import Bucket, google
from tests.offline.rows_job import JOB, assert_every_row_once, plan_of, visible


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


@pytest.fixture
def in_azure(azure: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment that leads to it."""
    for name, value in (("ACCOUNT_NAME", ACCOUNT), ("ACCOUNT_KEY", KEY), ("ENDPOINT", azure)):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    stores._process.cache_clear()
    yield
    stores._process.cache_clear()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket of Google's, and an environment that leads to it."""
    with google(tmp_path) as (found, account):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        stores._process.cache_clear()
        yield found
        stores._process.cache_clear()


@pytest.fixture(params=["a folder", "S3", "Google", pytest.param("Azure", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "a folder":
        return store_at(tmp_path / "job")
    if request.param == "Azure":
        request.getfixturevalue("in_azure")
        return store_at(Remote(f"az://{CONTAINER}", f"{abs(hash(request.node.nodeid)):x}/job"))
    if request.param == "Google":
        request.getfixturevalue("bucket")
        return store_at(Remote("gs://jobs", "some/job"))
    server: Server = request.getfixturevalue("store")
    return store_at(Remote(server.url, "some/job"))


def test_a_key_is_created_once_and_moved_and_removed(opened: Store, tmp_path: Path) -> None:
    assert opened.read("a/b.json") is None
    assert opened.create("a/b.json", b"first")
    assert not opened.create("a/b.json", b"second")
    assert opened.read("a/b.json") == b"first"
    assert list(opened.sizes("a")) == [("a/b.json", 5)]
    assert list(opened.sizes("other")) == []
    opened.create("a/c.json", b"")
    opened.move("a/b.json", "a/c.json")
    assert list(opened.sizes("a")) == [("a/c.json", 5)]
    opened.remove("a/c.json")
    opened.remove("a/c.json")
    with opened.scratch("files/0") as here:
        (here / "x").write_bytes(b"x" * 9)
        put_all(opened, here, "files/0")
    assert list(opened.sizes("files")) == [("files/0/x", 9)]
    assert opened.read("files/0/x") == b"x" * 9


def test_a_job_runs_in_either(opened: Store) -> None:
    plan = plan_of(opened, 4)
    assert run(JOB, plan, Where(), lambda _: None)
    assert_every_row_once(plan)
    wanted = plan_of(FakeStore(), 4)
    run(JOB, wanted, Where(), lambda _: None)
    assert visible(plan) == visible(wanted)


def test_second_attempt_at_a_partition_is_lost_and_leaves_nothing(opened: Store) -> None:
    plan = plan_of(opened, 2)
    one, two = (attempt(JOB, opened, plan.digest, plan.partition(1)) for _ in range(2))
    assert (one.how, two.how) == ("committed", "lost")
    assert two.manifest == one.manifest
    assert [key for key, _ in opened.sizes("files")] == sorted(one.manifest.key(name) for name in ("rows.txt", "sum.txt"))
    assert list(garbage(plan)) == []


def test_what_a_lost_attempt_leaves_is_named(opened: Store) -> None:
    plan = plan_of(opened, 2)
    attempt(JOB, opened, plan.digest, plan.partition(1))
    left = [f"files/000000/{number:09d}-0123456789ab/rows.txt" for number in (0, 1)]
    for key in left:
        opened.create(key, b"1\n")
    assert list(garbage(plan)) == [(left[1], 2)]  # of the other it is not known yet


def test_creators_of_a_key_in_a_folder_race(tmp_path: Path) -> None:
    store, won = LocalStore(tmp_path), list[int]()
    for key in map(str, range(30)):
        start = threading.Barrier(4)

        def create(number: int, key: str = key, start: threading.Barrier = start) -> None:
            start.wait()
            if store.create(key, str(number).encode() * 1000):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.read(key) == str(won[-1]).encode() * 1000
    assert len(won) == 30
    assert not list(tmp_path.glob(".*"))


def test_a_key_may_vanish_while_another_of_its_folder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.create("folder/first", b"1")

    def interrupted(folder: Path) -> None:
        make_folder(folder)
        store.remove("folder/first")

    monkeypatch.setattr("eyeline.offline.store.make_folder", interrupted)
    assert store.create("folder/second", b"2")
    assert list(store.sizes("folder")) == [("folder/second", 1)]


def test_lost_answers_of_a_server_commit_each_partition_once(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container.time, "sleep", lambda _: None)
    there = store_at(Remote(store.url, "job"))
    asked = len(store.asked)
    wanted = plan_of(FakeStore(), 2)
    run(JOB, wanted, Where(), lambda _: None)
    store.faults = [fault for n in range(60) for fault in (None, bad.loses_its_answer if n % 2 else bad.answers(503, "SlowDown"))]
    plan = plan_of(there, 2)
    outcomes = list[str]()
    run(JOB, plan, Where(), lambda outcome: outcomes.append(outcome.how))
    faults, store.faults = 120 - len(store.faults), []
    assert faults > 20
    assert len(store.asked) > asked
    assert outcomes == ["committed"] * 2
    assert visible(plan) == visible(wanted)
    assert list(garbage(plan)) == []


def test_failures_of_writes_say_so(store: Server) -> None:
    there = RemoteStore(Remote("s3://absent-bucket-of-a-test", "job"))
    for write in (lambda: there.create("a", b""), lambda: there.move("a", "b")):
        with pytest.raises(StorageFailed, match=r"could not (create|move) s3://absent-bucket-of-a-test/job/"):
            write()


class Overwriting(FakeStore):
    """A server that does not know of conditions."""

    def create(self, key: str, data: bytes) -> bool:
        self.objects[key] = data
        return True


def no_links(*_: object) -> None:
    raise OSError(95, "Operation not supported")


def test_a_store_without_conditional_create_is_refused(tmp_path: Path, store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="the store cannot create a file only where there is none"):
        refuse_unconditional(Overwriting(), "the store")

    def ignoring(handler: bad._Handler) -> bool:
        del handler.headers["If-None-Match"]
        return False

    store.always = ignoring
    with pytest.raises(Refused, match="cannot create a file only where there is none"):
        store_at(Remote(store.url, "job"))
    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(Refused, match="hard links"):
        store_at(tmp_path)


def test_google_without_conditional_create_is_refused(bucket: Bucket) -> None:
    store_at(Remote("gs://jobs", "job"))
    assert not bucket.objects
    bucket.heeds = False
    with pytest.raises(Refused, match=r"gs://jobs/job cannot create a file only where there is none"):
        store_at(Remote("gs://jobs", "job"))


def test_retries_are_for_failures_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container.time, "sleep", lambda _: None)
    left = [3]

    def failing(name: str, key: str) -> None:
        if left[0]:
            left[0] -= 1
            raise no_answer(key)

    asks: list[Callable[[Store], object]] = [
        lambda s: s.create("a", b"1"),
        lambda s: s.read("a"),
        lambda s: list(s.sizes("")),
        lambda s: s.remove("a"),
    ]
    for ask in asks:
        left[0] = 3
        ask(Retried(FakeStore(before=failing), 3))
        left[0] = 3
        with pytest.raises(StorageFailed, match="Tried 3 times"):
            ask(Retried(FakeStore(before=failing), 2))
    assert list(manifests(plan_of(FakeStore(), 2))) == []


def test_unusable_settings_of_a_store_are_told_as_such(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(StorageFailed, match="could not create"):
        refuse_unconditional(RemoteStore(Remote(store.url, "job")), "the store")
