"""One thread a process: tests run side by side, and threads that wait for each other slow tiny models many times over."""

from pathlib import Path

import pytest
import torch

from eyeline.parallel.threads import calm_threads
from tests.command import Command

calm_threads()
torch.set_num_threads(1)


@pytest.fixture
def eyeline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line, in an empty folder."""
    return Command(capsys, monkeypatch, tmp_path)
