"""One line to the user at the screen. Figures go to `metrics.jsonl`, never here alone."""

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

from eyeline.core.errors import StorageFailed


def say(message: str) -> None:
    """An ordinary line, on standard output."""
    print(visible(message), flush=True)


def say_at_once(message: str) -> None:
    """A line from a signal's handler, which may run in the middle of a `say`: Python's buffers must not be entered again."""
    with suppress(OSError):  # the reader has gone
        os.write(1, (visible(message) + "\n").encode("utf-8", "backslashreplace"))


def warn(message: str) -> None:
    """A line that must not be missed, on standard error."""
    print(f"warning: {visible(message)}", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Text whose control characters and lone surrogates are spelt out: data can neither steer a terminal nor break its encoding."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


# A screen that is lost: a pipe whose reader has ended, a terminal that was closed, a disk that is full


class Unfailing(io.FileIO):
    """Standard output or error whose writes never fail: what cannot be written is dropped, and the first failure is said on standard
    error. A run must not end because its output is lost."""

    failed: OSError | None = None  # the first failure

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # it is set not to block (another program may do that to a terminal), and full
                select.select([], [self.fileno()], [])
        except OSError as error:
            if self.failed is None:
                self.failed = error
                if self.fileno() == 1:
                    with suppress(OSError):
                        os.write(
                            2,
                            f"warning: standard output cannot be written ({error.strerror}); the command continues without it\n".encode(),
                        )
            return memoryview(data).nbytes
        return written


def keep_streams() -> None:
    """Make standard output and error unfailing. Where one of the three streams was closed its number is /dev/null: the next file to be
    opened would be taken for it, and written into."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # it was replaced, by a test say, and is not the process's own
        writer = io.BufferedWriter(Unfailing(number, "wb", closefd=False))
        # a terminal without Unicode shows \\u2019, and is still written to
        how = (stream.encoding, stream.line_buffering, stream.write_through) if stream is not None else ("utf-8", False, False)
        setattr(sys, name, io.TextIOWrapper(writer, how[0], "backslashreplace", line_buffering=how[1], write_through=how[2]))


def refuse_lost_output() -> None:
    """StorageFailed where the result of a command is what it prints, and that could not be written. A reader that has seen enough
    (`| head`) is not a failure."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failed = raw.failed if isinstance(raw, Unfailing) else None
    if failed is not None and failed.errno != errno.EPIPE:
        raise StorageFailed(f"standard output could not be written: {failed.strerror}. Make room, or write it elsewhere") from failed
