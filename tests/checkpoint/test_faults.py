"""Kills, full disks and failing calls at every point of a save: the old checkpoint or the new one, whole, and no litter.

A child is forked for each point, so that a kill is a real one. That a kill loses nothing which was written does not show
that it was flushed: the order of flushes is checked apart.
"""

import errno
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import Piece, pieces_of
from eyeline.core.errors import StorageFailed
from eyeline.core.world import World
from tests.checkpoint.faults import FAILED, KILLED, WELL, arm, in_child, kill_me

FROZEN = torch.arange(12.0).reshape(3, 4)


def content(step: int) -> dict[str, list[Piece]]:
    return {"model": pieces_of({f"w{i}": torch.full((50,), float(step + i)) for i in range(3)}), "frozen": pieces_of({"tower": FROZEN})}


def save(folder: Path, step: int, save_total_limit: int = 1, best: bool = False) -> Path:
    words = {"frozen": "stage 0"}
    return store.save(
        folder,
        run="r",
        step=step,
        files=content(step),
        state={"step": step},
        save_total_limit=save_total_limit,
        best=best,
        fixed=words,
    )


def check_whole(folder: Path, allowed: set[int]) -> int:
    """The step of the newest checkpoint, which must be an allowed one and hold exactly what was saved then."""
    found = store.newest(folder, "r")
    assert found is not None
    assert found.step in allowed
    assert found.state == {"step": found.step}
    wanted = {k: v for held in content(found.step).values() for k, v, *_ in held}
    loaded = found.load(*found.names())
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[k], v) for k, v in wanted.items())
    return found.step


def test_a_kill_at_any_point_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    seen: list[int] = []
    for point in range(1, 400):
        folder = tmp_path / str(point)
        save(folder, 1, best=True)
        save(folder, 2)

        def doomed(folder: Path = folder, point: int = point) -> None:
            arm(folder, point, kill_me)
            save(folder, 3)  # deletes step 2

        code = in_child(doomed)
        if code == WELL:
            break
        assert code == KILLED, f"point {point}: the child ended by itself, code {code}"
        seen.append(check_whole(folder, {2, 3}))
        best = store.best(folder, "r")
        assert best is not None
        assert best.step == 1
        store.remove_leftovers(folder)
        assert all(p.name.startswith("step-") for p in folder.iterdir())
        save(folder, 4)
        assert check_whole(folder, {4}) == 4
    else:
        pytest.fail("the save never came to its end")
    assert seen == sorted(seen), "once the new one is there, no later kill may lose it"
    assert seen.count(2) > 10
    assert seen.count(3) > 3
    assert len(seen) > 25


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_failing_call_is_storage_failed_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    failures = 0
    for point in range(1, 400):
        folder = tmp_path / str(point)
        save(folder, 1)

        def doomed(folder: Path = folder, point: int = point) -> int:
            fired = arm(folder, point, fail)
            save(folder, 2)
            return 8 if fired else WELL

        code = in_child(doomed)
        check_whole(folder, {1, 2})
        if code == WELL:
            break
        # 8: the save survived, since a link may become a copy, a fixed file be written again, a deletion be left unfinished.
        assert code in (8, FAILED), f"point {point} raised something else"
        failures += code == FAILED
        if code == 8:
            check_whole(folder, {2})
            store.remove_leftovers(folder)
        litter = [p.name for p in folder.iterdir() if not p.name.startswith("step-")]
        assert litter == [], f"point {point} left {litter}"
    else:
        pytest.fail("the save never came to its end")
    assert failures > 12


def test_the_message_of_a_failure_has_the_path_the_need_and_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match=r"model\.safetensors \([\d,]+ bytes\): No space left on device; [\d,]+ bytes are free"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 500})())
    monkeypatch.setattr(store, "write_file", lambda *_: pytest.fail("something was written"))
    with pytest.raises(StorageFailed, match="No space left on device"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert check_whole(tmp_path, {1}) == 1


def test_room_is_asked_for_what_all_writers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of each of two writers fits, and both do not."""
    pieces = pieces_of({"w": torch.zeros(1000)})
    alone = store.bytes_to_write(store.start_draft(tmp_path, "r", 1), {"model": pieces}, 0, 2)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1.5 * alone})())
    store.begin(tmp_path, run="r", step=1, files={"model": pieces})
    both = World(0, 2, gather_patiently=lambda value: [value, value])
    with pytest.raises(StorageFailed, match=f"\\({2 * alone:,} bytes\\)"):
        store.begin(tmp_path, run="r", step=2, files={"model": pieces}, world=both)
    assert not list(tmp_path.glob(".step-00000002*"))


def test_a_file_size_limit_or_quota_shows_while_writing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        save(tmp_path, 2)

    assert in_child(limited) == FAILED
    assert [p.name[:14] for p in tmp_path.iterdir()] == ["step-00000001-"]
    assert check_whole(tmp_path, {1}) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    for kilobytes in (32, 48, 64, 96, 128):
        folder = tmp_path / str(kilobytes)
        folder.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], capture_output=True, check=False)
        if mounted.returncode:
            pytest.skip("this machine does not let tests mount")
        try:
            good, full = 0, False
            for step in range(1, 40):
                try:
                    save(folder / "checkpoints", step, save_total_limit=40)
                except StorageFailed as failure:
                    assert "bytes are free" in str(failure)  # noqa: PT017 - it need not be raised in every round
                    full = True
                    break
                good = step
            assert full, "the disk never filled up"
            assert good >= 1
            assert check_whole(folder / "checkpoints", {good}) == good
            assert all(p.name.startswith("step-") for p in (folder / "checkpoints").iterdir())
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="root reads everything; the child becomes the user nobody")
@pytest.mark.parametrize("which", ["model.safetensors", "manifest.json", "state.json"])
def test_an_unreadable_file_stops_and_does_not_fall_back(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, which: str) -> None:
    base = tmp_path_factory.getbasetemp()
    for folder in (tmp_path, base, base.parent):  # pytest's own folders: the user nobody may pass through
        folder.chmod(0o755)
    save(tmp_path / "x", 1, save_total_limit=2)
    newest = save(tmp_path / "x", 2, save_total_limit=2)
    (newest / which).chmod(0)

    def as_nobody() -> None:
        os.setuid(65534)
        assert not os.access(newest / which, os.R_OK), "the fault does not bite"
        store.newest(tmp_path / "x", "r")

    assert in_child(as_nobody) == FAILED


def test_everything_is_flushed_before_what_vouches_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        log.append(("flush", path.name))
        fsync(handle)

    def logged_rename(source: Path, target: Path) -> None:
        log.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    path = save(tmp_path, 2, save_total_limit=5)
    assert log == [
        ("flush", "model.safetensors"),
        ("flush", "state.json"),
        ("flush", "manifest.json"),
        ("flush", f".{path.name}.tmp"),
        ("rename", path.name),
        ("flush", tmp_path.name),
    ]
