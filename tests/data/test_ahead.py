"""Indexes that other processes make: the same steps, nothing left for the one that trains, and nothing lost when they die."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.image_rule import ImageRule
from eyeline.core.step import Step
from eyeline.data import workers
from eyeline.data.index_progress import index_all
from eyeline.data.loader import training_steps
from eyeline.data.plan import index
from eyeline.data.plan.index import Ahead, make_each
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from eyeline.data.workers import AHEAD, Workers
from tests.data.container_files import archive, encoded
from tests.data.indexes import opened, same
from tests.processes import children, gone

BUDGET = Budget(60, 64)
ONE = Workers(1, 1 << 20, 60.0, 60.0)
SHARDS, ROWS = 6, AHEAD + 20  # more than workers read ahead and bins that stay open


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    for n in range(SHARDS):
        names = [f"{k:02}" for k in range(ROWS)]
        images = {f"{k}.png": encoded(ROWS * n + int(k), "PNG") for k in names}
        archive(tmp_path / f"rows{n}.tar", sorted((images | {f"{k}.txt": f"said {n} {k}" for k in names}).items()))
    return tmp_path / "rows*.tar"


@pytest.fixture
def made_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shards that this process indexes."""
    calls: list[int] = []
    original = index.shard_index_of
    monkeypatch.setattr(index, "shard_index_of", lambda rows, shard, *rest: calls.append(shard) or original(rows, shard, *rest))
    return calls


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert gone(children() - before)


@pytest.fixture
def reader(archives: Path, plain: Encoder, rule: ImageRule) -> Callable[..., Reader]:
    def open_(folder: str, count: int, **more: Any) -> Reader:
        data = Data(sources=(Source(path=str(archives)),), cache=str(archives.parent / folder), workers=count, **more)
        return reader_of(data, plain, rule, 0)

    return open_


def opened_source(archives: Path) -> Rows:
    return open_source(Source(path=str(archives)))


def written(folder: Path) -> int:
    return len(list(folder.rglob("*.index")))


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def summary(step: Step) -> list[Any]:
    return [step.state, [(b.ids, b.tokens_T.tolist(), b.patches_PC.sum(1).tolist()) for b in step.batches]]


def test_steps_are_the_same_whoever_makes_the_indexes(reader, archives: Path, made_here: list[int]) -> None:
    here = [summary(step) for step in training_steps(reader("here", 0), BUDGET, 2, 2)]
    assert sorted(made_here) == list(range(SHARDS))
    made_here.clear()
    steps = training_steps(reader("there", 1), BUDGET, 2, 2)
    found = [summary(next(steps))]
    wait_for(lambda: written(archives.parent / "there") >= 2)
    wait_for(lambda: not list((archives.parent / "there").rglob(".*.lock")))
    assert found + [summary(step) for step in steps] == here


def test_a_window_that_was_made_ahead_is_not_made_here(reader, archives: Path, made_here: list[int]) -> None:
    """At every step the other process is given the time that a real step would take."""
    for step in training_steps(reader("i", 1), Budget(30, 64), 1, 1):  # a row a pack
        window = step.state["number"] - (step.state["done"] == 0)
        wait_for(lambda window=window: written(archives.parent / "i") >= (1, 2, 4, SHARDS)[min(window + 1, 3)])
    assert len(made_here) <= 1  # the first window's, unless the other process was there before


