"""One thread a process: tests run side by side, and threads that wait for each other slow tiny models many times over.

Workers of the data are copies of the process that runs the tests, which has imported everything; where a test is marked `fresh_workers`
they are what they are for users, new processes, two seconds each."""

from functools import cache
from pathlib import Path

import pytest
import torch

from eyeline.data import workers
from eyeline.parallel.threads import calm_threads
from eyeline.train import environment
from tests.command import Command
from tests.forked import forked_worker

calm_threads()
torch.set_num_threads(1)
environment.version = cache(environment.version)  # of packages, each a file to parse at the start of every tiny run


@pytest.fixture
def eyeline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line, in an empty folder."""
    return Command(capsys, monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def workers_start_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("fresh_workers") is None:
        monkeypatch.setattr(workers, "new_process", forked_worker)
