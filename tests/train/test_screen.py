"""A run and the screen that it is shown on: a terminal in which Ctrl-C is pressed, and screens that are lost."""

import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from eyeline.checkpoint import store
from eyeline.train.run import to_yaml
from tests.train.recipe import tiny_run

# Step 3 waits for the file `go`, so that nothing here depends on how fast a machine is.
HELD = """
import sys, time
from pathlib import Path
import eyeline.train.loop as loop
from eyeline.cli import main
held, go = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
original = loop.update
def update(*args, step, **more):
    if step == 2:
        held.touch()
        while not go.exists():
            time.sleep(0.01)
    return original(*args, step=step, **more)
loop.update = update
sys.exit(main())
"""


class Terminal:
    """`eyeline train` of a tiny run in a terminal of its own; step 3 is held until `release`."""

    def __init__(self, folder: Path, *overrides: str, columns: int = 120):
        self.run = tiny_run(folder, *overrides)
        self.held, self.go = folder / "held", folder / "go"
        (folder / "recipe.yaml").write_text(to_yaml(self.run))
        command = [sys.executable, "-c", HELD, str(self.held), str(self.go), "train", str(folder / "recipe.yaml")]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, command, os.environ | {"PYTHONPATH": "src", "TERM": "xterm"})
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.text = ""

    def read(self, until: Callable[[], bool]) -> None:
        """Read what is printed until something holds, or the program has ended."""
        while not until():
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # EIO: the other side is closed
                data = b""
            if not data:
                return
            self.text += data.decode(errors="replace")

    def frames(self) -> list[str]:
        """What the live display painted, one after another: each starts by going back up to its first line."""
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame) for frame in re.split(r"\r(?:\x1b\[2K)?(?:\x1b\[1A\x1b\[2K)+", self.text)]

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def release(self) -> None:
        self.go.touch()

    def code(self) -> int:
        self.read(lambda: False)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with suppress(OSError):
            os.close(self.fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*overrides: str) -> Terminal:
        made.append(Terminal(tmp_path, *overrides))
        made[-1].read(made[-1].held.exists)
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_notice_of_ctrl_c_stays_in_the_live_display(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal()
    shown.press(b"\x03")
    shown.read(lambda: "stopping after this step" in shown.text)
    first = len(shown.frames())
    shown.read(lambda: len(shown.frames()) >= first + 4)  # painted again and again while the step lasts
    assert all("SIGINT: stopping after this step, then saving." in frame for frame in shown.frames()[-3:-1])
    shown.release()
    assert shown.code() == 75
    assert "SIGINT: stopping after this step" in shown.frames()[-1]
    assert "3 steps are saved" in shown.frames()[-1]
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 3


def test_second_ctrl_c_quits_and_says_what_is_lost(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal("save_every=1")
    shown.press(b"\x03")
    shown.read(lambda: "A second signal quits without saving" in shown.text)
    shown.press(b"\x03")
    assert shown.code() == 130
    assert "second SIGINT: quit without saving; no step that was done is lost" in shown.frames()[-1]
    assert "Traceback" not in shown.text
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 2
