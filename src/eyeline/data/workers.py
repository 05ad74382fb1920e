"""Worker processes that read and decode ahead of their turn: results come in the order of the jobs, whichever worker did them, even
after workers crashed.

They are made for decoding: a job is a pack, its *parts* are rows. A worker says which row it is at and whether it reads or decodes it.
When it crashes, or is killed because decoding took too long, that row is done again alone, in a worker of its own; only a row that
crashes that one too is given up, as a reject. All other rows are done again. A worker may take as much memory as decoding the largest
allowed image needs. Making indexes (`plan/index.py`) uses the same processes, with jobs of no parts and no limit of memory.

Jobs and results travel in anonymous memory whose handle is passed over a socket: no named file can be left behind,
and neither side ever waits for the other to read. Workers end when their socket does, and at once when their parent ends.
"""

import ctypes
import io
import mmap
import os
import pickle
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import torch

from eyeline.core.errors import EXPECTED, BadSample, OutOfMemory, Refused, StorageFailed
from eyeline.core.log import say

DECODER_BYTES = 4 << 30  # what a worker may take beyond what it has when it starts: the largest image that is allowed needs 1.5 GiB
AHEAD = 16  # jobs a worker at most: bytes are the limit, unless jobs are tiny
TRIES = 3  # of a job, or of starting workers, before the machine is blamed
TICK_S = 0.5
DYING_S = 5.0

Phase = Literal["idle", "reading", "decoding"]
PHASES: tuple[Phase, ...] = ("idle", "reading", "decoding")
At = Callable[[int, Phase], None]  # says: this part (-1: none) is now in this phase
T = TypeVar("T")
R = TypeVar("R")


class Job(Protocol):
    """One task of a worker. Picklable."""

    @property
    def bytes(self) -> int: ...  # about what its result will hold

    def only(self, part: int) -> Self: ...  # a job of this part alone

    def without(self, part: int, bad: BadSample) -> Self: ...  # the same job with this part given up


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Workers:
    """The number of workers, and their time limits."""

    count: int
    read_ahead: int  # bytes of results that may wait for their turn; one job is always under way
    decode_timeout_s: float  # for one part
    read_timeout_s: float
    most_bytes: int | None = DECODER_BYTES  # of memory that each may take; None: as much as there is


def in_order(asked: Iterator[tuple[T, J]], work: Callable[[J, At], R], workers: Workers) -> Iterator[tuple[T, R]]:
    """Each tag and the result of its job. `work` pickles. Raises what a job raised, in its turn. Closing it ends the workers."""
    pool: _Processes[J, R] = _Processes(work, workers)
    try:
        tags: deque[T] = deque()
        waiting = _next(asked)
        while not isinstance(waiting, BaseException | None) or tags:
            while not isinstance(waiting, BaseException | None) and pool.has_room(waiting[1]):
                tags.append(waiting[0])
                pool.submit(waiting[1])
                waiting = _next(asked)
            yield tags.popleft(), pool.next_result()
        if waiting is not None:
            raise waiting
    finally:
        pool.close()


def _next(asked: Iterator[T]) -> T | Exception | None:
    """The next of them, None at the end, or what stopped them: it is raised when its turn has come."""
    try:
        return next(asked, None)
    except EXPECTED as expected:
        return expected


@dataclass(frozen=True)
class Failed:
    """An exception on its way to the main process."""

    kind: str  # the name of an expected one, or empty
    message: str

    def raised(self) -> Exception:
        kinds = {kind.__name__: kind for kind in EXPECTED}
        return kinds[self.kind](self.message) if self.kind else RuntimeError(f"in a worker:\n{self.message}")


