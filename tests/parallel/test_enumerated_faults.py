"""Kills at every point of a save and signals in every phase, on each rank: each ends with the documented code, leaves a checkpoint that
resumes to the uninterrupted run's bits, and nothing else.

`make test` has one of each kind in test_rank_faults.py.
"""

import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyeline.checkpoint import store
from eyeline.core.errors import RankLost, Stopped
from eyeline.data import loader
from eyeline.parallel import watch
from eyeline.train import loop, stage
from eyeline.train.run import Run
from tests import ranks
from tests.parallel.whole_runs import bits, lines, run_of, start, train, uninterrupted

pytestmark = pytest.mark.slow

LOST, STOPPED, KILLED = RankLost.code, Stopped.code, -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return uninterrupted(tmp_path_factory, cut_run)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, shared memory or temporary file is there that was not there before; a process that is gone listens on no port."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def there() -> dict[str, set[str]]:
        children = {pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()}
        shared = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}  # of other programs
        temporary = {name for name in os.listdir(tmp_path) if not name.startswith("torchinductor")}  # a cache of torch's
        return {"temporary files": temporary, "shared memory": shared, "processes": children}

    before = there()
    yield
    assert {what: left - before[what] for what, left in there().items()} == {what: set() for what in before}


def parent_of(pid: str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def cut_run(folder: Path, name: str, *overrides: str) -> Run:
    return run_of(folder, name, "stages.adapt.steps=2", "save_steps=2", *overrides)


def assert_resumes_to(run: Run, wanted: Any) -> None:
    """The run is trained to its end; its weights and the figures of each step are those of the uninterrupted run."""
    train(run, 2)
    steps, weights = bits(run)
    assert all(step in wanted[0] for step in steps)
    assert weights == wanted[1]
    folder = Path(str(run.out))
    assert not [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".old"))]
    assert not (folder / "ranks").exists()


def around(module: Any, name: str, call: int, after: bool, do: Callable[[], object]) -> None:
    """Do something before or after the n-th call of a function, whatever thread calls it."""
    original, calls, lock = getattr(module, name), [0], threading.Lock()

    def counted(*args: Any, **how: Any) -> Any:
        with lock:
            calls[0] += 1
            now = calls[0] == call
        if now and not after:
            do()
        result = original(*args, **how)
        if now and after:
            do()
        return result

    setattr(module, name, counted)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# Kills at every point of the second save: function of the store, and which of its calls. Every rank calls these in the first row
BY_EACH = [("bytes_to_write", 2), ("write", 2), ("write_file", 4), ("write_file", 5), ("write_file", 6), ("_link", 1)]
BY_FIRST = [
    ("start_draft", 2),
    ("_refuse_if_full", 2),
    ("_write_text", 3),
    ("_write_text", 4),
    ("commit", 2),
    ("sync_folder", 3),
    ("prune", 2),
]
POINTS = [(*point, rank) for point in BY_EACH for rank in (0, 1)] + [(*point, 0) for point in BY_FIRST]
KILLS = [(*point, after, thread) for point in POINTS for after in (False, True) for thread in (False, True)]


@pytest.mark.parametrize(("name", "call", "at_rank", "after", "thread"), KILLS)
def test_a_kill_in_a_save_leaves_a_checkpoint_that_resumes(
    whole: tuple[Path, Any], name: str, call: int, at_rank: int, after: bool, thread: bool
) -> None:
    folder, wanted = whole
    run = cut_run(folder, f"kill {name} {call} {at_rank} {after} {thread}", f"async_save={str(thread).lower()}")
    codes = ranks.wait(start(run, 2, lambda rank: around(store, name, call, after, send(signal.SIGKILL)) if rank == at_rank else None))
    assert codes[at_rank] == KILLED, f"{name} is not called {call} times"
    assert codes[1 - at_rank] == LOST
    found = store.newest(Path(str(run.out)) / "checkpoints")
    assert found is not None and found.step in (2, 4, 6)
    assert_resumes_to(run, wanted)


PHASES: dict[str, tuple[Any, str, int]] = {  # module, function, and which of its calls
    "start of a stage": (loop, "begin_stage", 1),
    "start of the second stage": (loop, "begin_stage", 2),
    "filling the model": (stage, "model_of", 1),
    "reading of a pack": (loader, "pack_to_read", 3),
    "forward and backward pass": (loop, "update", 2),
    "validation": (loop, "validate", 1),
    "agreement between steps": (loop, "at_border", 2),
    "writing a checkpoint": (store, "write", 1),
    "end of a save": (store, "finish", 1),
}
SIGNALS = [(phase, rank, after) for phase in PHASES for rank in (0, 1) for after in (False, True)]


@pytest.mark.parametrize(("phase", "at_rank", "after"), SIGNALS)
def test_sigterm_to_one_rank_stops_all_with_one_checkpoint(whole: tuple[Path, Any], phase: str, at_rank: int, after: bool) -> None:
    folder, wanted = whole
    run = cut_run(folder, f"term {list(PHASES).index(phase)} {at_rank} {after}")
    module, name, call = PHASES[phase]
    codes = ranks.wait(start(run, 2, lambda rank: around(module, name, call, after, send(signal.SIGTERM)) if rank == at_rank else None))
    assert codes == [STOPPED, STOPPED]
    found, steps = store.newest(Path(str(run.out)) / "checkpoints"), lines(run, "step", "global_step")
    assert (found.step if found else 0) == (steps[-1][0] if steps else 0)
    assert_resumes_to(run, wanted)


@pytest.mark.parametrize(("phase", "at_rank"), [(phase, rank) for phase in PHASES for rank in (0, 1)])
def test_a_rank_that_is_stopped_is_named(
    whole: tuple[Path, Any], phase: str, at_rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for setting, seconds in {"EVERY_S": 0.2, "LATE_S": 2.0, "CACHED_S": 4.0}.items():
        monkeypatch.setattr(watch, setting, seconds)
    folder, wanted = whole
    run = cut_run(folder, f"stop {list(PHASES).index(phase)} {at_rank}", "mesh.timeout_minutes=0.1")
    module, name, call = PHASES[phase]
    children = start(run, 2, lambda rank: around(module, name, call, False, send(signal.SIGSTOP)) if rank == at_rank else None)
    try:
        assert children[1 - at_rank].wait(60) == LOST
    finally:
        children[at_rank].kill()
        children[at_rank].wait()
    said = capfd.readouterr().err
    assert re.search(rf"rank {at_rank} \(process \d+ on \S+\) was last heard of \d+ s ago: step \d", said), said
    monkeypatch.undo()
    assert_resumes_to(cut_run(folder, f"stop {list(PHASES).index(phase)} {at_rank}"), wanted)
