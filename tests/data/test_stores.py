"""Data in an object store: batches as from files, in few requests, whatever the store does, and never a word of a secret."""

import gzip
import json
import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyeline.core.batch import EncodedImage, Sample
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.image_rule import ImageRule
from eyeline.core.locations import Remote, below, inside, location
from eyeline.data.containers import container as containers
from eyeline.data.containers import tars
from eyeline.data.containers.container import File, FileSlice, fingerprints
from eyeline.data.files import stores
from eyeline.data.images.decode import decode, width_and_height
from eyeline.data.images.image_files import in_memory
from eyeline.data.loader import training_steps
from eyeline.data.plan import read_shard
from eyeline.data.plan.index import Index
from eyeline.data.reader import Reader, reader_of
from eyeline.data.report.preview import sample_previews
from eyeline.data.report.report import THOROUGH, data_report
from eyeline.data.sets import Data
from eyeline.data.sources import folders
from eyeline.data.sources.folders import files_below, matching, resolve_location
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline.prepare import pack_offline
from tests.command import Command
from tests.data import store as bad
from tests.data.container_files import TALK, archive, encoded
from tests.data.llava_rows import BUDGET, ROWS, row
from tests.data.same_batches import assert_same_steps
from tests.data.store import KEY, SECRET, Fault, Store, answers
from tests.train.recipe import tiny_recipe


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    out: list[float] = []
    monkeypatch.setattr(containers.time, "sleep", out.append)
    return out


# Names


@pytest.mark.parametrize(
    ("url", "written"),
    {
        "s3://bucket/a/b.tar": "s3://bucket/a/b.tar",
        "S3://bucket/a/": "s3://bucket/a",
        "gs://bucket": "gs://bucket",
        "az://container/": "az://container",
        "s3://bucket/dt=2024/x?.tar": "s3://bucket/dt=2024/x?.tar",
        "s3://bucket/ä b%20c#d.json": "s3://bucket/ä b%20c#d.json",
    }.items(),
)
def test_url_names_objects_of_a_store(url: str, written: str) -> None:
    found = stores.remote(url)
    assert str(found) == written
    assert location(written) == found == pickle.loads(pickle.dumps(found))
    assert found / "x" == stores.remote(f"{written}/x")
    assert (found / "a.b/x.tar.gz").suffixes == [".tar", ".gz"]
    assert (found / "x").parent == found


@pytest.mark.parametrize(
    ("url", "says"),
    {
        "https://x.org/a.json?X-Amz-Signature=canary": "has credentials in it",
        "https://x.org/a.json": "Download it first",
        "hf://datasets/x/y": "hf download",
        "file:///tmp/x": "give the path itself",
        "s3a://bucket/x": "write s3:// instead of s3a://",
        "abfss://c@account.dfs.core.windows.net/x": "has credentials in it",
        "abfs://container/x": "write az:// instead",
        "gopher://x/y": "is not a known kind of store",
        "s3://user:canary@bucket/x": "AWS_ACCESS_KEY_ID",
        "s3://canary@bucket/x": "has credentials in it",
        "az://c/x.tar?sv=2022&sig=canary": "AZURE_STORAGE_ACCOUNT_KEY",
        "s3:///x": "does not name a valid bucket",
        "s3://b_!/x": "does not name a valid bucket",
        "s3://bucket/a//b": "no empty pieces",
        "s3://bucket/../b": "no empty pieces",
        "s3://bucket/a\nb": "control characters",
    }.items(),
)
def test_other_urls_are_refused_without_their_secrets(url: str, says: str) -> None:
    for refusing in (lambda: stores.remote(url), lambda: open_source(Source(path=url))):
        with pytest.raises(Refused, match=says) as caught:
            refusing()
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "a.png",
        "b/../a.png",
        "./a",
        "../x/a.png",
        "../y/a",
        "/etc/passwd",
        "..",
        ".",
        "a//b/",
        "../../../../x/a",
        "b/..",
        "...",
        "a/../../x/b",
    ],
)
def test_names_resolve_alike_below_folders_and_keys(name: str, tmp_path: Path) -> None:
    here, there = tmp_path / "x", Remote("s3://bucket", "p/x")
    local, remote = inside(here, name), inside(there, name)
    assert (local is None) == (remote is None)
    if local is not None and remote is not None:
        assert below(here, local) == below(there, remote) != ""


