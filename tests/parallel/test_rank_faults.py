"""Ranks that fail, are killed, hang or are not alike: the others end with a code and a message, and the run can be resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyeline.checkpoint import store
from eyeline.core.errors import OutOfMemory, StorageFailed
from eyeline.data import reader
from eyeline.parallel import watch
from eyeline.study.replay import replay
from eyeline.train import loop
from eyeline.train.evidence import batches_in
from eyeline.train.run import Run, to_yaml
from tests import ranks
from tests.parallel.whole_runs import at_step, bits, run_of, start, train, uninterrupted

pytestmark = pytest.mark.ranks

LOST, KILLED = 9, -9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return uninterrupted(tmp_path_factory, cut_run)


def cut_run(folder: Path, name: str, *overrides: str) -> Run:
    return run_of(folder, name, "stages.adapt.steps=1", "save_steps=2", *overrides)


def assert_same_end(run: Run, wanted: Any) -> None:
    """The same weights to the last bit, and the same figures of each step, however often it was done."""
    (steps, weights), (all_steps, end) = bits(run), wanted
    assert all(step in all_steps for step in steps)
    assert weights == end


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lack_memory() -> None:
    raise OutOfMemory("a test does not fit")


@pytest.mark.parametrize("at_rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    whole: tuple[Path, Any], at_rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = whole
    run = cut_run(folder, f"killed{at_rank}")
    codes = ranks.wait(start(run, 2, at_step(3, at_rank, kill)))
    assert codes == ([KILLED, LOST] if at_rank == 0 else [LOST, KILLED])
    said = capfd.readouterr().err
    assert f"eyeline: rank {1 - at_rank} lost another rank, which ended or did not answer in time" in said
    assert re.search(rf"rank {at_rank} \(process \d+ on \S+\) has ended, and was last heard of \d s ago: step", said), said
    train(run, 2)
    assert_same_end(run, wanted)


SAVING: dict[str, tuple[str, bool]] = {  # function of the store, and whether the kill comes after it
    "before the folder is made": ("start_draft", False),
    "before its part is written": ("write", False),
    "after its part is written": ("write", True),
    "before the commit": ("commit", False),
    "after the commit": ("commit", True),
}


BY_EACH = [
    (when, rank, False) for when, (name, _) in SAVING.items() for rank in (0, 1) if rank == 0 or name == "write"
]  # the rest rank 0 does
BY_EACH += [("before its part is written", 1, True), ("after its part is written", 0, True)]


@pytest.mark.parametrize(("when", "at_rank", "in_thread"), BY_EACH)
def test_a_rank_killed_while_saving_leaves_the_old_checkpoint_or_the_new(
    whole: tuple[Path, Any], when: str, at_rank: int, in_thread: bool
) -> None:
    name, after = SAVING[when]
    folder, wanted = whole
    run = cut_run(folder, f"saving {list(SAVING).index(when)} {at_rank} {in_thread}", f"async_save={str(in_thread).lower()}")

    def before(rank: int) -> None:
        original, calls = getattr(store, name), [0]

        def killing(*args: Any, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2 and rank == at_rank and not after:
                kill()
            result = original(*args, **how)
            if calls[0] == 2 and rank == at_rank:
                kill()
            return result

        setattr(store, name, killing)

    assert sorted(ranks.wait(start(run, 2, before))) == [KILLED, LOST]
    found = store.newest(Path(str(run.out)) / "checkpoints")
    assert found is not None and found.step == (4 if when == "after the commit" else 2)
    train(run, 2)
    assert_same_end(run, wanted)
    assert not [path for path in (Path(str(run.out)) / "checkpoints").iterdir() if path.name.startswith(".")]


def test_what_a_thread_of_one_rank_cannot_write_ends_all_alike(whole: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """With the checkpoint before it as it was. The same command resumes to the same end."""
    folder, wanted = whole
    run = cut_run(folder, "full disk", "async_save=true")

    def before(rank: int) -> None:
        write, calls = store.write, [0]

        def failing(*args: Any, **how: Any) -> Any:
            calls[0] += 1
            if (calls[0], rank) == (2, 1):
                raise StorageFailed("a test has no room for this")
            return write(*args, **how)

        store.write = failing

    assert ranks.wait(start(run, 2, before)) == [StorageFailed.code] * 2
    assert capfd.readouterr().err.count("a test has no room for this") == 1
    found = store.newest(Path(str(run.out)) / "checkpoints")
    assert found is not None and found.step == 2
    train(run, 2)
    assert_same_end(run, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "steps"), [(0, [2, 4, 5]), (1, [4, 5])])
def test_checkpoints_are_due_by_the_first_rank_s_clock(runs: int, steps: list[int], tmp_path: Path) -> None:
    """The clock of one rank is ten minutes ahead after each step, and the other's is right."""
    run = run_of(
        tmp_path,
        "run",
        "stages.whole.steps=4",
        "stages.adapt.steps=1",
        "save_steps=null",
        "save_minutes=15",
        "save_total_limit=9",
        "validation_steps=null",
    )

    def before(rank: int) -> None:
        update, clock, done = loop.update, loop.Clock, [0]

        def counted(*args: Any, **how: Any) -> Any:
            done[0] += 1
            return update(*args, **how)

        loop.update = counted
        loop.Clock = lambda *_: clock(lambda: time.monotonic() + 600 * done[0] * (rank == runs), None)

    train(run, 2, before)
    assert sorted(store.verify(path).step for path in (Path(str(run.out)) / "checkpoints").iterdir()) == steps


