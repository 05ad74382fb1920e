"""Fetching: the same tensors in any process; images that kill decoders, files that vanish and stores that fail, to the end of a run."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyeline.core.batch import Batch
from eyeline.core.errors import StorageFailed
from eyeline.core.files import read_lines
from eyeline.core.image_rule import ImageRule
from eyeline.data import loader, validation
from eyeline.data.containers.container import File
from eyeline.data.containers.tars import Tars
from eyeline.data.counts import count_steps
from eyeline.data.fetch import fetch
from eyeline.data.loader import training_steps
from eyeline.data.plan.shard_index import ShardIndex
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from tests.data.container_files import archive, encoded, parquet_file
from tests.data.failing_jobs import Mined
from tests.data.llava_rows import BUDGET
from tests.data.same_batches import assert_same, assert_same_steps, flat
from tests.processes import children

MINES = {3: "crash", 7: "hang", 11: "memory"}  # what the image of a row does to its decoder
CAUSES = {3: "decoder_crashed", 7: "decoder_hung", 11: "decoder_memory"}


def rows(count: int, mines: dict[int, str]) -> list[tuple[str, bytes]]:
    """(answer, image) of each row."""
    return [(f"answer {n}", encoded(n, "PNG") + (f" MINE {mines[n]}".encode() if n in mines else b"")) for n in range(count)]


def as_files(folder: Path, rows: list[tuple[str, bytes]]) -> str:
    for n, (_, data) in enumerate(rows):
        (folder / f"{n}.png").write_bytes(data)
    talk = [
        {"image": f"{n}.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": text}]}
        for n, (text, _) in enumerate(rows)
    ]
    (folder / "rows.json").write_text(json.dumps(talk))
    return str(folder / "rows.json")


def as_tar(folder: Path, rows: list[tuple[str, bytes]]) -> str:
    members: list[tuple[str, Any]] = []
    for n, (text, data) in enumerate(rows):
        members += [(f"{n}.png", data), (f"{n}.txt", text)]
    return str(archive(folder / "rows.tar", members))


def as_parquet(folder: Path, rows: list[tuple[str, bytes]]) -> str:
    return str(parquet_file(folder / "rows.parquet", [{"image": {"bytes": data, "path": None}, "caption": text} for text, data in rows], 5))


FORMS: dict[str, Callable[[Path, list[tuple[str, bytes]]], str]] = {"files": as_files, "tar": as_tar, "parquet": as_parquet}


@pytest.fixture
def open_reader(plain: Encoder, rule: ImageRule) -> Callable[..., Reader]:
    def make(path: str, out: Path | None = None, **settings: Any) -> Reader:
        return reader_of(Data(**{"sources": (Source(path=path),), "max_reject_rate": 1.0, **settings}), plain, rule, 0, out)

    return make


def number(id: str) -> int:
    """The number of a row in the whole file; the groups of the Parquet file have five."""
    name, _, row = id.partition("#")
    return int(row) + (5 * int(name.partition("[")[2].rstrip("]")) if "[" in name else 0)


def labelled(batch: Batch) -> dict[int, list[int]]:
    """The targets of each row."""
    assert batch.labels_L is not None
    spans = zip(batch.ids, batch.cu_S1.tolist(), batch.cu_S1.tolist()[1:], strict=False)
    inside = {number(id): (batch.rows_L >= start) & (batch.rows_L < end) for id, start, end in spans}
    return {row: batch.labels_L[mask].tolist() for row, mask in inside.items()}


@pytest.mark.parametrize("form", ["tar"])
def test_images_that_crash_decoders_are_rejected_alone(open_reader, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a resumed run knows them: it does not try them again, and makes the same batches."""
    path = FORMS[form](tmp_path, rows(23, MINES))
    sound = flat(training_steps(open_reader(path), BUDGET, 1, 2))
    (tmp_path / "run").mkdir()
    real = loader.fetched_in_order
    with monkeypatch.context() as patch:
        patch.setattr(loader, "fetched_in_order", lambda asked, fetch, *rest: real(asked, Mined(fetch), *rest))  # type: ignore[arg-type]
        reader = open_reader(path, tmp_path / "run", workers=2, decode_timeout=2.0, read_ahead=1)
        steps = list(training_steps(reader, BUDGET, 1, 2))
    assert children() == set()
    assert reader.rejects.counts == dict.fromkeys(CAUSES.values(), 1)  # of different rows, though there are two epochs
    lines = read_lines(tmp_path / "run" / "rejects.jsonl")
    assert {number(line["id"]): line["cause"] for line in lines} == CAUSES
    for one, two in zip(sound, flat(steps), strict=True):
        assert one.ids == two.ids  # every slot is kept: each row once an epoch, as it was planned
        assert labelled(two) == {row: [] if row in MINES else labels for row, labels in labelled(one).items()}
        if not {number(id) for id in one.ids} & MINES.keys():
            assert_same(one, two)

    def untouched(item: Any) -> Any:
        assert all(f" MINE {MINES[n]}".encode() not in encoded_bytes(item) for n in (3, 7))
        return held(item)

    def encoded_bytes(item: Any) -> bytes:
        source = held(item).source
        assert isinstance(source, bytes)
        return source

    held = fetch.in_memory
    monkeypatch.setattr(fetch, "in_memory", untouched)
    monkeypatch.setattr(loader, "fetched_in_order", lambda asked, fetch, *rest: real(asked, _Starved(fetch), *rest))  # type: ignore[arg-type]
    for at in (0, len(steps) // 2):
        again = open_reader(path, tmp_path / "run")
        assert_same_steps(list(training_steps(again, BUDGET, 1, 2, json.loads(json.dumps(steps[at].state)))), steps[at + 1 :])
    assert read_lines(tmp_path / "run" / "rejects.jsonl") == lines


def test_crashing_image_rejects_its_image_group_only(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows share each image, and are tried one by one: the parts of a job are rows, of whichever visit."""
    images = [data for _, data in rows(5, {1: "crash"})]
    for n, data in enumerate(images):
        (tmp_path / f"{n}.png").write_bytes(data)
    talk = [
        {"image": f"{n // 2}.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": f"{n}"}]}
        for n in range(10)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(talk))
    real = loader.fetched_in_order
    monkeypatch.setattr(loader, "fetched_in_order", lambda asked, fetch, *rest: real(asked, Mined(fetch), *rest))
    reader = open_reader(str(tmp_path / "rows.json"), max_samples_per_image=2, workers=1)
    found = {row: labels for batch in flat(training_steps(reader, BUDGET, 1, 1)) for row, labels in labelled(batch).items()}
    assert [row for row, labels in sorted(found.items()) if not labels] == [2, 3]
    assert len(found) == 10
    assert reader.rejects.counts == {"decoder_crashed": 2}


class _Starved(Mined):
    """In this process, which has no limit of memory: the decoder says that it has reached one."""

    def __call__(self, job: Any, at: Any = lambda *_: None) -> Any:
        from tests.data import failing_jobs

        before = failing_jobs.HAPPENS["memory"]
        failing_jobs.HAPPENS["memory"] = lambda _: failing_jobs.fail(MemoryError())
        try:
            return super().__call__(job, at)
        finally:
            failing_jobs.HAPPENS["memory"] = before


def test_validation_survives_its_images_too(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_files(tmp_path, rows(9, {3: "crash"}))
    real = loader.fetched_in_order
    (tmp_path / "run").mkdir()
    reader = open_reader(path, tmp_path / "run", validation=(Source(path=path),), workers=1)

    def unlabelled(of: Reader) -> list[int]:
        found = {row: labels for batch in validation_batches(of, BUDGET) for row, labels in labelled(batch).items()}
        assert len(found) == 9
        return [row for row, labels in found.items() if not labels]

    with monkeypatch.context() as patch:
        patch.setattr(validation, "fetched_in_order", lambda asked, fetch, *rest: real(asked, Mined(fetch), *rest))
        assert unlabelled(reader) == [3]
    assert unlabelled(reader) == [3]  # without another death: nothing would kill it now
    assert unlabelled(open_reader(path, tmp_path / "run", validation=(Source(path=path),))) == [3]
    assert reader.rejects.counts == {}


def test_a_store_that_does_not_answer_stops_the_run(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is only slow does not, however short decoding may take."""
    real = loader.fetched_in_order
    monkeypatch.setattr(loader, "fetched_in_order", lambda asked, fetch, *rest: real(asked, Mined(fetch), *rest))
    path = as_files(tmp_path, rows(9, {3: "slow store:4"}))
    settings = {"workers": 1, "decode_timeout": 2.0}
    slow = open_reader(path, **settings)
    assert len(flat(training_steps(slow, BUDGET, 1, 1))) >= 2
    assert slow.rejects.counts == {}
    with pytest.raises(StorageFailed, match="could not be read within 2 s"):
        list(training_steps(open_reader(path, read_timeout=2.0, **settings), BUDGET, 1, 1))
    assert children() == set()


# Between the plan and its fetching


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_vanishes_after_it_was_planned_keeps_its_place(open_reader, tmp_path: Path, workers: int) -> None:
    path = as_files(tmp_path, rows(9, {}))
    reader = open_reader(path, workers=workers)
    steps = training_steps(reader, BUDGET, 1, 1)
    done = [next(steps)]
    gone = next(n for n in range(9) if not {n} & {number(id) for id in done[0].batches[0].ids})
    steps.close()
    (tmp_path / f"{gone}.png").unlink()
    rest = list(training_steps(reader, BUDGET, 1, 1, done[0].state))
    assert {row for batch in flat([*done, *rest]) for row, labels in labelled(batch).items() if labels} == set(range(9)) - {gone}
    assert reader.rejects.counts == {"missing_image": 1}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_an_archive_that_is_cut_while_it_is_used_stops_the_run(open_reader, tmp_path: Path, form: str, workers: int) -> None:
    path = Path(FORMS[form](tmp_path, rows(23, {})))
    reader = open_reader(str(path), workers=workers)
    first = next(training_steps(reader, BUDGET, 1, None))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(StorageFailed, match=rf"{path.name} has changed since it was opened"):
        list(training_steps(open_reader_again(reader), BUDGET, 1, 2, first.state))


def open_reader_again(reader: Reader) -> Reader:
    """The same reader with nothing decoded remembered."""
    reader.fetches.clear()
    for rows in reader.training.index.sources:
        if hasattr(rows.container, "_kept"):
            rows.container._kept.clear()  # type: ignore[attr-defined]
    return reader


def test_a_store_that_fails_now_and_then_changes_nothing(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_files(tmp_path, rows(9, {}))
    wanted = list(training_steps(open_reader(path), BUDGET, 1, 1))
    real, asked, waits = fetch.in_memory, 0, []

    def held(item: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked % 3:
            raise StorageFailed("could not read it") from OSError(5, "Input/output error")
        return real(item)

    monkeypatch.setattr(fetch, "in_memory", held)
    monkeypatch.setattr("eyeline.data.containers.container.time.sleep", waits.append)
    assert_same_steps(list(training_steps(open_reader(path, read_retries=2), BUDGET, 1, 1)), wanted)
    assert len(waits) == 18
    with pytest.raises(StorageFailed, match="Tried 2 times"):
        list(training_steps(open_reader(path, read_retries=1), BUDGET, 1, 1))


@pytest.mark.parametrize("share", [1, 3])
def test_with_an_index_nothing_is_read_but_images(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    """Those of a sample in one request, though texts are between them; and the tensors are those of rows that are read."""
    members: list[tuple[str, Any]] = []
    for n in range(12):
        said = [{"from": "human", "value": "<image> <image>?"}, {"from": "gpt", "value": f"answer {n}"}]
        row = json.dumps({"images": ["b.png", "a.png"], "conversations": said})
        members += [(f"{n}.a.png", encoded(n, "PNG")), (f"{n}.json", row), (f"{n}.b.png", encoded(40 + n, "PNG"))]
    path = str(archive(tmp_path / "rows.tar", members))
    settings = {"max_samples_per_image": share, "cache": str(tmp_path / "index")}
    with monkeypatch.context() as patch:
        patch.setattr(ShardIndex, "media", lambda *_: None)
        wanted = list(training_steps(open_reader(path, **settings), BUDGET, 1, 1))
    reader = open_reader(path, **settings)
    count_steps(reader, BUDGET, 1, 1)
    read, asked = File.read, list[tuple[int, int]]()
    monkeypatch.setattr(Tars, "row", lambda *_: pytest.fail("a row was read"))
    monkeypatch.setattr(File, "read", lambda self, start, length: asked.append((start, length)) or read(self, start, length))
    assert_same_steps(list(training_steps(reader, BUDGET, 1, 1)), wanted)
    assert len(asked) == len(set(asked)) == 12


def test_a_job_says_about_how_much_its_batch_holds(open_reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which bounds what workers read ahead: of images, and of text alone."""
    said: list[tuple[int, int]] = []

    def noted(asked: Any, fetch: Any, workers: Any, verdicts: Any, group: Any) -> Any:
        for mark, groups in asked:
            job = fetch.job(groups, verdicts)
            done = fetch(job)
            tensors = [tensor for tensor in vars(done.batch).values() if isinstance(tensor, torch.Tensor)]
            if done.batch.ids:  # of a pack whose samples cannot be decoded only padding is left
                said.append((job.bytes, sum(tensor.nbytes for tensor in tensors)))
            yield mark, done

    monkeypatch.setattr(loader, "fetched_in_order", noted)
    list(training_steps(open_reader(as_files(tmp_path, rows(23, {}))), BUDGET, 1, 1))
    talk = [{"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "a b c " * 9}]} for n in range(23)]
    (tmp_path / "text.json").write_text(json.dumps(talk))
    list(training_steps(open_reader(str(tmp_path / "text.json")), BUDGET, 1, 1))
    assert len(said) > 10
    assert all(1 <= job / batch < 2 for job, batch in said)


def test_what_travels_to_a_worker_is_small(open_reader, tmp_path: Path) -> None:
    """Places, not rows: a worker reads them itself."""
    path = as_parquet(tmp_path, rows(23, {}))
    reader = open_reader(path)
    next(training_steps(reader, BUDGET, 1, None))
    [made] = reader.fetches.values()
    assert len(pickle.dumps(dataclasses.replace(made, encoder=None))) < 5000  # type: ignore[arg-type]
