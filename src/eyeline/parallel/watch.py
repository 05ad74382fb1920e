"""Where each rank is, for the others to read: so that a rank which hangs or ends is named, with what it was doing.

Each rank has a file of its own that a thread writes every two seconds. It needs no answer from others: it works where collectives do not.
"""

import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyeline.core.errors import RankLost, Stopped
from eyeline.core.files import make_folder, read_json
from eyeline.core.world import World
from eyeline.parallel.calls import write_calls

EVERY_S = 2.0
CALLS_EVERY = 5  # times that long between copies of the last collectives: a file of 100 KB of each rank, on a file system that all share
CALLS, CRASH = ".calls", ".crash"  # endings of the files with a rank's last collectives, and with its stack where the system aborts it
ENDING_S = 1.0  # a process that ends closes its connections a moment before it is gone
RESUMES = "The same command resumes from the last checkpoint, if there is one"
PACKAGE = f"{Path(__file__).parent.parent}/"  # lines of ours
LATE_S = 6.0  # a rank that has not written for so long does not run
CACHED_S = 120.0  # a shared file system may show a file this late


@contextmanager
def watched(folder: Path, world: World, at: Callable[[], dict[str, Any]], timeout_s: float) -> Iterator[None]:
    """Write where this rank is as long as this lasts: what `at` returns (the step, and what its time is spent on), and the Python stack
    of the thread that trains. A single process has no other rank to report to.

    Where another rank has not written for `timeout_s` this process ends with RankLost's code, whatever it waits for: some waits have no
    limit of their own, such as those for a checkpoint.
    """
    if world.size == 1:
        yield
        return
    make_folder(folder)
    path, ended, trains = _file(folder, world.rank), threading.Event(), threading.get_ident()
    silence = Silence(folder, world, max(timeout_s, CACHED_S))

    last: dict[str, Any] = at()  # the step and phase that were written last: where an error ends the run, the clock has left the phase

    def tell() -> None:
        for turn in itertools.count():
            with suppress(OSError):  # a disk that is full is named by whatever needs what it writes
                last.update(at())
                _write(path, last, _stack(trains))
                if (rank := silence.rank()) is not None:
                    _end_for(rank, folder, world)
            if turn % CALLS_EVERY == 0:
                write_calls(path.with_suffix(CALLS))
            if ended.wait(EVERY_S):
                return

    crash = open(path.with_suffix(CRASH), "w", encoding="utf-8")  # noqa: SIM115 - open until the process is aborted, or this ends
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(crash)
    thread = threading.Thread(target=tell, daemon=True, name="watch")
    thread.start()
    ended_by: BaseException | None = None
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        ended_by = error  # its files stay, for the others to read
        raise
    finally:
        ended.set()
        (faulthandler.enable if was_enabled else faulthandler.disable)()
        crash.close()
        thread.join(EVERY_S)  # it must not outlive what its stack refers to
        if ended_by is not None:
            write_calls(path.with_suffix(CALLS))  # the last ones
            with suppress(OSError):
                stack = [f"{at.filename}:{at.lineno} {at.name}" for at in traceback.extract_tb(ended_by.__traceback__)]
                _write(path, last, stack, f"{type(ended_by).__name__}: {ended_by}")
        else:
            for written in (path, path.with_suffix(CALLS), path.with_suffix(CRASH)):
                written.unlink(missing_ok=True)
            with suppress(OSError):  # the last one to end finds it empty
                folder.rmdir()


def _write(path: Path, at: Mapping[str, Any], stack: Sequence[str], error: str | None = None) -> None:
    """Replace a rank's file. `error`: what ended the rank."""
    own = [line for line in stack if line.startswith(PACKAGE) and not line.startswith(__file__)]
    where = {"host": socket.gethostname(), "pid": os.getpid(), **at, "line": own[-1] if own else "", "stack": stack, "error": error}
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(where), encoding="utf-8")  # not flushed to disk: it is old in a moment
    os.replace(new, path)


class Silence:
    """Notices a rank whose file does not change: its process is stopped, or its machine is gone. Rank 0 watches all others, and rank 1
    watches rank 0; that one of them ends is seen by the rest at once. Only this machine's monotonic clock counts."""

    def __init__(self, folder: Path, world: World, limit_s: float) -> None:
        watches = range(1, world.size) if world.first else range(1 if world.rank == 1 else 0)
        self._files = {rank: _file(folder, rank) for rank in watches}
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> the time in its file's record, and when that was first seen here
        self._limit_s = limit_s

    def rank(self) -> int | None:
        """A rank that has been silent for too long, if there is one. One without a file has not started to write, or has ended."""
        for rank, file in self._files.items():
            try:
                changed = file.stat().st_mtime_ns
            except OSError:
                self._seen.pop(rank, None)
                continue
            if rank not in self._seen or self._seen[rank][0] != changed:
                self._seen[rank] = changed, time.monotonic()
            elif time.monotonic() - self._seen[rank][1] > self._limit_s:
                return rank
        return None


def _end_for(rank: int, folder: Path, world: World) -> None:
    """End this process: the thread that trains waits for that rank, and does not return."""
    message = f"eyeline: rank {world.rank} ends, since rank {rank} does not run. {where_ranks_are(folder, world)}. {RESUMES}\n"
    os.write(2, message.encode())
    os._exit(RankLost.code)


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
    while not any(map(has_ended, (ranks := heard()).values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    furthest = max((where["step"] for where in ranks.values()), default=0)
    lines = []
    for rank, where in ranks.items():
        silent, ended = time.time() - where["written"], has_ended(where)
        if not ended and silent < LATE_S and where["step"] == furthest and len(ranks) > 1:
            continue  # it waits, as this one does
        who = f"rank {rank} (process {where['pid']} on {where['host']})"
        how = "has ended, and was" if ended else "was"
        line = f", at {where['line'].removeprefix(PACKAGE)}" if where["line"] else ""
        lines.append(f"{who} {how} last heard of {silent:.0f} s ago: step {where['step'] + 1}, {where['phase']}{line}")
    return "; ".join(lines)


def has_ended(where: dict[str, Any]) -> bool:
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
