"""Where each rank is, for the others to read: so that a rank which hangs or ends is named, with what it was doing.

Each rank has a file of its own that a thread writes every two seconds. It needs no answer from others: it works where collectives do not.
"""

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

from eyeline.core.files import make_folder, read_json
from eyeline.core.world import World

EVERY_S = 2.0
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
            frame = sys._current_frames().get(trains)
            stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(frame)] if frame else []
            own = [line for line in stack if line.startswith(PACKAGE)]
            where = {"host": socket.gethostname(), "pid": os.getpid(), **at(), "line": own[-1] if own else "", "stack": stack}
            with suppress(OSError):  # a full disk is reported where a file must be written
                new = path.with_suffix(".tmp")
                new.write_text(json.dumps(where), encoding="utf-8")  # not flushed to disk: it is old in a moment
                os.replace(new, path)
            if ended.wait(EVERY_S):
                return

    thread = threading.Thread(target=tell, daemon=True, name="watch")
    thread.start()
    try:
        yield
    except BaseException:
        ended.set()  # the file stays, for the others
        raise
    else:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the last one to end finds it empty
            folder.rmdir()


def where_ranks_are(folder: Path, world: World) -> str:
    """A line per rank that does not run or is behind the others: its step, what it was doing, and where in the code."""
    told = {rank: _read(_file(folder, rank)) for rank in range(world.size) if rank != world.rank}
    steps = [where["step"] for where in told.values() if where]
    lines = []
    for rank, where in told.items():
        if where is None:
            continue
        silent = time.time() - where["written"]
        if silent < LATE_S and where["step"] == max(steps) and len(told) > 1:
            continue  # it waits, as this one does
        how = f"has not been heard of for {silent:.0f} s" if silent >= LATE_S else "runs"
        who, when = f"rank {rank} (process {where['pid']} on {where['host']})", f"step {where['step'] + 1}, {where['phase']}"
        lines.append(f"{who} {how}; {when}, at {where['line'].removeprefix(PACKAGE)}")
    return "; ".join(lines)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path) | {"written": path.stat().st_mtime}
    except (OSError, ValueError):
        return None
