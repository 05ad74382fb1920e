"""Lines as a person types them: in a terminal of the kernel's making, with the keys that it sends."""

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyeline.generate.terminal import completions, harmless, line_reader, without_keys

LOOP = """
import sys
sys.path[:] = {path!r}
from eyeline.generate.terminal import line_reader
read = line_reader()
while True:
    print("got", ascii(read("> ")), flush=True)
"""


class Terminal:
    """A process whose standard input and output are a terminal."""

    def __init__(self, folder: Path):
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-c", LOOP.format(path=sys.path)]
        environment = os.environ | {"TERM": "xterm", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, close_fds=True)
        os.close(theirs)
        self.seen = b""

    def type(self, keys: str, until: str) -> None:
        os.write(self.ours, keys.encode())
        self.wait(until)

    def wait(self, until: str) -> None:
        """Until this was written; what came before it is forgotten."""
        deadline = time.monotonic() + 60
        while until.encode() not in self.seen:
            assert time.monotonic() < deadline, f"{until!r} did not come: {self.seen!r}"
            self.seen += os.read(self.ours, 1 << 16)
        self.seen = self.seen.partition(until.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


UP, LEFT, HOME, DELETE = "\x1b[A", "\x1b[D", "\x1b[H", "\x1b[3~"


def test_keys_edit_the_line_and_recall_earlier_ones(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    (tmp_path / "photo of a cat.png").write_bytes(b"")
    terminal = Terminal(tmp_path)
    try:
        terminal.wait("> ")
        terminal.type("what is it?\r", "got 'what is it?'")
        terminal.wait("> ")
        terminal.type(f"{UP}\r", "got 'what is it?'")
        terminal.wait("> ")
        terminal.type(f"bc{LEFT}{LEFT}a\r", "got 'abc'")
        terminal.wait("> ")
        terminal.type(f"{UP}{UP}{UP}{HOME}{DELETE}W\r", "got 'What is it?'")
        terminal.wait("> ")
        terminal.type("/im\tph\t\r", "got '/image photo of a cat.png'")
    finally:
        terminal.close()


def test_keys_are_not_sent_where_nothing_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without readline, as on Windows, or where lines come from a pipe."""
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x1b[A\nred\x1b[D\x1bOC \xff?\nno line end")))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    read = line_reader()
    assert [read(""), read(""), read("")] == ["", "red \ufffd?", "no line end"]
    with pytest.raises(EOFError):
        read("")


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("\x1b[A", ""),
        ("\x1bOA", ""),
        ("\x1b[1;5Cword", "word"),
        ("a\x7fb\x00", "ab"),
        ("a\tb é 色", "a\tb é 色"),
        ("\x1b", ""),
        ("[A", "[A"),
    ],
)
def test_what_keys_send_is_no_text(typed: str, left: str) -> None:
    assert without_keys(typed) == left


def test_completions_are_commands_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat.png", "cats/", ".cache/", "dog.png", "cats/one.png"):
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_bytes(b"")
    assert completions("/n") == ["/new"]
    assert completions("/") == ["/image ", "/new", "/help", "/exit", "/quit"]
    assert completions("what") == []
    assert completions("/image ca") == ["/image cat.png", "/image cats/"]
    assert completions("/image .c") == ["/image .cache/"]
    assert completions("/image cats/") == ["/image cats/one.png"]
    assert completions("/image nowhere/x") == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completions("/image ~/d") == ["/image ~/dog.png"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9b\r\n\tä") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\tä"
