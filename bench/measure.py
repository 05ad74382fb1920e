"""Interleaved pairs of two sides on the same work, and the record that keeps what came out."""

import ctypes
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eyeline.core.errors import Refused
from eyeline.core.files import write_json
from eyeline.core.log import say
from eyeline.core.problems import lines_of
from eyeline.parallel.launch import machine
from eyeline.train.environment import environment

LEAST_PAIRS = 5  # fewer say nothing about the spread: a result from them is marked as a trial


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Timed(Record):
    """What one pass over the work took. CPU time is of the process (and its children), over all threads."""

    cpu_s: float
    wall_s: float


class Spread(Record):
    """Median, least and greatest of the pairs' values."""

    median: float
    low: float
    high: float


class Comparison(Record):
    """One thing that both sides did, in pairs (ours, the peer's) one after the other."""

    name: str
    unit: str  # what `amount` counts, by its full name: "optimizer steps", "real tokens"
    amount: float  # of work in one pass of ours; the peer's pass is the same work
    ours: tuple[Timed, ...]
    peer: tuple[Timed, ...]
    limit: float | None  # of the judged ratio; None: shown, not judged
    judged: Literal["time", "rate"]  # ours ÷ peer of CPU time, at most `limit`; or of units a CPU second, at least `limit`

    def ratio(self, of: Literal["cpu_s", "wall_s"]) -> Spread:
        """Ours ÷ peer, pair by pair: of time, or of the rate (the other way round)."""
        return spread([self._judged(getattr(a, of), getattr(b, of)) for a, b in zip(self.ours, self.peer, strict=True)])

    def _judged(self, ours: float, peer: float) -> float:
        return ours / peer if self.judged == "time" else peer / ours

    @property
    def met(self) -> bool | None:
        median = self.ratio("cpu_s").median
        if self.limit is None:
            return None
        return median <= self.limit if self.judged == "time" else median >= self.limit


class Fact(Record):
    """A number that belongs to the result in addition to the comparisons, with its limit if it has one ("at most 0.03")."""

    name: str
    value: float | str
    limit: str = ""
    met: bool | None = None


class Result(Record):
    """What `bench/results/CASE.json` holds."""

    version: Literal[1] = 1
    case: str
    command: str
    work: str  # what was done, in sentences
    agreement: str  # how the two sides were found to do the same
    comparisons: tuple[Comparison, ...]
    facts: tuple[Fact, ...] = ()
    environment: dict[str, object]
    load: tuple[float, float]  # the machine's load average (1 minute) before and after: over 1.5 other processes were busy
    when: str  # UTC, to the minute


def spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def interleaved(sides: Mapping[str, Callable[[], Timed]], pairs: int, name: str) -> dict[str, tuple[Timed, ...]]:
    """Run the sides in turn, so often, after one round that is thrown away: it fills caches and memory pools for all."""
    made: dict[str, list[Timed]] = {side: [] for side in sides}
    for number in range(pairs + 1):
        for side, once in sides.items():
            made[side].append(once())
        shown = ", ".join(f"{side} {times[-1].cpu_s:.2f} CPU s ({times[-1].wall_s:.2f} wall)" for side, times in made.items())
        say(f"{name} {number or 'warm-up'}: {shown}")
    return {side: tuple(times[1:]) for side, times in made.items()}


class Stopwatch:
    """CPU and wall time of this process, from its making to each `read`."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> Timed:
        return Timed(cpu_s=time.process_time() - self.cpu, wall_s=time.perf_counter() - self.wall)


def timed(side: Callable[[], object]) -> Callable[[], Timed]:
    """The side as something that `interleaved` can time."""

    def once() -> Timed:
        watch = Stopwatch()
        side()
        return watch.read()

    return once


def peak_bytes(side: Callable[[], object]) -> int:
    """The most resident memory of this process while `side` runs, above what it has before. Linux counts it; Refused elsewhere.

    What the allocator of the C library kept from before is given back first, so that no side lives on another's pages.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        raise Refused("peak memory is measured through /proc, which this system does not have. Run this benchmark on Linux.")

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)
    reset.write_text("5")  # sets the peak to what is resident now (Linux, proc_pid_clear_refs)
    before = kilobytes("VmRSS:")
    side()
    return (kilobytes("VmHWM:") - before) * 1024


class Conditions:
    """The machine and the hour of a result: made before the work, read after it."""

    def __init__(self) -> None:
        self.before = os.getloadavg()[0]
        self.here = machine("cpu", threads=1)

    def read(self) -> dict[str, object]:
        """The fields `environment`, `load` and `when` of a Result."""
        found = environment(self.here) | {"accelerate": _accelerate(), "machine": platform.machine(), "cores": os.cpu_count()}
        when = datetime.now(UTC).isoformat(timespec="minutes")
        return {"environment": found, "load": (self.before, os.getloadavg()[0]), "when": when}


def _accelerate() -> str:
    try:
        return version("accelerate")
    except PackageNotFoundError:
        return "not installed"


class NoPeer(Refused):
    """A peer is not installed."""


def needs_peers() -> None:
    """NoPeer where the Trainer is missing."""
    needs("dev", ("transformers", "accelerate"))


def needs(extra: str, modules: Sequence[str]) -> None:
    """NoPeer where a module of the extra is missing: a benchmark without its peer is none."""
    missing = [name for name in modules if not _installed(name)]
    if missing:
        raise NoPeer(f"a peer of this benchmark is not installed ({', '.join(missing)}). Try: pip install --editable '.[{extra}]'")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def write_result(folder: Path, result: Result) -> Path:
    """Write FOLDER/CASE.json, replacing an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.case}.json"
    write_json(path, result.model_dump(mode="json"))
    return path


def read_result(path: Path) -> Result:
    """The result in a file; Refused with the field at fault where it is none."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        wrong = lines_of(Result, None, error)[0]
        raise Refused(f"{path} is not a benchmark result of version 1: {wrong}. Run the benchmark again.") from error
