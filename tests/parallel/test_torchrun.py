"""torchrun starts the ranks, starts them again when one ends, and passes a signal on: the command of docs/parallel.md, on two CPU ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyeline.checkpoint import store
from eyeline.core.files import read_json
from eyeline.train.run import Run, to_yaml
from tests.parallel.whole_runs import bits, lines, run_of, train, uninterrupted

pytestmark = pytest.mark.slow  # each start of torchrun and its ranks imports torch and transformers three times


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return uninterrupted(tmp_path_factory, long_run)


def long_run(folder: Path, name: str) -> Run:
    return run_of(folder, name, "stages.whole.steps=40", "stages.adapt.steps=1", "save_steps=2", "validation_steps=null")


@contextmanager
def torchrun(run: Run, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The launcher, in a session of its own of which nothing is left."""
    recipe = Path(str(run.out) + ".yaml")
    recipe.write_text(to_yaml(run))
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", *rendezvous, *options, "-m", "eyeline", "train", recipe]
    launcher = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        yield launcher
        assert not subprocess.run(["pgrep", "-f", str(recipe)], capture_output=True, check=False).stdout, "ranks are still running"
    finally:
        for pid in sessions_processes(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def sessions_processes(session: int) -> list[int]:
    done = subprocess.run(["ps", "-s", str(session), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def wait_until(launcher: "subprocess.Popen[str]", what: Callable[[], object]) -> None:
    while not what():
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.02)


def test_torchrun_starts_the_ranks_again_when_one_is_killed(whole: tuple[Path, Any]) -> None:
    """The second attempt resumes from the last checkpoint, and ends as the uninterrupted run does."""
    folder, (all_steps, end) = whole
    run = long_run(folder, "killed")
    with torchrun(run, "--max-restarts", "1") as launcher:
        wait_until(launcher, lambda: len(lines(run, "step")) > 4)
        os.kill(read_json(Path(str(run.out)) / "ranks" / "rank-00001.json")["pid"], signal.SIGKILL)
        said, _ = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, said
    (world, resumed), (world_again, resumed_again) = lines(run, "start", "world_size", "resumed_from")
    assert (world, resumed, world_again) == (2, None, 2), said
    assert resumed_again >= 2
    steps, weights = bits(run)
    assert all(step in all_steps for step in steps)
    assert weights == end
    assert not (Path(str(run.out)) / "ranks").exists()


def test_a_signal_to_torchrun_stops_all_ranks_after_one_step(whole: tuple[Path, Any]) -> None:
    """torchrun passes it on, and returns 1 whatever its ranks return; the run has saved once, and resumes."""
    folder, wanted = whole
    run = long_run(folder, "signalled")
    with torchrun(run) as launcher:
        wait_until(launcher, lambda: len(lines(run, "step")) > 4)
        launcher.send_signal(signal.SIGTERM)
        said, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1, said
    assert said.count("stopped by SIGTERM") == 1, said
    [*_, [last]] = lines(run, "step", "global_step")
    found = store.newest(Path(str(run.out)) / "checkpoints")
    assert found is not None and found.step == last
    train(run, 2)
    assert bits(run) == wanted