def test_an_error_on_one_rank_is_said_by_it_and_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = cut_run(tmp_path, "run")
    assert ranks.wait(start(run, 2, at_step(2, 1, lack_memory))) == [LOST, OutOfMemory.code]
    said = capfd.readouterr().err
    assert said.count("a test does not fit") == 1
    assert said.count("rank 0 lost another rank") == 1


def test_an_error_that_all_ranks_have_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = cut_run(tmp_path, "run", "max_nonfinite_steps=0", "stages.whole.trains.language.lr=1e30", "stages.whole.optimizer.kind=adamw")
    assert ranks.wait(start(run, 2)) == [4, 4]
    assert capfd.readouterr().err.count("had a loss or gradient that is not finite") == 1


def test_a_step_that_is_not_finite_on_ranks_is_replayed_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An infinity in the part of a weight that one rank holds: both skip the step, and both write what is needed to run it again."""
    run = cut_run(tmp_path, "run", "max_nonfinite_steps=0")

    def before(rank: int) -> None:
        update = loop.update

        def planting(model: Any, *args: Any, step: int, **how: Any) -> Any:
            if step == 1 and rank == 1:
                model.get_parameter("language.blocks.1.mlp.down.weight").data.to_local()[0, 3] = float("inf")
            return update(model, *args, step=step, **how)

        loop.update = planting

    assert ranks.wait(start(run, 2, before)) == [4, 4]
    [folder] = (tmp_path / "run" / "evidence").iterdir()
    assert len(batches_in(folder)) == 2
    assert replay(folder)
    said = capsys.readouterr().out
    assert "weights: language.blocks.1.mlp.down.weight: 1 number not finite, the first at [8, 3]" in said, said
    assert "first not finite: the output of language.blocks.1.mlp.down, " in said


def stop_late() -> None:
    time.sleep(0.5)  # its last word is from this step
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {"sleeps": (lambda: time.sleep(100), "0"), "is stopped": (stop_late, "[1-9]")}  # and seconds since it was last heard of


@pytest.mark.parametrize("hang", HANGS)
def test_a_rank_that_hangs_is_named_in_time(
    hang: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its step, its phase and the line of ours that it is in."""
    do, how = HANGS[hang]
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    monkeypatch.setattr(watch, "LATE_S", 1.0)
    run = cut_run(tmp_path, "run", "mesh.timeout_minutes=0.05")
    children = start(run, 2, at_step(2, 1, do))
    assert children[0].wait(60) == LOST
    children[1].kill()
    said = capfd.readouterr().err
    heard = rf"rank 1 \(process \d+ on \S+\) was last heard of {how} s ago: step 2, compute, at train/loop\.py:\d+ run_update"
    assert re.search(rf"in time \(timed out\)\. {heard}", said), said


