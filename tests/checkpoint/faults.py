"""Faults at chosen points of a forked child: a kill or a failing call before the n-th thing it does to a folder."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from eyeline.checkpoint import tensors
from eyeline.core.errors import StorageFailed

WELL, FAILED, KILLED = 0, 9, -signal.SIGKILL


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked process: WELL, FAILED (it raised StorageFailed), KILLED, what it returned, or 1."""
    child = os.fork()
    if child == 0:
        code: object = 1
        try:
            code = action() or WELL
        except StorageFailed:
            code = FAILED
        finally:
            os._exit(code if isinstance(code, int) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


EVENTS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"}


def arm(folder: Path, when: int, act: Callable[[], None]) -> list[int]:
    """In this process, call `act` just before the `when`-th call that touches anything under `folder`, before each flush and
    before each tensor is written. The list that is returned fills once that happened."""
    fired: list[int] = []
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == when:
            fired.append(when)
            act()

    def audit(event: str, arguments: tuple) -> None:
        if event in EVENTS and any(isinstance(a, str | os.PathLike) and str(folder) in str(a) for a in arguments):
            tick()

    fsync, bytes_of = os.fsync, tensors.bytes_of

    def counted_fsync(handle: int) -> None:
        tick()
        fsync(handle)

    def counted_bytes(x: Tensor) -> memoryview:
        tick()
        return bytes_of(x)

    os.fsync, tensors.bytes_of = counted_fsync, counted_bytes
    sys.addaudithook(audit)
    return fired


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
