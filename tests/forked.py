"""Processes that are copies of this one: they have imported everything already, which costs a fresh process two seconds."""

import faulthandler
import gc
import io
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from eyeline.cli import main
from eyeline.data import workers
from eyeline.study import report


class Forked:
    """What is used of `subprocess.Popen`, for a copy of this process that runs a function and ends. It has the files that are named, and
    otherwise only what stands on its standard error."""

    def __init__(self, run: Callable[[], None], files: tuple[int, ...] = ()):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                gc.disable()  # garbage of the copied process would close files of this one
                faulthandler.disable()
                _close_all_but(files)
                _own_streams()
                run()
                sys.stdout.flush()
                code = 0
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            finally:
                if sys.exception() is not None:
                    traceback.print_exc()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a copy of this process", timeout or 0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


def _own_streams() -> None:
    """Instead of those in which pytest catches output."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _close_all_but(files: tuple[int, ...]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    first = 3
    for file in sorted(files):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 20)


def forked_worker(handle: int, progress: int, most_bytes: int | None) -> Forked:
    """Stands in for `eyeline.data.workers.new_process`."""
    parent = os.getpid()
    return Forked(lambda: workers.serve(handle, progress, parent, most_bytes), (handle, progress))


def forked_command(
    *arguments: str, stdout: int, stderr: int | None = None, before: Callable[[], object] = lambda: None, session: bool = False
) -> Forked:
    """The command line in a copy of this process, which writes to these files."""

    def run() -> None:
        if session:
            os.setsid()
        os.dup2(stdout, 1)
        os.dup2(stdout if stderr is None else stderr, 2)
        run_command(*arguments, before=before)

    return Forked(run, tuple({stdout, stdout if stderr is None else stderr}))


def run_command(*arguments: str, before: Callable[[], object] = lambda: None) -> NoReturn:
    """In a process that was copied: the command line."""
    sys.argv = ["eyeline", *arguments]
    report.curves = lambda history: []  # as in tests/command.py
    before()
    try:
        sys.exit(main())
    finally:
        sys.stdout.flush()
