"""Storage that fails under a run: full, gone, or taken. It stops with a message that says so, and resumes from what was saved."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import eyeline.train.loop as loop
import eyeline.train.stage as stage
from eyeline.bundle.bundle import open_bundle
from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.core.errors import StorageFailed
from eyeline.core.files import append_line, read_lines, storage_failed
from eyeline.train.stop import sole_owner
from tests.train.ends import end_of
from tests.train.recipe import tiny_run


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let tests mount")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up_at_any_moment_of_a_run(tmp_path: Path) -> None:
    """At the tokenizer, at the first checkpoint, at a later one: the same command resumes once there is room."""
    loop.train(tiny_run(tmp_path, "save_steps=1"))
    whole = end_of(tiny_run(tmp_path))
    for kilobytes in (0, 4, 16, 100, 300):
        disk = tmp_path / f"disk{kilobytes}"
        with small_disk(disk, kilobytes or 4):
            if not kilobytes:
                (disk / "full").write_bytes(bytes(4096))
            run = tiny_run(tmp_path, "save_steps=1", f"out={disk / 'run'}")
            with pytest.raises(StorageFailed, match="bytes are free"):
                loop.train(run)
            assert not [path for path in disk.rglob(".*") if path.name.startswith(".step")]
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
            loop.train(run)
            assert end_of(run) == whole


@pytest.mark.parametrize(
    ("verb", "number", "words"),
    [
        (
            "write",
            errno.ENOSPC,
            r" \(7 bytes\): No space left on device; [\d,]+ bytes are free there\. Make room or choose another folder\.$",
        ),
        (
            "write",
            errno.EACCES,
            r" \(7 bytes\): Permission denied\. Give the user who runs this permission to use it, or choose another folder\.$",
        ),
        ("write", errno.ENOENT, r" \(7 bytes\): No such file or directory\. Choose another folder\.$"),
        ("read", errno.EMFILE, r": Too many open files\. Allow more open files: ulimit -n 4096\.$"),
        ("read", errno.ENOENT, r": No such file or directory\. Put it back, or give another path\.$"),
        ("read", errno.EIO, r": Input/output error\. Check its store, then start again\.$"),
    ],
)
def test_failures_are_reported_with_their_remedy(tmp_path: Path, verb: str, number: int, words: str) -> None:
    error = OSError(number, os.strerror(number))
    assert re.search(words, str(storage_failed(verb, tmp_path / "x", error, 7 if verb == "write" else None)))


def test_a_run_folder_that_is_deleted_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without the rest of the run would be of no use: training on would be for nothing."""
    original = loop.update

    def update(*args, step: int, **more):
        if step == 5:
            shutil.rmtree(tmp_path / "run")
        return original(*args, step=step, **more)

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(StorageFailed, match="No such file"):
        loop.train(tiny_run(tmp_path, "save_steps=1"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_trains_can_be_read_at_any_time(tmp_path: Path) -> None:
    """Another process saves and deletes as fast as it can, and keeps one: whatever is opened stays until it is loaded."""
    folder = tmp_path / "run" / "checkpoints"
    loop.train(tiny_run(tmp_path, "stages.whole.steps=1", "stages.adapt.steps=1", "save_total_limit=1"))
    first = store.newest(folder)
    assert first is not None
    tensors, state, run = first.load("model"), first.state, first.manifest.run
    child = os.fork()
    if child == 0:
        for step in range(3, 10_000):
            files = {"model": pieces_of(tensors), "frozen": [], "optimizer": []}
            store.save(folder, run=run, step=step, files=files, state=state, save_total_limit=1)
        os._exit(1)
    try:
        steps = set()
        for _ in range(60):
            opened = open_bundle(tmp_path / "run").checkpoint
            assert opened is not None
            time.sleep(0.01)
            assert opened.load(*opened.names()).keys() >= tensors.keys()
            steps.add(opened.step)
        assert len(steps) > 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    del opened
    store.prune(folder, run, 1)
    assert len(list(folder.glob("step-*"))) == 1, "a spared checkpoint is deleted once no reader holds it"


def test_a_place_where_there_can_be_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageFailed, match="could not create"):
        loop.train(tiny_run(tmp_path, f"out={tmp_path / 'file' / 'run'}"))
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageFailed, match="could not lock"), sole_owner(tmp_path):
        pass


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path) -> None:
    """A full disk or a kill leaves a part of a line; what is appended later must not be joined to it."""
    path = tmp_path / "lines.jsonl"
    for torn in ("", '{"n": 1', '{"n": 0}\n{"n'):
        path.write_text(torn)
        append_line(path, {"n": 2})
        append_line(path, {"n": 3})
        assert read_lines(path)[-2:] == [{"n": 2}, {"n": 3}]
        assert len(read_lines(path)) == 2 + torn.count("\n")


def test_data_that_end_before_what_was_counted_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that vanish after the epochs were counted make fewer packs."""
    run = tiny_run(tmp_path, "stages.whole.steps=null", "stages.whole.epochs=3", "save_steps=4")
    count = stage.count_steps
    with monkeypatch.context() as patch:
        patch.setattr(stage, "count_steps", lambda *of: count(*of) + 2)
        with pytest.raises(StorageFailed, match=r"stage whole ended after 6 steps, but 8 were planned"):
            loop.train(run)
    assert not list((tmp_path / "run" / "index" / "counts").iterdir())  # it is counted again
    loop.train(run)
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 6 + 4
