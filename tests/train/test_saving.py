"""Checkpoints that a thread writes while training continues."""

import threading
from pathlib import Path
from typing import Any

import pytest

from eyeline.checkpoint import store
from eyeline.core.errors import StorageFailed
from eyeline.train import loop
from eyeline.train.run import Run
from tests.train.recipe import tiny_run


def run_of(folder: Path, name: str, *overrides: str) -> Run:
    return tiny_run(folder, f"out={folder / name}", "save_steps=2", "save_total_limit=10", "save_minutes=null", *overrides)


def saved(run: Run) -> dict[int, dict[str, str]]:
    """Step -> the digests of the files of its checkpoint."""
    found = [store.verify(path) for path in (Path(str(run.out)) / "checkpoints").iterdir()]
    return {one.step: {name: file.sha256 for name, file in one.manifest.files.items()} for one in found}


def test_what_is_written_meanwhile_is_what_was_there_when_it_was_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing of step 2 is held up until step 4 has been computed: so training does not wait for it, nor change what it writes."""
    waiting, later = run_of(tmp_path, "waiting"), run_of(tmp_path, "later", "async_save=true")
    loop.train(waiting)
    write, update, computed, steps = store.write, loop.update, threading.Event(), list[int]()

    def held(*args: Any, **how: Any) -> store.Share:
        if threading.current_thread() is not threading.main_thread():
            assert computed.wait(60)
        return write(*args, **how)

    def counted(*args: Any, **how: Any) -> Any:
        steps.append(1)
        report = update(*args, **how)
        if len(steps) == 4:
            computed.set()
        return report

    monkeypatch.setattr(store, "write", held)
    monkeypatch.setattr(loop, "update", counted)
    loop.train(later)
    assert saved(later) == saved(waiting)


def test_what_a_thread_could_not_write_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checkpoint before it as it was, and nothing left of the attempt. The same command resumes to the same end."""
    whole, run = run_of(tmp_path, "whole"), run_of(tmp_path, "run", "async_save=true", "stages.whole.steps=6")
    loop.train(run_of(tmp_path, "whole", "stages.whole.steps=6"))
    write, calls = store.write, list[int]()

    def failing(*args: Any, **how: Any) -> store.Share:
        calls.append(1)
        if len(calls) == 2:
            raise StorageFailed("a test has no room for this")
        return write(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", failing)
        with pytest.raises(StorageFailed, match="a test has no room for this"):
            loop.train(run)
    assert list(saved(run)) == [2]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    loop.train(run)
    assert saved(run)[10] == saved(whole)[10]


def test_a_run_that_fails_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training fails in the step after the one whose checkpoint is being written."""
    update, write, failed, steps = loop.update, store.write, threading.Event(), list[int]()

    def held(*args: Any, **how: Any) -> store.Share:
        assert failed.wait(60)
        return write(*args, **how)

    def failing(*args: Any, **how: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise StorageFailed("a test fails here")
        return update(*args, **how)

    monkeypatch.setattr(store, "write", held)
    monkeypatch.setattr(loop, "update", failing)
    with pytest.raises(StorageFailed, match="a test fails here"):
        loop.train(run_of(tmp_path, "run", "async_save=true"))
    left = list((tmp_path / "run" / "checkpoints").iterdir())
    failed.set()
    assert not left
