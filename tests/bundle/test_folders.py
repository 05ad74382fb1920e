"""Folders appear whole or not at all, wherever the writer is killed or fails."""

import grp
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from eyeline.bundle.folders import new_folder, warn_of_others
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


# ---- run folders of others


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("run", "run/model", "run/checkpoints", "run/checkpoints/step-1"):
        (tmp_path / name).mkdir(mode=0o755)
    for name in ("recipe.yaml", "model/eyeline.json", "checkpoints/step-1/weights.safetensors"):
        (tmp_path / "run" / name).write_text("")
        (tmp_path / "run" / name).chmod(0o644)
    return tmp_path / "run"


def test_a_run_folder_of_ones_own_is_not_warned_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "link").symlink_to("recipe.yaml")
    warn_of_others(run)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["", "recipe.yaml", "model/eyeline.json", "checkpoints", "checkpoints/step-1/weights.safetensors"])
def test_a_run_folder_that_others_may_write_is_warned_of(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).chmod(0o757)
    warn_of_others(run)
    found = capsys.readouterr().err
    assert found == f"warning: {run / name} can be written by other users: they can change the run. To keep them out: chmod -R go-w {run}\n"


def test_a_group_may_write_if_it_is_the_users_alone(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "recipe.yaml").chmod(0o664)
    (run / "model").chmod(0o775)
    name = pwd.getpwuid(os.geteuid()).pw_name
    for known, members, warned in ((name, [], False), (name, ["other"], True), ("staff", [], True)):
        group = grp.struct_group((known, "x", 0, members))
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        warn_of_others(run)
        assert ("can be written by other users, and so does 1 more" in capsys.readouterr().err) == warned


def test_a_run_folder_of_another_owner_is_warned_of(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12_345_678)
    warn_of_others(run)
    owner = pwd.getpwuid(os.getuid()).pw_name
    assert f"warning: {run} belongs to another user ({owner}), and so do 6 more" in capsys.readouterr().err


def test_checkpoint_deleted_while_reading_is_skipped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trains removes old checkpoints."""
    scandir = os.scandir

    def after_removal(path: str | os.PathLike[str]) -> Any:
        if Path(path).name == "step-1":
            Path(path, "weights.safetensors").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", after_removal)
    warn_of_others(run)
    assert not (run / "checkpoints/step-1").exists()