def test_all_at_once_by_all_workers(reader, archives: Path, made_here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    original = workers.Worker.__init__
    monkeypatch.setattr(workers.Worker, "__init__", lambda self, *rest: begun.append(1) or original(self, *rest))
    there = reader("i", 2)
    index_all(there)
    assert (made_here, len(begun), written(archives.parent / "i")) == ([], 2, SHARDS)
    index_all(there)
    assert len(begun) == 2  # no process is started where nothing is missing
    before = there.training.index
    alone = reader("j", 0)
    index_all(alone)
    assert sorted(made_here) == list(range(SHARDS))
    for shard in range(SHARDS):
        assert same(before.shard(0, shard), alone.training.index.shard(0, shard))


def test_validation_is_indexed_by_workers(archives: Path, plain: Encoder, rule: ImageRule, made_here: list[int]) -> None:
    source = (Source(path=str(archives)),)
    data = Data(sources=source, validation=source, cache=str(archives.parent / "v"), workers=1)
    there = [batch.ids for batch in validation_batches(reader_of(data, plain, rule, 0), BUDGET)]
    assert made_here == []
    assert there == [
        b.ids for b in validation_batches(reader_of(data.model_copy(update={"workers": 0, "cache": None}), plain, rule, 0), BUDGET)
    ]


def test_run_continues_when_prefetching_crashes(archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path, capsys) -> None:
    made = opened(opened_source(archives), plain, rule, tmp_path / "i")
    before = children()
    going = Ahead.of(made, ONE)
    going.start([(0, 0)])
    wait_for(lambda: written(tmp_path / "i") == 1)
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
    assert gone(children() - before)
    going.start([(0, 1)])
    going.start([(0, 2)])
    assert capsys.readouterr().out.count("has crashed (SIGKILL)") == 1
    assert len(made.shard(0, 1)) == ROWS
    going.close()


def test_it_ends_when_nothing_is_missing(archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    made = opened(opened_source(archives), plain, rule, tmp_path / "i")
    before = children()
    going = Ahead.of(made, ONE)
    going.start([(0, 0), (0, 1)])
    assert len(children() - before) == 1
    wait_for(lambda: written(tmp_path / "i") == 2)
    going.start([(0, 1), (0, 0)])
    assert gone(children() - before)
    going.start([(0, 1)])
    assert children() <= before


def test_a_defect_in_it_ends_the_run(archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch) -> None:
    made = opened(opened_source(archives), plain, rule, tmp_path / "i")
    monkeypatch.setattr(index, "Making", Defective)
    going = Ahead.of(made, ONE)
    going.start([(0, 0)])
    with pytest.raises(RuntimeError, match="made up"):
        wait_for(lambda: going.start([(0, 1)]) or False)
    going.close()


def test_it_ends_with_the_steps_whatever_it_is_at(reader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(index, "Making", Endless)
    steps = training_steps(reader("i", 1), BUDGET, 1, None)
    next(steps)
    assert len(children() - before) == 2
    steps.close()
    assert gone(children() - before)


class Endless(index.Making):
    def __call__(self, wanted: Any, at: Any) -> None:
        time.sleep(1000)


class Defective(index.Making):
    def __call__(self, wanted: Any, at: Any) -> None:
        raise AssertionError("made up")


def test_what_stops_a_run_is_met_where_it_is_needed(archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    """A file that has changed is StorageFailed there, which is no defect, and here again."""
    rows = opened_source(archives)
    made = opened(rows, plain, rule, tmp_path / "i")
    os.utime(archives.parent / "rows0.tar", (1, 1))
    going = Ahead.of(made, ONE)
    going.start([(0, 0)])
    going.start([(0, 1)])
    wait_for(lambda: written(tmp_path / "i") == 1)
    going.start([(0, 2)])
    with pytest.raises(index.StorageFailed, match="changed"):
        made.shard(0, 0)
    going.close()


def test_without_a_folder_or_workers_there_is_no_process(archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    rows, before = opened_source(archives), children()
    for made, how in ((opened(rows, plain, rule), ONE), (opened(rows, plain, rule, tmp_path / "i"), Workers(0, 1, 1.0, 1.0))):
        going = Ahead.of(made, how)
        going.start([(0, 0), (0, 1)])
        assert children() <= before
        going.share([(0, n) for n in range(SHARDS)], 3, 4)
        assert made._open.keys() == [(0, 3)]
    assert list(make_each(opened(rows, plain, rule, tmp_path / "j"), [(0, 0)], Workers(0, 1, 1.0, 1.0))) == [None]
    assert written(tmp_path / "j") == 1


def test_unreadable_folder_is_named_by_its_reader(
    archives: Path, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Root may look anywhere, so the system's answers are made.)"""
    made = opened(opened_source(archives), plain, rule, tmp_path / "i")
    path, stat = str(made._path(made._identity(0, 0))), os.stat

    def refuse(of: Any, *args: Any, **more: Any) -> Any:
        if str(of) == path:
            raise PermissionError(13, "Permission denied")
        return stat(of, *args, **more)

    monkeypatch.setattr(os, "stat", refuse)
    assert made.absent(0, 0)