def new_process(handle: int, progress: int, most_bytes: int | None) -> subprocess.Popen[bytes]:
    """A process of its own that runs `serve`, with the packages that this one sees."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from eyeline.data.workers import serve; "
    return subprocess.Popen(
        [sys.executable, "-c", code + f"serve({handle}, {progress}, {os.getpid()}, {most_bytes})"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(handle, progress),
    )


class Worker:
    """One process, the socket to it, and the memory in which it says what it is at."""

    def __init__(self, work: bytes, most_bytes: int | None):
        mine, its = socket.socketpair()
        progress = _memory()
        os.ftruncate(progress, _PROGRESS.size)
        # Ctrl-C and a hangup reach every process of a terminal, and schedulers send SIGTERM to every process of a job; the main one ends
        # the run in order, and its workers with it. They inherit what is blocked here; the main one has what came meanwhile right after
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            self.process = new_process(its.fileno(), progress, most_bytes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its.close()
        self.socket = mine
        self.progress = mmap.mmap(progress, _PROGRESS.size)
        os.close(progress)
        _say(self.progress, -1, -1, "idle")
        self.queue: deque[int] = deque()  # the jobs it was sent and has not answered
        self.send_parcel(work)

    def send_parcel(self, value: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: reading from it will raise
            _send(self.socket, value)

    def at(self) -> tuple[int, int, Phase, float]:
        """(job, part, phase, seconds since it is in it)."""
        job, part, phase, since = _PROGRESS.unpack_from(self.progress)
        return job, part, PHASES[phase], (time.monotonic_ns() - since) / 1e9

    def end(self, dying: bool = False) -> str:
        """Kill it, and say how it had ended if it had."""
        if dying:  # its socket ended before the rest of it
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(DYING_S)
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.progress.close()
        if code is None:
            return "killed"
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"


class _Processes(Generic[J, R]):
    def __init__(self, work: Callable[[J, At], R], settings: Workers):
        self.settings = settings
        self.work = pickle.dumps(work)
        self.jobs: dict[int, J] = {}  # not yet answered, or answered and not yet asked for
        self.results: dict[int, R | Exception] = {}
        self.tries: dict[int, int] = {}
        self.submitted = self.taken = 0
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        for _ in range(settings.count):
            self._enrol(self._hired())

    def _hired(self) -> Worker:
        return Worker(self.work, self.settings.most_bytes)

    def _enrol(self, worker: Worker) -> None:
        self.workers.append(worker)
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)

    def has_room(self, job: J) -> bool:
        self._look(0)
        ahead = sum(job.bytes for job in self.jobs.values()) + job.bytes
        return not self.jobs or (ahead <= self.settings.read_ahead and len(self.jobs) < AHEAD * self.settings.count)

    def submit(self, job: J) -> None:
        """Give it to the worker with the least to do."""
        number, self.submitted = self.submitted, self.submitted + 1
        self.jobs[number] = job
        self._give(min(self.workers, key=lambda worker: sum(self.jobs[n].bytes + 1 for n in worker.queue)), number)

    def _give(self, worker: Worker, number: int) -> None:
        worker.queue.append(number)
        worker.send_parcel((number, self.jobs[number]))

    def next_result(self) -> R:
        number, self.taken = self.taken, self.taken + 1
        while number not in self.results:
            self._look(TICK_S)
        del self.jobs[number]
        self.tries.pop(number, None)
        result = self.results.pop(number)
        if isinstance(result, Exception):
            raise result
        return result

    def _look(self, wait_s: float) -> None:
        """Take results that have arrived, and replace workers that have ended or hang."""
        for key, _ in self.selector.select(wait_s):
            worker: Worker = key.data
            try:
                number, result = receive(worker.socket)
            except EOFError:
                self._replace(worker, hung=None)
                continue
            assert worker.queue.popleft() == number
            self.results[number] = result.raised() if isinstance(result, Failed) else result
        for worker in self.workers.copy():
            hung = self._hung(worker)
            if hung is not None and not select.select([worker.socket], [], [], 0)[0]:  # else it has answered meanwhile
                self._replace(worker, hung)

    def _hung(self, worker: Worker) -> Phase | None:
        """The phase in which it has been for too long."""
        *_, phase, seconds = worker.at()
        limits = {"idle": float("inf"), "reading": self.settings.read_timeout_s, "decoding": self.settings.decode_timeout_s}
        return phase if seconds > limits[phase] else None

    def _replace(self, worker: Worker, hung: Phase | None) -> None:
        """Another worker takes over the jobs, after the part that may be to blame was tried alone."""
        self.selector.unregister(worker.socket)
        self.workers.remove(worker)
        number, part, *_ = worker.at()
        how = worker.end(dying=hung is None)
        fresh: Worker | None = None
        if hung == "reading":
            self.results[worker.queue.popleft()] = self._silent_store()
        elif worker.queue and worker.queue[0] == number and part >= 0:
            fresh = self._tried_alone(number, part)
        elif worker.queue:
            self._blameless(worker.queue[0], how)
        fresh = fresh or self._hired()
        for lost in worker.queue:
            self._give(fresh, lost)
        self._enrol(fresh)

    def _tried_alone(self, number: int, part: int) -> Worker | None:
        """Do the part alone in a new worker. If that one lives, it is returned; if it does not, the part is given up."""
        alone = self._hired()
        alone.send_parcel((number, self.jobs[number].only(part)))
        with selectors.DefaultSelector() as selector:
            selector.register(alone.socket, selectors.EVENT_READ)
            while (hung := self._hung(alone)) is None and not selector.select(TICK_S):
                pass
        if hung is None:
            with suppress(EOFError):
                receive(alone.socket)
                self._blameless(number, "killed, and its part was decoded alone", alone)
                return alone
        reached, at, *_ = alone.at()
        how = alone.end(dying=hung is None)
        if hung == "reading":
            raise self._silent_store()
        if reached != number or at < 0:
            self._blameless(number, how)
        elif hung:
            bad = BadSample("decoder_hung", "image", f"decoding it alone did not end within {self.settings.decode_timeout_s:g} s")
            self.jobs[number] = self.jobs[number].without(part, bad)
        else:
            bad = BadSample("decoder_crashed", "image", f"the worker that decoded it alone crashed ({how})")
            self.jobs[number] = self.jobs[number].without(part, bad)
        return None

    def _blameless(self, number: int, how: str, alone: Worker | None = None) -> None:
        """Count a death that no part explains. Refused when a job has had too many."""
        self.tries[number] = self.tries.get(number, 0) + 1
        if self.tries[number] >= TRIES:
            if alone:
                alone.end()
            raise Refused(
                f"data workers crashed {TRIES} times while decoding the same samples ({how}), none of which crashes a worker alone. Most "
                "often memory is too small: lower data.workers or data.read_ahead; with data.workers=0 the main process decodes"
            )

    def _silent_store(self) -> StorageFailed:
        seconds = self.settings.read_timeout_s
        return StorageFailed(f"a sample could not be read within {seconds:g} s. Check its store, or raise data.read_timeout")

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        self.selector.close()


class Background(Generic[J]):
    """One process that does jobs in their order. No process waits for it: `work` leaves what it makes where others look, and does for
    itself what it does not find there. So this process ends when it fails, with one warning."""

    def __init__(self, work: Callable[[J, At], None]):
        self._worker: Worker | None = Worker(pickle.dumps(work), most_bytes=None)
        self._given = 0

    def start(self, job: J) -> None:
        self._look()
        if self._worker is not None:
            self._given += 1
            self._worker.send_parcel((self._given, job))

    def _look(self) -> None:
        """Take its answers. Expected failures are raised again where the index is needed; a defect is raised here."""
        while self._worker is not None and select.select([self._worker.socket], [], [], 0)[0]:
            try:
                _, answer = receive(self._worker.socket)
            except EOFError:
                how, self._worker = self._worker.end(dying=True), None
                say(f"a prefetching process has crashed ({how}). The run continues without it, with more data wait")
            else:
                if isinstance(answer, Failed) and not answer.kind:
                    raise answer.raised()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


# Parcels: a value in anonymous memory; arrays are stored in it unchanged

_HEADER = struct.Struct("<qq")  # bytes of the pickle, number of arrays
_PROGRESS = struct.Struct("<qqqq")  # job, part, phase, nanoseconds of the monotonic clock
_ALIGNED = 64


def _memory() -> int:
    """A handle of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("eyeline")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Tensors as arrays, whose bytes are left out of the pickle."""
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, torch.Tensor) else NotImplemented


def _send(over: socket.socket, value: Any) -> None:
    arrays: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=arrays.append).dump(value)
    raw = [array.raw() for array in arrays]
    lengths = struct.pack(f"<{len(raw)}q", *(r.nbytes for r in raw))
    handle = _memory()
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(pickled.getbuffer())
            file.write(lengths)
            for r in raw:
                file.write(bytes(-file.tell() % _ALIGNED))
                file.write(r)
        socket.send_fds(over, [_HEADER.pack(pickled.tell(), len(raw))], [handle])
    finally:
        os.close(handle)


def receive(over: socket.socket) -> Any:
    """The message that the other side sent. EOFError when it is gone. Its arrays share one piece of this process's memory."""
    try:
        header, handles, _, _ = socket.recv_fds(over, _HEADER.size, 1)
    except ConnectionResetError as error:
        raise EOFError from error
    if not header:
        raise EOFError
    try:
        memory = memoryview(bytearray(os.fstat(handles[0]).st_size))
        read = 0
        while read < len(memory):
            read += os.preadv(handles[0], [memory[read:]], read)
    finally:
        os.close(handles[0])
    pickled, count = _HEADER.unpack(header)
    at = pickled + 8 * count
    arrays: list[memoryview] = []
    for length in struct.unpack(f"<{count}q", memory[pickled:at]):
        at += -at % _ALIGNED
        arrays.append(memory[at : at + length])
        at += length
    return pickle.loads(memory[:pickled], buffers=arrays)


