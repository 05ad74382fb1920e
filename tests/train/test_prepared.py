"""Training from prepared data is training from their source, with the source gone; a run may change from one to the other."""

import json
import shutil
from pathlib import Path

import pytest

import eyeline.train.loop as loop
from eyeline.core.errors import Refused, RunLocked, Stopped
from eyeline.recipes.problems import settings_problems
from eyeline.train.prepare import prepare_stage
from eyeline.train.stop import sole_owner
from tests.command import Command
from tests.train.ends import end_of, losses, stopped_at
from tests.train.recipe import tiny_run

PREPARED = ("stages.0.data.prepared={0}/whole", "stages.1.data.prepared={0}/adapt")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, float]]:
    """A folder with the data, prepared for both stages, too; how a run from the source ends, and its losses."""
    folder = tmp_path_factory.mktemp("prepared")
    run = tiny_run(folder)
    loop.train(run)
    for stage in ("whole", "1"):
        prepare_stage(run, stage, folder / ("whole" if stage == "whole" else "adapt"))
    return folder, end_of(run), losses(run)


def stored(folder: Path, *more: str) -> tuple[str, ...]:
    return (*(one.format(folder) for one in PREPARED), *more)


def test_training_without_the_source_ends_in_the_same_weights(prepared: tuple[Path, str, dict[int, float]], tmp_path: Path) -> None:
    folder, wanted, lost = prepared
    run = tiny_run(folder, *stored(folder, f"out={tmp_path}/run"))
    shutil.move(folder / "data", folder / "gone")
    try:
        loop.train(run)
    finally:
        shutil.move(folder / "gone", folder / "data")
    assert end_of(run) == wanted
    assert losses(run) == lost


@pytest.mark.parametrize("first", [0, 1])
def test_run_resumes_with_the_other(
    prepared: tuple[Path, str, dict[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    folder, wanted, lost = prepared
    out = f"out={tmp_path}/run"
    runs = [tiny_run(folder, out), tiny_run(folder, *stored(folder, out))]
    stopped_at(monkeypatch, {2, 6})
    for run in (runs[first], runs[1 - first]):
        with pytest.raises(Stopped):
            loop.train(run)
    loop.train(runs[first])
    assert end_of(runs[0]) == wanted
    assert losses(runs[0]) == lost


def test_the_command(eyeline: Command, tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(run.model_dump(mode="json")))
    out, again = tmp_path / "whole", ("prepare", str(recipe), "--stage", "whole", "--out", str(tmp_path / "whole"))
    done = eyeline("prepare", str(recipe), "--out", str(out))
    assert done.code == 2
    assert "give --stage: the recipe has several" in done.err
    assert not out.exists()
    done = eyeline(*again)
    assert done.code == 0, done.err
    assert "To train from it: stages.whole.data.prepared=" in done.out
    made = json.loads((out / "prepared.json").read_text())
    assert eyeline(*again).code == 0
    assert json.loads((out / "prepared.json").read_text()) == made
    assert not list(settings_problems(tiny_run(tmp_path, f"stages.0.data.prepared={out}")))


def test_command_in_shares_and_what_it_says_of_itself(eyeline: Command, tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "out"
    recipe.write_text(json.dumps(run.model_dump(mode="json")))
    command = ("prepare", str(recipe), "--stage", "whole", "--out", str(out))
    assert eyeline(*command, "--shard", "2/2").code == 2
    assert eyeline("report", str(out)).code == 2
    codes = []
    for share in ("1/2", "0/2", "1/2", "0/2"):
        done = eyeline(*command, "--shard", share)
        codes.append((done.code, "is done, as far as it can be" in done.out, "To train from it" in done.out))
    assert codes[0] == (0, True, False)
    assert codes[-1] == (0, False, True)
    left = out / "job/packs/files/000000/000000000-0123456789ab"
    left.mkdir()
    (left / "archive.tar").write_bytes(b"12345")
    lines = eyeline("report", str(out)).out
    assert "indexes: 1 of 1 partitions are done: " in lines
    assert "packs: 2 of 2 partitions are done: 24 rows, " in lines
    assert "files of lost attempts: 1, 5 bytes" in lines
    done = eyeline("prepare", str(recipe), "--out", str(out), "--clean")
    assert "deleted packs: files/000000/000000000-0123456789ab/archive.tar (5 bytes)\n1 files of lost attempts were deleted" in done.out
    assert not left.exists()
    assert "lost attempts" not in eyeline("report", str(out)).out


def test_what_does_not_fit_is_among_the_problems(prepared: tuple[Path, str, dict[int, float]], tmp_path: Path) -> None:
    folder, *_ = prepared
    for turn, said in (
        ("stages.0.batch.max_patches=96", "budget"),
        ("seed=3", "order"),
        ("stages.0.data.validation_fraction=0.3", "validation_fraction (0.2 → 0.3)"),
    ):
        problems = list(settings_problems(tiny_run(folder, *stored(folder, f"out={tmp_path}/run", turn))))
        assert any("was prepared from other data or settings" in line and said in line for line in problems), problems
        assert len(set(problems)) == len(problems)


def test_folders_that_are_not_its_own_are_left_alone(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(Refused, match=r"no stage 'hole'. Did you mean 'whole'\?"):
        prepare_stage(run, "hole", tmp_path / "out")
    with pytest.raises(Refused, match=r"holds data.*which `eyeline prepare` did not write"):
        prepare_stage(run, "whole", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".rejects.jsonl.0a1b2c3d.tmp").write_text("left by a kill")
    with sole_owner(tmp_path / "out"), pytest.raises(RunLocked):
        prepare_stage(run, "whole", tmp_path / "out")
    with pytest.raises(Refused, match="--epochs has no meaning"):
        prepare_stage(tiny_run(tmp_path, "stages.0.data.mix=interleave"), "whole", tmp_path / "out", epochs=2)
    prepare_stage(run, "whole", tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))
    with pytest.raises(Refused, match="is prepared already"):
        prepare_stage(tiny_run(tmp_path, "stages.0.data.prepared=x"), "whole", tmp_path / "out")
