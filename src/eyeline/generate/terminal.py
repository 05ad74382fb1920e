"""Lines read from a user at a terminal, with editing, history and completion; text written there."""

import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

COMMANDS = ("/image ", "/new", "/help", "/exit", "/quit")
Read = Callable[[str], str]  # shows a prompt and returns a line; EOFError ends the conversation
Write = Callable[[str], None]

_KEY = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?")  # what a terminal sends for an arrow key, Home, Delete, ...


def line_reader() -> Read:
    """Reads lines from standard input. In a terminal the arrow keys edit the line and recall earlier ones, and Tab completes commands
    and paths, where this Python has readline. Keys that do not edit are not part of the line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is not text does not end the chat
    if sys.stdin.isatty():
        _edit_lines()
    return lambda prompt: without_keys(input(prompt))


def _edit_lines() -> None:
    """Give `input` line editing and a history, which lasts as long as the process."""
    try:
        import readline
    except ImportError:  # Windows, and some builds of Python
        return
    readline.set_completer_delims("")  # a completion is of the whole line
    readline.set_completer(lambda line, n: dict(enumerate(completions(line))).get(n))
    libedit = "libedit" in (readline.__doc__ or "")  # in place of GNU readline on macOS, with key bindings of its own
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")


def completions(line: str) -> list[str]:
    """The completions of a line: commands, and paths after `/image `."""
    if not line.startswith("/image "):
        return [command for command in COMMANDS if command.startswith(line)] if line.startswith("/") else []
    folder, start = os.path.split(line.removeprefix("/image "))
    at = Path(folder or ".").expanduser()
    try:
        names = sorted(os.listdir(at))
    except OSError:
        return []
    fitting = [name for name in names if name.startswith(start) and (start.startswith(".") or not name.startswith("."))]
    return [f"/image {os.path.join(folder, name)}{'/' if (at / name).is_dir() else ''}" for name in fitting]


def without_keys(line: str) -> str:
    """The line without control characters and without what terminals send for keys such as the arrows."""
    return "".join(c for c in _KEY.sub("", line) if unicodedata.category(c) != "Cc" or c == "\t")


def harmless(text: str) -> str:
    """Text without control characters, which could move the cursor or worse; line breaks and tabs stay."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def to_screen(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
