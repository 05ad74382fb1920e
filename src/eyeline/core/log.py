"""One line to the person at the screen. Figures go to `metrics.jsonl`, never here alone."""

import os
import sys
from contextlib import suppress


def say(message: str) -> None:
    """An ordinary line, on standard output."""
    print(visible(message), flush=True)


def say_at_once(message: str) -> None:
    """A line from a signal's handler, which may run in the middle of a `say`: Python's buffers must not be entered again."""
    with suppress(OSError):  # nobody reads any more
        os.write(1, (visible(message) + "\n").encode("utf-8", "backslashreplace"))


def warn(message: str) -> None:
    """A line that must not be missed, on standard error."""
    print(f"warning: {visible(message)}", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Text whose control characters and lone surrogates are spelt out: data can neither steer a terminal nor break its encoding."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
