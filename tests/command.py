"""Runs a command line in this process: imports are paid once, and what it prints can be read."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from eyeline.cli import main
from eyeline.study import report


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Command:
    """`eyeline(*arguments)`: exit code and output, with `folder` as the working directory. Reports have curves only where a test sets
    `draws`: matplotlib takes longer for them than a tiny run for its training."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.capsys, self.monkeypatch, self.folder = capsys, monkeypatch, folder
        self.draws = False

    def __call__(self, *arguments: str) -> Done:
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["eyeline", *arguments])
            patch.setitem(os.environ, "COLUMNS", "160")
            patch.chdir(self.folder)
            if not self.draws:
                patch.setattr(report, "curves", lambda history: [])
            code = 0
            try:
                main()
            except SystemExit as exit:
                code = int(exit.code or 0)
            captured = self.capsys.readouterr()
        return Done(code, captured.out, captured.err)