def test_a_name_may_be_the_whole_url_of_what_lies_below() -> None:
    root = Remote("s3://bucket", "x")
    assert inside(root, "s3://bucket/x/a.png") == root / "a.png"
    for other in ("s3://bucket/y/a.png", "s3://bucket/x/../a.png", "s3://bucket/x", "s3://bucket/xa.png"):
        assert inside(root, other) is None
    assert inside(Remote("s3://bucket"), "s3://bucket/a.png") == Remote("s3://bucket", "a.png")
    assert inside(Remote("s3://bucket"), "../a.png") is None
    assert inside(Remote("s3://bucket"), "/a.png") is None


TREE = ["a.tar", "b.tar", "d/a.tar", "d/e/a.tar", "d-/a.tar", "d/.h.tar", ".h/a.tar", "d/x[1].tar", "d/e/f/g.json", "z.TAR", "é.tar"]


def test_folders_and_patterns_have_the_files_that_they_have_here(store: Store, tmp_path: Path) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    store.put_folder(tmp_path, "t")
    there = stores.remote(f"{store.url}/t")
    assert [below(there, found) for found in files_below(there, 0)] == [below(tmp_path, found) for found in files_below(tmp_path, 0)]
    for pattern in (
        "*.tar",
        "**/*.tar",
        "d/**",
        "d*/a.tar",
        "?.tar",
        "d/e/*",
        "**/e/**/*",
        "d/x[[]1].tar",
        "[a-b]*",
        "*/*",
        ".h/*",
        ".*/*",
        "d/.h*",
        "no*",
    ):
        here = matching(f"{tmp_path}/{pattern}", 0)
        found = matching(f"{there}/{pattern}", 0)
        assert here is not None and found is not None
        assert [below(there, file) for file in found] == [below(tmp_path, file) for file in here], pattern
        assert all(
            isinstance(file, Remote) and file.about is not None and file.about[0] == len(below(there, file).encode()) for file in found
        )
    assert matching(f"{there}/d/x[1].tar", 0) is None  # it is called so
    assert matching(f"{there}/d/x.tar", 0) is None
    for name in ("t", "t/", "t/d", ""):
        assert folders.is_folder(resolve_location(f"{store.url}/{name}", 0))
    assert not folders.is_folder(resolve_location(f"{store.url}/t/a.tar", 0))


# Reading


def test_parts_are_read_as_from_a_file(store: Store, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(300_000)
    (tmp_path / "x").write_bytes(data)
    store.put("x", data)
    here, there = File.of(tmp_path / "x", 0), File.of(Remote(store.url, "x"), 0)
    assert there.size == here.size
    rng = random.Random(1)
    with FileSlice(here, 1000, 250_000) as one, FileSlice(there, 1000, 250_000) as two:
        for _ in range(200):
            match rng.choice("rrrsse"):
                case "r":
                    size = rng.choice([0, 1, 100, 5_000, 100_000])
                    assert one.read(size) == two.read(size)
                case "s":
                    to = rng.randrange(260_000)
                    assert one.seek(to) == two.seek(to)
                case "e":
                    by = rng.randrange(3_000)
                    assert one.seek(-by, os.SEEK_END) == two.seek(-by, os.SEEK_END)
        assert one.seek(0) == two.seek(0)
        assert two.readall() == one.readall() == data[1000:251_000]
    assert there.read(5, 0) == b""
    assert fingerprints([here]) == fingerprints([there])
    with pytest.raises(StorageFailed, match="ended 10 bytes early"):
        there.read(299_990, 20)


def test_reading_on_takes_few_requests_and_a_part_takes_one(store: Store) -> None:
    data = random.Random(0).randbytes(20 << 20)
    store.put("x", data)
    file = File.of(Remote(store.url, "x"), 0)
    store.asked.clear()
    with FileSlice(file, 0, file.size) as window:
        assert b"".join(iter(lambda: window.read(512), b"")) == data
    assert len(store.asked) <= 8
    assert max(int(r.partition("-")[2]) - int(r.removeprefix("bytes=").partition("-")[0]) for r in store.of("x")) < stores.PIECE
    stores._process.cache_clear()
    store.asked.clear()
    rng = random.Random(1)
    places = [(rng.randrange(19 << 20), rng.randrange(1, 100_000)) for _ in range(30)]
    for start, length in places:
        if start:
            assert file.read(start, length) == data[start : start + length]
    assert len(store.asked) == 30
    kept = stores._process().recent
    assert sum(len(piece.data) for piece in kept.values()) <= stores.KEPT_BYTES


def test_what_is_kept_of_many_objects_has_an_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "KEPT_BYTES", 30_000)
    for n in range(8):
        store.put(f"{n}", bytes(10_000))
        assert stores.look(Remote(store.url, f"{n}"), 10_000)[1] == bytes(10_000)
    assert sum(len(piece.data) for piece in stores._process().recent.values()) == 30_000


