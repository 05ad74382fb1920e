"""Checkpoints: what was saved is what is loaded, what is damaged is refused by name, and the last good one is never lost."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import Piece, pieces_of
from eyeline.core.errors import Refused

Capture = pytest.CaptureFixture[str]


def sets(step: int) -> dict[str, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(step)
    return {
        "model": {"a.weight": torch.randn(3, 4, generator=rng), "b": torch.tensor(step), "half": torch.randn(5, generator=rng).bfloat16()},
        "optimizer": {"a.weight/exp_avg": torch.randn(3, 4, generator=rng), "rng": torch.randint(0, 255, (9,), dtype=torch.uint8)},
    }


def held(files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[Piece]]:
    return {name: pieces_of(tensors) for name, tensors in files.items()}


def save(folder: Path, step: int, *, run: str = "run", save_total_limit: int = 9, best: bool = False) -> Path:
    state = {"step": step, "loader": {"epoch": 1, "bins": [[1, 2], []]}, "x": 0.1 + step}
    return store.save(
        folder,
        run=run,
        step=step,
        files=held(sets(step)),
        state=state,
        save_total_limit=save_total_limit,
        best=best,
    )


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[1]) for p in folder.glob("step-*"))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 100)
    assert path.name.startswith("step-00000100-")
    found = store.newest(tmp_path / "checkpoints", "run")
    assert found is not None
    assert (found.folder, found.step, found.manifest.run) == (path, 100, "run")
    assert found.state == {"step": 100, "loader": {"epoch": 1, "bins": [[1, 2], []]}, "x": 100.1}
    assert found.names() == ("model", "optimizer")
    wanted = sets(100)["model"]
    loaded = found.load("model")
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in wanted.items())
    both = found.load("model", "optimizer")
    assert both.keys() == wanted.keys() | sets(100)["optimizer"].keys()


def test_saving_touches_nothing_that_it_saves(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).T.requires_grad_(), "b": torch.randn(4)[::2]}
    before = {k: (v.data_ptr(), v.requires_grad, v.clone()) for k, v in tensors.items()}
    store.save(tmp_path, run="r", step=1, files={"model": pieces_of(tensors)}, state={}, save_total_limit=1)
    for k, v in tensors.items():
        assert (v.data_ptr(), v.requires_grad) == before[k][:2]
        assert torch.equal(v, before[k][2])


def test_a_checkpoint_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    read = store.newest(tmp_path, "run", hold=True)
    assert read is not None and read.held is not None
    for step in (2, 3):
        save(tmp_path, step, save_total_limit=1)
    assert steps(tmp_path) == [1, 3]
    assert read.load("model").keys() == sets(1)["model"].keys()
    read.held.close()
    save(tmp_path, 4, save_total_limit=1)
    assert steps(tmp_path) == [4]


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "absent") is None
    assert store.best(tmp_path / "absent") is None
    store.remove_leftovers(tmp_path / "absent")


def test_state_that_json_would_change_is_a_defect(tmp_path: Path) -> None:
    for state in ({1: 2}, {"a": (1, 2)}):
        with pytest.raises(AssertionError, match="plain JSON"):
            store.save(tmp_path, run="r", step=1, files={}, state=state, save_total_limit=1)
    with pytest.raises(ValueError, match="Out of range"):
        store.save(tmp_path, run="r", step=1, files={}, state={"loss": float("nan")}, save_total_limit=1)
    assert list(tmp_path.iterdir()) == []


# ---- which one


def test_the_newest_is_the_last_saved_whatever_its_name_or_step(tmp_path: Path) -> None:
    save(tmp_path, 1000)
    save(tmp_path, 999_999_999_999)
    last = save(tmp_path, 50)
    for p in tmp_path.iterdir():  # copying a run may put any times on its folders
        os.utime(p, (0, 0) if p == last else None)
    (tmp_path / "latest").write_text("step-00000001-00000000")
    (tmp_path / "step-10").mkdir()
    (tmp_path / ".step-00009999-0123abcd.tmp").mkdir()
    found = store.newest(tmp_path, "run")
    assert found is not None
    assert found.folder == last


def test_pruning_keeps_the_last_few_and_the_newest_best(tmp_path: Path) -> None:
    kept = []
    for step in range(1, 8):
        save(tmp_path, step, save_total_limit=2, best=step in (2, 4))
        kept.append(steps(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 6, 7]]
    found = store.best(tmp_path, "run")
    assert found is not None
    assert found.step == 4
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_pruning_leaves_other_runs_and_other_files_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, run="other")
    (tmp_path / "notes.txt").write_text("mine")
    for step in (2, 3):
        save(tmp_path, step, save_total_limit=1)
    assert steps(tmp_path) == [1, 3]
    assert (tmp_path / "notes.txt").exists()


def test_a_checkpoint_of_another_run_is_named_and_not_used(tmp_path: Path, capsys: Capture) -> None:
    mine, foreign = save(tmp_path, 5), save(tmp_path, 6, run="other")
    found = store.newest(tmp_path, "run")
    assert found is not None
    assert found.folder == mine
    assert f"{foreign} cannot be used: it belongs to run other, not to run" in capsys.readouterr().err
    anyone = store.newest(tmp_path)
    assert anyone is not None
    with pytest.raises(Refused, match="none of the 2 checkpoints"):
        store.newest(tmp_path, "third")


def test_a_later_format_is_refused_and_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(store, "VERSION", 2)
    save_path = tmp_path / "later"
    save(save_path, 2)
    monkeypatch.undo()
    shutil.move(next(save_path.iterdir()), tmp_path)
    with pytest.raises(Refused, match="format version 2; this Eyeline reads 1"):
        store.newest(tmp_path)


# ---- damage


def flip(offset: float) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        data = bytearray(file.read_bytes())
        at = min(int(offset * len(data)), len(data) - 1)
        data[at] ^= 1 << (at % 8)
        file.write_bytes(data)

    return spoil


def resize(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(change(file.read_bytes())) and None


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"bit flipped at {i / 50:.2f}": flip(i / 50) for i in range(51)},
    "zeros inside": resize(lambda b: b[: len(b) // 3] + b"\0" * (len(b) // 3) + b[2 * (len(b) // 3) :]),
    "cut by one byte": resize(lambda b: b[:-1]),
    "cut in half": resize(lambda b: b[: len(b) // 2]),
    "emptied": resize(lambda b: b[:0]),
    "one byte more": resize(lambda b: b + b"\n"),
    "deleted": lambda file: file.unlink(),
}
FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(folder, step)
    return folder


@pytest.mark.parametrize("file", FILES)
def test_any_damage_is_named_and_the_one_before_is_used(two: Path, tmp_path: Path, file: str, capsys: Capture) -> None:
    for name, spoil in DAMAGE.items():
        folder = tmp_path / name
        shutil.copytree(two, folder)
        (newest,) = folder.glob("step-00000002-*")
        before = (newest / file).read_bytes()
        spoil(newest / file)
        assert not (newest / file).exists() or (newest / file).read_bytes() != before, f"{name} changed nothing"
        found = store.newest(folder, "run")
        assert found is not None
        assert found.step == 1, name
        assert f"{newest} cannot be used: {file}" in capsys.readouterr().err, name
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["two files swapped", "file of another step", "whole folder of another save", "manifest of another step"])
def test_files_of_different_saves_never_mix(two: Path, tmp_path: Path, kind: str, capsys: Capture) -> None:
    folder = tmp_path / "x"
    shutil.copytree(two, folder)
    (old,), (new,) = folder.glob("step-00000001-*"), folder.glob("step-00000002-*")
    match kind:
        case "two files swapped":
            os.rename(new / "model.safetensors", new / "x")
            os.rename(new / "optimizer.safetensors", new / "model.safetensors")
            os.rename(new / "x", new / "optimizer.safetensors")
        case "file of another step":
            shutil.copy(old / "model.safetensors", new / "model.safetensors")
        case "whole folder of another save":
            shutil.rmtree(new)
            shutil.copytree(old, new)
        case "manifest of another step":
            shutil.copy(old / "manifest.json", new / "manifest.json")
    found = store.newest(folder, "run")
    assert found is not None
    assert found.step == 1
    assert f"{new} cannot be used" in capsys.readouterr().err


def test_edited_manifest_is_refused(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(two, folder)
    (new,) = folder.glob("step-00000002-*")
    text = (new / "manifest.json").read_text()
    (new / "manifest.json").write_text(text.replace('"order": 2', '"order": 7'))
    with pytest.raises(store.Damaged, match=r"manifest\.json does not agree with its own digest"):
        store.verify(new)
    (new / "manifest.json").write_text(text.replace('"manifest":\n', '"manifest": \n'))
    with pytest.raises(store.Damaged, match=r"manifest\.json"):
        store.verify(new)


def test_only_damaged_ones_are_refused_rather_than_started_over(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(two, folder)
    for path in folder.iterdir():
        (path / "state.json").unlink()
    with pytest.raises(Refused, match=r"none of the 2 checkpoints .* can be used"):
        store.newest(folder, "run")


def test_a_damaged_best_falls_back_to_the_best_before_it(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, 1, best=True)
    flip(0.5)(save(tmp_path, 2, best=True) / "model.safetensors")
    found = store.best(tmp_path, "run")
    assert found is not None
    assert found.step == 1
    assert "SHA-256" in capsys.readouterr().err


def test_pruning_never_deletes_the_last_good_one(tmp_path: Path, capsys: Capture) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    flip(0.5)(paths[3] / "model.safetensors")
    flip(0.5)(paths[2] / "optimizer.safetensors")
    store.prune(tmp_path, "run", save_total_limit=1)
    assert steps(tmp_path) == [2, 4]
    assert str(paths[3]) in capsys.readouterr().err
    flip(0.5)(paths[1] / "model.safetensors")  # now none is whole: nothing more is deleted
    store.prune(tmp_path, "run", save_total_limit=1)
    assert steps(tmp_path) == [2, 4]


def test_a_checkpoint_that_is_cut_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "model.safetensors").write_bytes(b"")
    save(tmp_path, 3, save_total_limit=2)
    assert steps(tmp_path) == [1, 2, 3]
    save(tmp_path, 4, save_total_limit=2)
    assert steps(tmp_path) == [2, 3, 4]


# ---- sets that cannot change


@pytest.fixture
def frozen() -> dict[str, Tensor]:
    return {"tower": torch.randn(8, 8).bfloat16()}


def save_frozen(folder: Path, step: int, frozen: dict[str, Tensor], word: str = "stage 0", save_total_limit: int = 9) -> Path:
    files = {"model": {"a": torch.tensor(step)}, "frozen": frozen}
    return store.save(
        folder,
        run="run",
        step=step,
        files=held(files),
        state={},
        save_total_limit=save_total_limit,
        fixed={"frozen": word},
    )


def inode(path: Path) -> int:
    return (path / "frozen.safetensors").stat().st_ino


def test_a_fixed_set_is_written_once_and_survives_pruning(tmp_path: Path, frozen: dict[str, Tensor]) -> None:
    paths = [save_frozen(tmp_path, step, frozen, save_total_limit=1) for step in (1, 2, 3)]
    assert steps(tmp_path) == [3]
    second = save_frozen(tmp_path, 4, frozen)
    assert inode(second) == inode(paths[2])
    found = store.newest(tmp_path, "run")
    assert found is not None
    assert torch.equal(found.load("frozen")["tower"], frozen["tower"])


def test_a_fixed_set_is_written_anew_when_its_word_or_run_changes(tmp_path: Path, frozen: dict[str, Tensor]) -> None:
    first = save_frozen(tmp_path, 1, frozen)
    changed = {"tower": frozen["tower"] + 1}
    second = save_frozen(tmp_path, 2, changed, "stage 1")
    assert inode(first) != inode(second)
    assert torch.equal(store.verify(second).load("frozen")["tower"], changed["tower"])
    third = store.save(
        tmp_path, run="other", step=3, files={"frozen": pieces_of(changed)}, state={}, save_total_limit=9, fixed={"frozen": "stage 1"}
    )
    assert inode(third) != inode(second)


@pytest.mark.parametrize("where", [0.0, 0.9])
def test_a_damaged_fixed_file_does_not_spread(tmp_path: Path, frozen: dict[str, Tensor], capsys: Capture, where: float) -> None:
    first = save_frozen(tmp_path, 1, frozen)
    flip(where)(first / "frozen.safetensors")
    second = save_frozen(tmp_path, 2, frozen)
    assert "frozen.safetensors is damaged or cannot be read; it is written again" in capsys.readouterr().err
    assert torch.equal(store.verify(second).load("frozen")["tower"], frozen["tower"])


def test_a_fixed_set_with_other_shapes_is_a_defect(tmp_path: Path, frozen: dict[str, Tensor]) -> None:
    save_frozen(tmp_path, 1, frozen)
    with pytest.raises(AssertionError, match="names or shapes changed"):
        save_frozen(tmp_path, 2, {"tower": torch.zeros(4, 4)})
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_file_system_without_hard_links_gets_copies(tmp_path: Path, frozen: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    first = save_frozen(tmp_path, 1, frozen)
    monkeypatch.setattr(os, "link", refuse)
    second = save_frozen(tmp_path, 2, frozen)
    assert inode(first) != inode(second)
    assert torch.equal(store.verify(second).load("frozen")["tower"], frozen["tower"])
