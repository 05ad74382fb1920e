"""Asking a run to end, and making sure that it is the only one in its folder."""

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from eyeline.core.errors import Abandoned, RunLocked
from eyeline.core.files import storage_failed
from eyeline.core.log import say_at_once

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """Notes SIGTERM, SIGINT and SIGHUP (a terminal that is closed), so that the loop ends at its next step border, all saved.

    A second SIGTERM or SIGINT raises Abandoned. A second SIGHUP says nothing new: a terminal that is closed sends several. Where
    SIGHUP is ignored already (nohup) it stays ignored.
    """

    def __init__(self, tell: Callable[[str], None] = say_at_once, once_s: float = 0.0) -> None:
        """`tell` shows a line to the user. It is called by a handler, so in the middle of anything else. Signals that come within `once_s`
        seconds are one: a scheduler signals every process, and the launcher of the ranks passes it on to them once more."""
        self._once_s = once_s
        self._noted: float | None = None  # when a signal reached this process
        self.asked: str | None = None  # the signal's name
        self.done = self.saved = 0  # global steps: done, and of these in a checkpoint
        self._tell = tell
        self._telling = False
        self._second: int | None = None  # a second signal that came while the first was being told
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._before = {number: signal.signal(number, self._note) for number in ASKING if not (ignored and number == signal.SIGHUP)}

    def hear(self, asked: Iterable[str | None]) -> None:
        """Take what other ranks were asked for one's own."""
        self.asked = self.asked or next((one for one in asked if one is not None), None)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is the system's
        first, self._noted = self._noted is None, self._noted or time.monotonic()
        if self.asked is None:
            self.asked = signal.Signals(number).name
            self._telling = True
            self._tell(f"{self.asked}: stopping after this step, then saving. A second signal quits without saving: {self.lost()}")
            self._telling = False
            if self._second is not None:
                self._quit(self._second)
        elif not first and number != signal.SIGHUP and time.monotonic() - self._noted >= self._once_s:
            if self._telling:  # an exception in the middle of painting would be lost with it
                self._second = number
            else:
                self._quit(number)

    def _quit(self, number: int) -> None:
        self.close()  # a third one is the system's
        raise Abandoned(f"second {signal.Signals(number).name}: quit without saving; {self.lost()}", 128 + number)

    def lost(self) -> str:
        """The steps that are lost if the process ends now, in words."""
        if self.done == self.saved:
            return "no step that was done is lost"
        steps = f"step {self.done} is" if self.done == self.saved + 1 else f"steps {self.saved + 1:,} to {self.done:,} are"
        return f"{steps} lost; " + (f"the same command resumes from step {self.saved:,}" if self.saved else "nothing has been saved yet")

    def close(self) -> None:
        """Restore the signal handlers from before."""
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
