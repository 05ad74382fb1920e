"""A run and the screen that it is shown on: a terminal in which Ctrl-C is pressed, and screens that are lost."""

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.files import read_lines
from eyeline.core.log import Unfailing
from eyeline.train.run import to_yaml
from tests.forked import Forked, forked_command, run_command
from tests.train.recipe import tiny_run


def hold_step_3(held: Path, go: Path) -> None:
    """Until the file `go` exists, so that nothing here depends on how fast a machine is."""
    original = loop.update

    def update(*args: Any, step: int, **more: Any) -> Any:
        if step == 2:
            held.touch()
            while not go.exists():
                time.sleep(0.01)
        return original(*args, step=step, **more)

    loop.update = update


class Terminal:
    """`eyeline train` of a tiny run in a terminal of its own; step 3 is held until `release`."""

    def __init__(self, folder: Path, *overrides: str, columns: int = 120):
        self.run = tiny_run(folder, *overrides)
        self.held, self.go = folder / "held", folder / "go"
        (folder / "recipe.yaml").write_text(to_yaml(self.run))
        ours, its = pty.openpty()
        self.fd = ours

        def run() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup, which is inherited
            os.login_tty(its)
            for name in ("COLUMNS", "LINES"):  # they outrank the terminal's size
                os.environ.pop(name, None)
            os.environ["TERM"] = "xterm"
            run_command("train", str(folder / "recipe.yaml"), before=lambda: hold_step_3(self.held, self.go))

        self.process = Forked(run, (its,))
        os.close(its)
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
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
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
    assert "3 steps saved" in shown.frames()[-1]
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 3


def test_second_ctrl_c_quits_and_says_what_is_lost(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal("save_steps=1")
    shown.press(b"\x03")
    shown.read(lambda: "A second signal quits without saving" in shown.text)
    shown.press(b"\x03")
    assert shown.code() == 130
    assert "second SIGINT: quit without saving; no step that was done is lost" in shown.frames()[-1]
    assert "Traceback" not in shown.text
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 2


def test_terminal_that_is_closed_ends_the_run_saved(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Its process gets SIGHUP, and every write to the terminal fails from then on."""
    shown = terminal("save_steps=1000")
    os.close(shown.fd)
    shown.release()
    assert shown.process.wait(60) == 75
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 3


def done_steps(folder: Path) -> int:
    newest = store.newest(folder / "run" / "checkpoints")
    assert newest is not None and newest.state["stage"] == 2  # of two: it has ended
    assert sum(line["kind"] == "step" for line in read_lines(folder / "run" / "metrics.jsonl")) == newest.step
    return newest.step


def test_pipe_whose_reader_ends_does_not_end_the_run(tmp_path: Path) -> None:
    """As `eyeline train … | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(tiny_run(tmp_path, "logging_steps=1")))
    with open(tmp_path / "errors", "wb") as errors:
        ended = forked_command("train", str(recipe), stdout=writing, stderr=errors.fileno())
    os.close(writing)
    code, said = ended.wait(60), (tmp_path / "errors").read_text()
    assert (code, done_steps(tmp_path)) == (0, 8), said
    assert said == "warning: standard output cannot be written (Broken pipe); the command continues without it\n"
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_full_disk_under_standard_output_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny_run(tmp_path, "logging_steps=1")))
    with open("/dev/full", "wb") as full:
        ended = forked_command("train", str(tmp_path / "recipe.yaml"), stdout=full.fileno())
    assert (ended.wait(60), done_steps(tmp_path)) == (0, 8)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_result_that_could_not_be_printed_is_a_failure() -> None:
    command = [sys.executable, "-m", "eyeline", "env"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": "src"}, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 5
    assert "eyeline: standard output could not be written: No space left on device." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_number_of_a_closed_stream_goes_to_no_file(tmp_path: Path) -> None:
    """Else the next file that is opened gets it, and a notice of a signal would be written into that file."""
    program = "import os; from eyeline.core.log import keep_streams; keep_streams(); os.write(2, b'%d' % os.open('file', os.O_CREAT))"
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, program]
    env = os.environ | {"PYTHONPATH": str(Path("src").resolve())}
    ended = subprocess.run(shell, cwd=tmp_path, env=env, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, int(ended.stderr) > 2) == (0, True)


def test_writer_that_may_not_block_waits() -> None:
    """Another program on the same terminal may have set it so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    with Unfailing(writing, "wb", closefd=True) as stream:
        reader = threading.Thread(target=lambda: os.read(reading, 1 << 20))
        reader.start()
        assert stream.write(b"now") == 3
        reader.join()
    os.close(reading)