@pytest.mark.parametrize("at_rank", [0, 1])
def test_a_rank_that_is_stopped_while_saving_is_named(
    at_rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for its part of the checkpoint without a limit, and a thread of theirs sees that it does not run."""
    for name, seconds in {"EVERY_S": 0.1, "LATE_S": 1.0, "CACHED_S": 3.0}.items():
        monkeypatch.setattr(watch, name, seconds)
    run = cut_run(tmp_path, "run", "mesh.timeout_minutes=0.05")

    def before(rank: int) -> None:
        write = store.write
        if rank == at_rank:
            store.write = lambda *args: (os.kill(os.getpid(), signal.SIGSTOP), write(*args))[1]

    children = start(run, 2, before)
    assert children[1 - at_rank].wait(60) == LOST
    children[at_rank].kill()
    said = capfd.readouterr().err
    words = rf"rank {1 - at_rank} ends, since rank {at_rank} does not run\. rank {at_rank} \(process \d+ .*s ago: step \d"
    assert re.search(words, said), said


def test_a_signal_that_reaches_all_ranks_twice_stops_them_once(whole: tuple[Path, Any]) -> None:
    """As under torchrun in a scheduler's job: the scheduler signals every process, and torchrun passes its own on."""
    folder, wanted = whole
    run = cut_run(folder, "signalled")

    def ask() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    assert ranks.wait(start(run, 2, lambda rank: at_step(2, rank, ask)(rank))) == [75, 75]
    train(run, 2)
    assert bits(run) == wanted


def test_two_starts_in_one_folder_do_not_mix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second finds the folder in use, on all of its ranks."""
    run = cut_run(tmp_path, "run")
    first = start(run, 2, at_step(2, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    metrics = Path(str(run.out)) / "metrics.jsonl"
    while not metrics.exists() or '"step"' not in metrics.read_text():
        assert first[0].poll() is None
    assert ranks.wait(start(run, 2)) == [6, 6]
    assert capfd.readouterr().err.count("is in use by process") == 1
    os.kill(first[0].pid, signal.SIGCONT)
    assert ranks.wait(first) == [0, 0]


def test_a_rank_with_another_recipe_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = cut_run(tmp_path, "run")

    assert ranks.wait(start(run, 2, overrides=lambda rank: ["seed=1"] * rank)) == [2, 2]
    assert capfd.readouterr().err.count("rank 1 is not like rank 0: recipe is") == 1


def test_a_rank_with_other_data_is_named_with_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same path, and another file there: what a second machine may have."""
    run = cut_run(tmp_path, "run")
    fingerprint = reader.digest_of

    def before(rank: int) -> None:
        if rank == 1:
            reader.digest_of = lambda rows: fingerprint(rows)[::-1]

    assert ranks.wait(start(run, 2, before)) == [2, 2]
    said = capfd.readouterr().err
    assert said.count(f"rank 1 reads other data than rank 0: {tmp_path / 'data' / 'data.json'}. Give all ranks the same files") == 1


def test_nproc_passes_a_signal_on_and_ends_as_the_ranks_do(tmp_path: Path) -> None:
    """In new processes, whose interpreters are taken down as a user's are."""
    run = cut_run(tmp_path, "run", "stages.whole.steps=2000")
    recipe, metrics = tmp_path / "r.yaml", tmp_path / "run" / "metrics.jsonl"
    recipe.write_text(to_yaml(run))
    command = [sys.executable, "-m", "eyeline", "train", "--nproc", "1", str(recipe), "--nproc=2"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not metrics.exists() or '"step"' not in metrics.read_text():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, said.count("\n")) == (75, 1), said
    assert not (tmp_path / "run" / "ranks").exists()
