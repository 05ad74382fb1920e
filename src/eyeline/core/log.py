"""One line to the person at the screen. Figures go to `metrics.jsonl`, never here alone."""

import sys


def say(message: str) -> None:
    """An ordinary line, on standard output."""
    print(message, flush=True)


def warn(message: str) -> None:
    """A line that must not be missed, on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
