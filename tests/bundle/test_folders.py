"""Folders appear whole or not at all, wherever the writer is killed or fails."""

import os
from pathlib import Path

import pytest

from eyeline.bundle.folders import new_folder
from eyeline.core.errors import Refused, StorageFailed
from tests.checkpoint.faults import FAILED, KILLED, WELL, arm, in_child, kill_me

FILES = {"a.json": "1" * 5000, "language/b.json": "2", "language/c/d.txt": ""}


def write(target: Path) -> None:
    with new_folder(target) as folder:
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("empty_before", [True, False])
def test_a_kill_at_any_point_leaves_all_or_nothing(tmp_path: Path, empty_before: bool) -> None:
    outcomes = []
    for point in range(1, 100):
        target = tmp_path / str(point) / "model"
        target.parent.mkdir()
        if empty_before:
            target.mkdir()

        def doomed(target: Path = target, point: int = point) -> None:
            arm(target.parent, point, kill_me)
            write(target)

        code = in_child(doomed)
        if code == WELL:
            break
        assert code == KILLED
        outcomes.append(target.exists() and any(target.iterdir()))
        if outcomes[-1]:
            assert content(target) == FILES
        else:
            write(target)
            assert content(target) == FILES
    else:
        pytest.fail("the writer never came to its end")
    assert outcomes.count(False) > 10
    assert outcomes.count(True) >= 1


def test_a_call_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, os.strerror(28))

    failures = 0
    for point in range(1, 100):
        target = tmp_path / str(point) / "model"
        target.parent.mkdir()

        def doomed(target: Path = target, point: int = point) -> int:
            fired = arm(target.parent, point, fail)
            write(target)
            return 8 if fired else WELL

        code = in_child(doomed)
        if code == WELL:
            break
        assert code in (8, FAILED), point  # 8: mkdir of a folder that is there already does not mind
        failures += code == FAILED
        assert [p.name for p in target.parent.iterdir()] in ([], ["model"])
        if target.exists():
            assert content(target) == FILES
    else:
        pytest.fail("the writer never came to its end")
    assert failures > 10


def test_the_failure_says_where(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageFailed, match=r"could not write .*/model: No space left on device; [\d,]+ bytes are free"),
        new_folder(tmp_path / "model"),
    ):
        raise OSError(28, os.strerror(28))


def test_what_is_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    write(tmp_path / "model")
    with pytest.raises(Refused, match="exists already"):
        write(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_came_there_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(StorageFailed, match="not empty"), new_folder(tmp_path / "model"):
        (tmp_path / "model" / "other.txt").write_text("someone else's")
    assert content(tmp_path) == {"model/other.txt": "someone else's"}
