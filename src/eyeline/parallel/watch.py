"""Where each rank is, for the others to read: so that a rank which hangs or ends is named, with what it was doing.

Each rank has a file of its own that a thread writes every two seconds. It needs no answer from others: it works where collectives do not.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyeline.core.errors import Stopped
from eyeline.core.files import make_folder, read_json
from eyeline.core.world import World
from eyeline.parallel.calls import write_calls

EVERY_S = 2.0
CALLS, CRASH = ".calls", ".crash"  # endings of the files with a rank's last collectives, and with its stack where the system aborts it
ENDING_S = 1.0  # a process that ends closes its connections a moment before it is gone
PACKAGE = f"{Path(__file__).parent.parent}/"  # lines of ours
LATE_S = 6.0  # a rank that has not written for so long does not run


@contextmanager
def watched(folder: Path, world: World, at: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Write where this rank is as long as this lasts: what `at` returns (the step, and what its time is spent on), and the Python stack
    of the thread that trains. A single process has no other rank to report to."""
    if world.size == 1:
        yield
        return
    make_folder(folder)
    path, ended, trains = _file(folder, world.rank), threading.Event(), threading.get_ident()

    def tell() -> None:
        while True:
            stack = _stack(trains)
            own = [line for line in stack if line.startswith(PACKAGE) and not line.startswith(__file__)]
            where = {"host": socket.gethostname(), "pid": os.getpid(), **at(), "line": own[-1] if own else "", "stack": stack}
            with suppress(OSError):  # a disk that is full is named by whatever needs what it writes
                new = path.with_suffix(".tmp")
                new.write_text(json.dumps(where), encoding="utf-8")  # not flushed to disk: it is old in a moment
                os.replace(new, path)
            write_calls(path.with_suffix(CALLS))
            if ended.wait(EVERY_S):
                return

    crash = open(path.with_suffix(CRASH), "w", encoding="utf-8")  # noqa: SIM115 - open until the process is aborted, or this ends
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(crash)
    thread = threading.Thread(target=tell, daemon=True, name="watch")
    thread.start()
    stays = False
    try:
        yield
    except Stopped:
        raise
    except BaseException:
        stays = True  # for the others to read
        raise
    finally:
        ended.set()
        (faulthandler.enable if was_enabled else faulthandler.disable)()
        crash.close()
        thread.join(EVERY_S)  # it must not outlive what its stack refers to
        if stays:
            write_calls(path.with_suffix(CALLS))  # the last ones
        else:
            for written in (path, path.with_suffix(CALLS), path.with_suffix(CRASH)):
                written.unlink(missing_ok=True)
            with suppress(OSError):  # the last one to end finds it empty
                folder.rmdir()


def _stack(thread: int) -> list[str]:
    """The lines that a thread is in, outermost first. The frame itself is not kept: it would keep all that its functions hold."""
    frame = sys._current_frames().get(thread)
    return [f"{at.filename}:{at.lineno} {at.name}" for at in traceback.extract_stack(frame)] if frame else []


def where_ranks_are(folder: Path, world: World) -> str:
    """What is known of the other ranks that do not run, or are behind: when each was last heard of, its step, what it was doing, and where
    in the code."""

    def heard() -> dict[int, dict[str, Any]]:
        return {rank: where for rank in range(world.size) if rank != world.rank and (where := _read(_file(folder, rank)))}

    deadline = time.monotonic() + ENDING_S
    while not any(map(_has_ended, (ranks := heard()).values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    furthest = max((where["step"] for where in ranks.values()), default=0)
    lines = []
    for rank, where in ranks.items():
        silent, ended = time.time() - where["written"], _has_ended(where)
        if not ended and silent < LATE_S and where["step"] == furthest and len(ranks) > 1:
            continue  # it waits, as this one does
        who = f"rank {rank} (process {where['pid']} on {where['host']})"
        how = "has ended, and was" if ended else "was"
        line = f", at {where['line'].removeprefix(PACKAGE)}" if where["line"] else ""
        lines.append(f"{who} {how} last heard of {silent:.0f} s ago: step {where['step'] + 1}, {where['phase']}{line}")
    return "; ".join(lines)


def _has_ended(where: dict[str, Any]) -> bool:
    """Return whether a rank on this machine does not run any more. Of another machine that is not known."""
    if where["host"] != socket.gethostname():
        return False
    try:
        state = Path(f"/proc/{where['pid']}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self").exists()  # else the system does not tell
    return state == "Z"  # a zombie: its parent has not waited for it yet


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path) | {"written": path.stat().st_mtime}
    except (OSError, ValueError):
        return None