@pytest.mark.parametrize("how", ["rewritten", "cut", "gone"])
def test_an_object_that_changes_stops_the_run(store: Store, how: str, waits: list[float]) -> None:
    store.put("x", bytes(100_000))
    file = File.of(Remote(store.url, "x"), 3)
    match how:
        case "rewritten":
            store.put("x", b"1" * 100_000)
        case "cut":
            store.put("x", bytes(10))
        case _:
            store.delete("x")
    with pytest.raises(StorageFailed, match="there is no such object" if how == "gone" else "It has changed|x has changed"):
        file.read(90_000, 10)
    assert waits == []


def test_an_empty_object_is_empty(store: Store) -> None:
    store.put("x", b"")
    file = File.of(Remote(store.url, "x"), 0)
    assert file.read(0, 0) == b""
    assert stores.look(Remote(store.url, "x"), 100) == (file.stamp, b"")
    with pytest.raises(Refused, match=r"x is empty"):
        open_source(Source(path=f"{store.url}/x"))


# Stores that fail

PASSING: dict[str, Fault] = {
    "500": answers(500, "InternalError"),
    "503": answers(503, "SlowDown"),
    "429": answers(429),
    "408": answers(408, "RequestTimeout"),
    "a cut body": bad.cuts,
    "a reset": bad.resets,
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_waited_for(store: Store, waits: list[float], fault: Fault) -> None:
    data = random.Random(0).randbytes(5000)
    store.put("x", data)
    file = File.of(Remote(store.url, "x"), 3)
    store.asked.clear()
    store.faults = [fault, fault]
    assert file.read(1000, 3000) == data[1000:4000]
    assert store.of("x") == ["bytes=1000-3999"] * 3  # nothing else tries again
    assert waits == [0.5, 2]
    store.always = fault
    with pytest.raises(StorageFailed, match=r"Tried 4 times") as caught:
        file.read(0, 100)
    assert str(Remote(store.url, "x")) in str(caught.value)
    assert waits == [0.5, 2, 0.5, 2, 8]


@pytest.mark.parametrize("fault", [bad.drips, bad.stays_silent])
def test_a_store_that_takes_for_ever_is_given_up(store: Store, waits: list[float], monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(stores, "TIMEOUT_S", 0.3)
    store.put("x", bytes(5000))
    file = File.of(Remote(store.url, "x"), 1)
    store.faults = [fault]
    assert file.read(0, 5000) == bytes(5000)
    stores._process().recent.clear()
    store.always = fault
    with pytest.raises(StorageFailed, match=r"no complete answer arrived within 0\.3 s.* Tried 2 times"):
        file.read(0, 5000)
    assert waits == [0.5, 0.5]


def test_a_server_without_ranges_is_not_believed(store: Store, waits: list[float]) -> None:
    store.put("x", bytes(5000))
    file = File.of(Remote(store.url, "x"), 3)
    store.always = bad.ignores_ranges
    with pytest.raises(StorageFailed, match="could not read"):
        file.read(100, 200)


NOT_PASSING: dict[str, tuple[Fault, str]] = {
    "denied": (answers(403, "AccessDenied"), "access is denied.*Allow reading and listing"),
    "unknown key": (answers(403, "InvalidAccessKeyId"), "the credentials are not accepted.*AWS_ACCESS_KEY_ID"),
    "wrong secret": (answers(403, "SignatureDoesNotMatch"), "the credentials are not accepted"),
    "expired": (answers(400, "ExpiredToken"), "the credentials are not accepted.*Renew"),
    "not allowed": (answers(401), "the credentials are not accepted"),
    "region": (answers(301, "PermanentRedirect"), "another region.*AWS_REGION"),
    "region in the signature": (answers(400, "AuthorizationHeaderMalformed"), "another region"),
    "odd": (answers(418, "Teapot"), "the store answered 418 Teapot.*AWS_ENDPOINT_URL"),
}


@pytest.mark.parametrize(("fault", "says"), NOT_PASSING.values(), ids=NOT_PASSING)
def test_failed_self_test_is_refused_at_start_and_stops_later(store: Store, waits: list[float], fault: Fault, says: str) -> None:
    rows = "\n".join(json.dumps(row("q")) for _ in range(4)).encode()
    store.put("x.jsonl", rows)
    opened = open_source(Source(path=f"{store.url}/x.jsonl"))
    stores._process.cache_clear()
    store.always = fault
    with pytest.raises(StorageFailed, match=says):
        list(opened.rows_in(0))
    for path in ("*.jsonl", "", "x.jsonl/"):
        with pytest.raises(Refused, match=says):
            open_source(Source(path=f"{store.url}/{path}"))
    with pytest.raises(Refused, match=r"could not read s3://"):  # an answer to HEAD has no body, and no code
        open_source(Source(path=f"{store.url}/x.jsonl"))
    assert waits == []


def test_what_is_not_there_is_named(store: Store) -> None:
    store.put("a/x.jsonl", b"{}")
    for path, says in {
        f"{store.url}/b.jsonl": "b.jsonl does not exist",
        f"{store.url}/b/": "b does not exist",
        f"{store.url}/a/*.tar": r"no file matches s3://.*/a/\*\.tar",
        f"{store.url}-not/a": "there is no bucket s3://.*-not",
        f"{store.url}-not/*": "there is no bucket",
    }.items():
        with pytest.raises(Refused, match=says):
            open_source(Source(path=path))
    with pytest.raises(Refused, match=r"images does not exist"):
        open_source(Source(path=f"{store.url}/a/x.jsonl", images=f"{store.url}/images"))


def test_an_environment_that_cannot_be_used_is_named(store: Store, monkeypatch: pytest.MonkeyPatch, waits: list[float], capfd: Any) -> None:
    def refusal(kind: type[Exception] = Refused, scheme: str = "s3", **environment: str | None) -> str:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            stores._process.cache_clear()
            with pytest.raises(kind) as caught:
                open_source(Source(path=f"{scheme}://{store.bucket}/x.jsonl"))
            stores._process.cache_clear()
        return str(caught.value)

    none = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_METADATA_ENDPOINT": store.endpoint}
    store.always = answers(404)
    assert "no credentials were found. Set AWS_ACCESS_KEY_ID" in refusal(**none)
    store.always = None
    assert "AWS_ALLOW_HTTP=true" in refusal(AWS_ALLOW_HTTP=None)
    closed = f"http://user:{SECRET}@127.0.0.1:9".replace("canary/", "canary")
    said = refusal(StorageFailed, AWS_ENDPOINT_URL=closed)
    assert "cannot connect to http://127.0.0.1:9. Check the network, and AWS_ENDPOINT_URL" in said
    assert "canary" not in said
    assert "AWS_ENDPOINT_URL" in refusal(AWS_ENDPOINT_URL="127.0.0.1:80")
    assert "AWS_ENDPOINT_URL" in refusal(AWS_ALLOW_HTTP="canary perhaps")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in refusal(scheme="az")
    bad_key = refusal(scheme="gs", GOOGLE_SERVICE_ACCOUNT_KEY='{"canary')
    assert "GOOGLE_APPLICATION_CREDENTIALS" in bad_key and "canary" not in bad_key
    assert "canary" not in "".join(capfd.readouterr())


def test_without_obstore_a_url_is_refused_and_says_how_to_get_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Refused, match=r"pip install 'eyeline\[stores\]'"):
        open_source(Source(path=f"{store.url}/x"))


def test_indexes_are_stored_locally() -> None:
    with pytest.raises(ValueError, match="in a local folder"):
        Data(sources=(Source(path="s3://bucket/x"),), cache="s3://bucket/indexes")


# Images


def test_an_image_is_an_object(store: Store) -> None:
    data = encoded(0, "PNG")
    store.put("p/a.png", data)
    image = EncodedImage("a.png", Remote(store.url, "p/a.png"))
    for read in (lambda: width_and_height(image), lambda: decode(image), lambda: in_memory(image)):
        store.asked.clear()
        read()
        assert len(store.asked) == 1
    assert width_and_height(image) == (20, 12)
    assert (decode(image) == decode(EncodedImage("a.png", data))).all()
    assert in_memory(image) == EncodedImage("a.png", data)
    large = encoded(1, "BMP", (2000, 1500))
    assert len(large) > stores.PIECE
    store.put("p/large.bmp", large)
    assert in_memory(EncodedImage("large", Remote(store.url, "p/large.bmp"))) == EncodedImage("large", large)


def test_missing_or_huge_object_is_a_reject_failing_store_is_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a.png", encoded(0))
    there = EncodedImage("a.png", Remote(store.url, "a.png"))
    for read in (width_and_height, decode, in_memory):
        with pytest.raises(BadSample) as caught:
            read(EncodedImage("b.png", Remote(store.url, "b.png")))
        assert caught.value.cause == "missing_image"
        store.faults = [answers(403, "AccessDenied")]
        with pytest.raises(StorageFailed, match="access is denied"):
            read(there)
        monkeypatch.setattr("eyeline.data.images.image_files.MAX_FILE_BYTES", 10)
        with pytest.raises(BadSample) as caught:
            read(there)
        assert caught.value.cause == "file_too_large"
        monkeypatch.undo()
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_stores_are_asked_in_their_own_words(store: Store, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Google's and Azure's clients against the same server: for objects they ask alike."""
    monkeypatch.setenv("GOOGLE_BASE_URL", store.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{store.endpoint}/{store.bucket}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for kind in ("GOOGLE", "AZURE"):
        monkeypatch.setenv(f"{kind}_SKIP_SIGNATURE", "true")
        monkeypatch.setenv(f"{kind}_ALLOW_HTTP", "true")
    rows = [row("what?", "p 1/é.png"), row("what?", "absent.png")]
    store.put("box/x/rows.json", json.dumps(rows).encode())
    store.put("box/x/p 1/é.png", encoded(0, "PNG"))
    opened = open_source(Source(path=f"gs://{store.bucket}/box/x/*.json" if scheme == "gs" else "az://box/x/rows.json"))
    good, missing = (found for *_, found in opened.rows_in(0))
    assert isinstance(good, Sample) and isinstance(missing, Sample)
    assert width_and_height(good.images[0]) == (20, 12)
    assert in_memory(good.images[0]).source == encoded(0, "PNG")  # type: ignore[union-attr]
    with pytest.raises(BadSample) as caught:
        width_and_height(missing.images[0])
    assert caught.value.cause == "missing_image"
    store.put("box/x/rows.json", json.dumps(rows[:1]).encode())
    stores._process().recent.clear()
    with pytest.raises(StorageFailed, match=r"rows\.json has changed"):
        opened.container.file_of(0).read(0, 100)


# Training


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """The same rows in every container, and nine images."""
    made = tmp_path / "set"
    for n in range(9):
        draw(f"set/{n}.png", seed=n)
    (made / "rows.json").write_text(json.dumps(ROWS))
    (made / "tars").mkdir()
    for n in range(3):
        members = [(f"{n}{m}.{end}", data) for m in range(6) for end, data in (("jpg", encoded(6 * n + m)), ("json", TALK))]
        archive(made / "tars" / f"train-{n}.tar", members)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [{"image": {"bytes": encoded(n), "path": None}, "caption": f"a dot {n}"} for n in range(20)]
    )
    (made / "pq").mkdir()
    parquet.write_table(table, made / "pq" / "x.parquet", row_group_size=7)
    return made


SETS = ["rows.json", "tars", "pq"]  # images in files, in parts of files, and in rows


def reader(path: str, encoder: Encoder, rule: ImageRule, out: Path | None = None, images: str | None = None, **settings: Any) -> Reader:
    return reader_of(Data(sources=(Source(path=path, images=images),), max_reject_rate=1.0, **settings), encoder, rule, 0, out)


@pytest.mark.parametrize("name", SETS)
def test_what_is_found_of_data_is_what_is_found_of_files(folder: Path, store: Store, plain: Encoder, rule: ImageRule, name: str) -> None:
    store.put_folder(folder, "set")
    readers = [reader(f"{root}/{name}", plain, rule, validation_fraction=0.3) for root in (folder, f"{store.url}/set")]
    here, there = (data_report(r, BUDGET, THOROUGH) for r in readers)
    assert here.duplicates is not None and there.duplicates is not None and here.budgets
    apart = {"duplicates": None, "sources": ()}
    assert replace(there, **apart) == replace(here, **apart)
    assert replace(there.sources[0], path="") == replace(here.sources[0], path="")
    names = {"sample_examples": (), "image_examples": (), "overlaps": ()}
    assert replace(there.duplicates, **names) == replace(here.duplicates, **names)
    assert replace(there.duplicates.overlaps[0], examples=()) == replace(here.duplicates.overlaps[0], examples=())
    seen, again = (sample_previews(r, BUDGET, 5, thumbnails=True) for r in readers)
    assert [replace(s, source="") for s in seen] == [replace(s, source="") for s in again]


@pytest.mark.fresh_workers  # which have no client and no piece of the store yet
def test_workers_read_a_store_that_fails_now_and_then(folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    store.put_folder(folder, "set")

    def made(root: Any, **settings: Any) -> Reader:
        sources = tuple(Source(path=f"{root}/{name}") for name in ("rows.json", "tars"))
        return reader_of(Data(sources=sources, max_reject_rate=1.0, **settings), plain, rule, 0, tmp_path / "run")

    here = list(training_steps(made(folder), BUDGET, 2, 1))
    there = made(f"{store.url}/set", workers=2)
    for source, rows in enumerate(there.training.index.sources):
        for shard in range(len(rows.shards)):
            there.training.index.shard(source, shard)
    store.faults = [None, answers(503, "SlowDown"), None, None, bad.cuts, bad.resets]  # of what workers ask for
    assert_same_steps(list(training_steps(there, BUDGET, 2, 1)), here)
    assert not store.faults


@pytest.mark.fresh_workers
def test_data_in_a_store_are_prepared_and_read_there(folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    """From a store, into a folder, and that into a store: the batches are those of files."""
    wanted = list(training_steps(reader(f"{folder}/rows.json", plain, rule), BUDGET, 2, 2))
    store.put_folder(folder, "set")
    pack_offline(reader(f"{store.url}/set/rows.json", plain, rule), BUDGET, tmp_path / "out")
    store.put_folder(tmp_path / "out", "prepared")
    store.delete("set/rows.json")
    for place in (tmp_path / "out", f"{store.url}/prepared"):
        assert_same_steps(
            list(training_steps(reader(f"{store.url}/set/rows.json", plain, rule, prepared=str(place)), BUDGET, 2, 2)), wanted
        )
    there = reader(f"{store.url}/set/rows.json", plain, rule, prepared=f"{store.url}/prepared", workers=1)
    assert_same_steps(list(training_steps(there, BUDGET, 2, 2, wanted[1].state)), wanted[2:])
    with pytest.raises(Refused, match="is not a folder of prepared data"):
        reader(f"{store.url}/set/rows.json", plain, rule, prepared=f"{store.url}/set")
    [name] = {found.name for found in files_below(Remote(store.url, "prepared/index"), 0)}
    store.delete(f"prepared/index/{name[:2]}/{name}")
    with pytest.raises(StorageFailed, match=r"\.index"):
        list(training_steps(reader(f"{store.url}/set/rows.json", plain, rule, prepared=f"{store.url}/prepared"), BUDGET, 2, 2))


def test_a_sample_of_an_archive_costs_one_request(
    folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder(folder, "set")
    there = reader(f"{store.url}/set/tars", plain, rule, tmp_path / "run")
    list(training_steps(there, BUDGET, 2, 1))
    again = reader(f"{store.url}/set/tars", plain, rule, tmp_path / "run")  # indexes are there
    monkeypatch.setattr(stores, "GAP", -1)  # nothing so small is far enough apart to be no reading on
    stores._process.cache_clear()
    store.asked.clear()
    list(training_steps(again, BUDGET, 2, 1))
    assert len(store.asked) == 18
    spans = [n.removeprefix("bytes=").split("-") for n in store.of(".tar")]
    assert sum(int(end) + 1 - int(start) for start, end in spans) == sum(len(encoded(n)) for n in range(18))


def test_a_set_of_many_archives_is_opened_by_a_few_requests(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Encoder, rule: ImageRule
) -> None:
    whole = archive(
        tmp_path / "x.tar", [(f"{n}.{end}", data) for n in range(25) for end, data in (("jpg", encoded(n)), ("json", TALK))]
    ).read_bytes()
    for n in range(30):
        store.put(f"t/{n:02}.tar", gzip.compress(whole) if n == 7 else whole)
    monkeypatch.setattr(tars, "fingerprints", partial(fingerprints, hashed=0))
    store.asked.clear()
    rows = open_source(Source(path=f"{store.url}/t/*.tar"))
    assert len(rows.shards) == 30
    assert len(store.asked) <= 4
    index = Index((rows,), plain, rule, None)
    assert [n for n in range(30) if index.shard(0, n).rejects] == [7]


def test_indexing_a_large_archive_takes_few_requests(store: Store, tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    members = [(f"{n}.{end}", data) for n in range(120) for end, data in (("bmp", encoded(n, "BMP", (241, 241))), ("json", TALK))]
    path = archive(tmp_path / "x.tar", members)
    assert path.stat().st_size > 20 << 20
    store.put("x.tar", path.read_bytes())
    rows = open_source(Source(path=f"{store.url}/x.tar"))
    stores._process.cache_clear()
    store.asked.clear()
    Index((rows,), plain, rule, None).shard(0, 0)
    assert len(store.asked) <= 10


def test_images_in_a_store_and_rows_on_disk(folder: Path, store: Store, plain: Encoder, rule: ImageRule) -> None:
    for n in range(9):
        store.put(f"p/{n}.png", (folder / f"{n}.png").read_bytes())
    whole = [json.loads(json.dumps(r).replace('.png"', '.png"')) for r in ROWS]
    for r in whole:
        r["image"] = r["image"] and [f"{store.url}/p/{name}" if n else name for n, name in enumerate(r["image"])]
    (folder / "urls.json").write_text(json.dumps(whole))
    here = list(training_steps(reader(f"{folder}/rows.json", plain, rule), BUDGET, 1, 1))
    for name in ("rows.json", "urls.json"):
        there = list(training_steps(reader(f"{folder}/{name}", plain, rule, images=f"{store.url}/p"), BUDGET, 1, 1))
        for one, two in zip(here, there, strict=True):
            for a, b in zip(one.batches, two.batches, strict=True):
                assert (a.patches_PC == b.patches_PC).all() and (a.tokens_T == b.tokens_T).all()


def test_each_image_is_asked_for_once_for_its_index_and_once_a_visit(
    folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path
) -> None:
    store.put_folder(folder, "set")
    there = reader(f"{store.url}/set/rows.json", plain, rule, tmp_path / "run")
    store.asked.clear()
    there.training.index.shard(0, 0)
    assert sorted(path for _, path, _ in store.asked if "png" in path) == [f"/{store.bucket}/set/{n}.png" for n in range(9)]
    store.asked.clear()
    Index((there.training.index.sources[0],), plain, rule, tmp_path / "run" / "index").shard(0, 0)
    assert store.asked == []  # an index that is read asks for none


def test_images_are_asked_for_together(
    folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another they would be mostly waited for: each of these waits until others are asked for, too."""
    store.put_folder(folder, "set")
    there, stamp_of, meet = reader(f"{store.url}/set/rows.json", plain, rule, tmp_path / "run"), read_shard.stamp_of, threading.Barrier(3)

    def met(*of: Any, **more: Any) -> Any:
        meet.wait(30)
        return stamp_of(*of, **more)

    monkeypatch.setattr(read_shard, "stamp_of", met)  # nine images: three times three
    assert len(there.training.index.shard(0, 0).files) == 9


def test_absent_image_is_asked_for_again_changed_one_stops(
    folder: Path, store: Store, plain: Encoder, rule: ImageRule, tmp_path: Path
) -> None:
    store.put_folder(folder, "set")
    store.delete("set/8.png")
    path, out = f"{store.url}/set/rows.json", tmp_path / "run"
    first = reader(path, plain, rule, out)
    assert {cause for cause, *_ in first.training.index.shard(0, 0).rejects.values()} == {"missing_image"}
    store.put("set/8.png", (folder / "8.png").read_bytes())
    second = reader(path, plain, rule, out)
    assert not second.training.index.shard(0, 0).rejects
    store.put("set/3.png", encoded(99, "PNG"))
    stores._process().recent.clear()
    with pytest.raises(StorageFailed, match=r"set/3\.png has changed since it was opened"):
        list(training_steps(second, BUDGET, 1, 1))


def test_image_of_a_row_must_be_below_the_root(folder: Path, store: Store) -> None:
    names = ["../secret.png", "/etc/passwd", "s3://other/a.png", f"{store.url}/else/a.png", "https://x.org/a.png?sig=canary"]
    store.put("set/x.jsonl", "\n".join(json.dumps(row("q", name)) for name in names).encode())
    found = [found for *_, found in open_source(Source(path=f"{store.url}/set/x.jsonl")).rows_in(0)]
    assert [f.cause for f in found if isinstance(f, BadSample)] == [
        "outside_root",
        "outside_root",
        "remote_url",
        "outside_root",
        "remote_url",
    ]
    assert "canary" not in str(found)


def test_energon_and_easy_vqa_are_found_in_a_store(folder: Path, store: Store) -> None:
    store.put_folder(folder / "tars", "e")
    store.put("e/.nv-meta/split.yaml", b"split_parts: {train: [train-0.tar, train-2.tar], val: [train-1.tar]}\nexclude: []\n")
    rows = open_source(Source(path=f"{store.url}/e"))
    assert [shard.name for shard in rows.shards] == ["train-0.tar", "train-2.tar"]
    store.put("v/questions.json", json.dumps([["is it red?", "yes", 0]]).encode())
    store.put("v/images/0.png", encoded(0))
    assert open_source(Source(path=f"{store.url}/v/")).layout.name == "easy-vqa"


# Secrets


def test_no_secret_gets_out_whatever_happens(eyeline: Command, store: Store, tmp_path: Path, waits: list[float]) -> None:
    """Keys are in the environment, in answers of the store, and in URLs: not in what is printed, written, raised or sent to workers."""
    recipe = tiny_recipe(tmp_path / "made")
    recipe["stages"], recipe["evaluation"] = recipe["stages"][:1], None
    store.put_folder(tmp_path / "made" / "data", "data")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    source = "stages.0.data.sources.0.path"
    said: list[str] = []

    def run(*words: str, code: int) -> str:
        done = eyeline(words[0], str(tmp_path / "recipe.yaml"), *words[1:])
        said.append(done.out + done.err)
        assert done.code == code, said[-1]
        return said[-1]

    good = f"{source}={store.url}/data/data.json"
    assert f"{store.url}/data/data.json: llava" in run("check", good, code=0)
    run("train", good, code=0)
    for fault in [*NOT_PASSING.values(), (answers(500, SECRET), ""), (bad.cuts, "")]:
        store.always = fault[0]
        stores._process().recent.clear()
        run("check", good, code=5 if fault[1] == "" else 2)
    store.always = None
    rows = open_source(Source(path=f"{store.url}/data/data.json"))
    store.always = answers(403, "SignatureDoesNotMatch")
    stores._process().recent.clear()
    with pytest.raises(StorageFailed) as caught:
        list(rows.rows_in(0))
    said += ["".join(traceback.format_exception(caught.value)), repr(caught.value.__context__), repr(caught.value.__cause__), repr(rows)]
    store.always = None
    for url in (f"s3://{KEY}:{SECRET.replace('/', '')}@{store.bucket}/data.json", f"{store.url}/data.json?X-Amz-Credential={KEY}"):
        assert "has credentials in it" in run("check", f"{source}={url}", code=2)
        run("train", f"{source}={url}", f"out={tmp_path / 'other'}", code=2)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".index" for path in written)
    assert any(path.name == "recipe.yaml" and "run" in path.parts for path in written)
    for text in [*(s.encode() for s in said), *(path.read_bytes() for path in written), pickle.dumps(rows)]:
        assert b"CANARY" not in text
        assert b"canary" not in text
