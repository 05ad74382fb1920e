"""One thread a process: tests run side by side, and threads that wait for each other slow tiny models many times over.

Workers of the data are copies of the process that runs the tests, which has imported everything; where a test is marked `fresh_workers`
they are what they are for users, new processes, two seconds each.

Garbage is not looked for while tests are collected, nor afterwards among the million objects that stay: modules, and the tests themselves.
And nothing waits for a disk: what fsync does shows only when the power fails. Tests of what happens where it is called, or fails, replace
it themselves."""

import gc
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from eyeline.data import workers
from eyeline.parallel.threads import calm_threads
from eyeline.train import environment
from tests.command import Command
from tests.forked import forked_worker

gc.disable()  # until all tests are collected
os.fsync = os.fstat  # type: ignore[assignment] # which also raises where a file is not open
calm_threads()
torch.set_num_threads(1)
environment.version = cache(environment.version)  # of packages, each a file to parse at the start of every tiny run


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def eyeline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line, in an empty folder."""
    return Command(capsys, monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def workers_start_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("fresh_workers") is None:
        monkeypatch.setattr(workers, "new_process", forked_worker)