# In the worker


def serve(handle: int, progress: int, parent: int, most_bytes: int | None) -> None:
    """Do jobs until the socket ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the kernel ends it with its parent, wherever it is stuck
        if os.getppid() != parent:  # the parent ended before that
            return
    stands = mmap.mmap(progress, _PROGRESS.size)
    with socket.socket(fileno=handle) as over:
        try:
            work = pickle.loads(receive(over))
            torch.set_num_threads(1)
            if most_bytes is not None:
                _limit_memory(most_bytes)
            while True:
                number, job = receive(over)
                result = result_of(work, job, lambda part, phase, number=number: _say(stands, number, part, phase))
                _say(stands, number, -1, "idle")
                _send(over, (number, result))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _say(stands: mmap.mmap, number: int, part: int, phase: Phase) -> None:
    # at once: `pack_into` clears the place first, and a reader in between would take the worker for one that has hung for days
    stands[: _PROGRESS.size] = _PROGRESS.pack(number, part, PHASES.index(phase), time.monotonic_ns())


_TOO_LARGE = (
    "a batch does not fit into the memory of a worker: lower batch.max_tokens or batch.max_patches, data.workers or data.read_ahead, or "
    "give the machine more memory"
)


def result_of(work: Callable[[Any, At], Any], job: Any, at: At) -> Any:
    """The result of a job, or Failed."""
    try:
        return work(job, at)
    except EXPECTED as expected:
        return Failed(type(expected).__name__, str(expected))
    except MemoryError:  # of a batch: a decoder's is a reject
        return Failed(OutOfMemory.__name__, _TOO_LARGE)
    except Exception:  # noqa: BLE001  # a defect: it is raised again in the main process, which ends the run
        return Failed("", traceback.format_exc())


def _limit_memory(most_bytes: int) -> None:
    """A decoder that asks for more than any allowed image needs gets a MemoryError, before the machine has none left."""
    if sys.platform != "linux":  # macOS knows the limit and does not keep it
        return
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * mmap.PAGESIZE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = data + most_bytes if hard == resource.RLIM_INFINITY else min(data + most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
