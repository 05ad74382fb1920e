"""Asking a run to end, and making sure that it is the only one in its folder."""

import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from eyeline.core.errors import RunLocked
from eyeline.core.files import storage_failed
from eyeline.core.log import say_at_once


class StopSignal:
    """Notes SIGTERM and SIGINT, so that the loop ends at its next step border. A second one ends the process at once."""

    def __init__(self) -> None:
        self.asked: str | None = None  # the signal's name
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is the system's
        self.asked = signal.Signals(number).name
        say_at_once(f"{self.asked}: finishing this step, then saving. Once more ends at once, without saving.")
        self.close()

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process alone; the kernel lets go when the process ends, however it ends.

    Raises RunLocked naming the owner; StorageFailed if there can be no lock.
    """
    path = folder / "lock"
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "ab+", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError as error:
            owner = path.read_text(encoding="utf-8").strip() or "another process"
            raise RunLocked(f"{folder} is in use by {owner}. Wait for it, stop it, or choose another out=") from error
        except OSError as error:
            raise storage_failed("lock", path, error) from error
        yield
