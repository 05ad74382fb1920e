"""Workers: results in order whatever happens to the workers, no process left behind, no endless wait."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyeline.core.errors import OutOfMemory, Refused, StorageFailed
from eyeline.data import workers
from eyeline.data.workers import Workers, in_order
from tests.data.failing_jobs import Done, Job, Work
from tests.forked import Forked
from tests.processes import alive, children, gone

ROOT = Path(__file__).parents[2]


def settings(count: int = 1, read_ahead: int = 1000, decode: float = 60, read: float = 60) -> Workers:
    return Workers(count, read_ahead, decode, read)


def run(jobs: Iterable[Job], how: Workers) -> list[Done]:
    asked = ((job.number, job) for job in jobs)
    out = []
    for tag, done in in_order(asked, Work(), how):
        assert tag == done.number
        out.append(done)
    return out


def jobs(*parts: tuple[str, ...]) -> list[Job]:
    return [Job(n, p) for n, p in enumerate(parts)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, no memory, no open file."""
    gc.collect()  # of what other tests have left, which may also go while this one runs
    processes, files, memory = children(), len(os.listdir("/proc/self/fd")), mapped(os.getpid())
    yield
    gc.collect()
    assert children() == processes
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not Counter(mapped(os.getpid())) - Counter(memory)


def mapped(pid: int) -> list[str]:
    """The memory of a process that is shared, by name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(None, 5)[5] for line in lines if any(word in line for word in ("/memfd", "/dev/shm"))]


def test_results_come_in_order_with_their_arrays() -> None:
    """Though the first job is the slowest."""
    asked = [Job(n, ("sleep:0.3" if n == 0 else "fine",)) for n in range(30)]
    done = run(asked, settings(2))
    assert [d.number for d in done] == list(range(30))
    assert len({d.pid for d in done}) == 2
    assert os.getpid() not in {d.pid for d in done}
    for d in done:
        wanted = Work()(Job(d.number, ()), lambda *_: None)
        assert torch.equal(d.tensor, wanted.tensor) and d.tensor.dtype == wanted.tensor.dtype
        assert np.array_equal(d.array, wanted.array) and d.array.flags.writeable


def test_shared_memory_has_no_name_that_could_be_left_behind() -> None:
    before = set(mapped(os.getpid()))  # of other tests in this process: semaphores of torch's
    results = in_order(((n, Job(n, ("fine",))) for n in range(4)), Work(), settings(1))
    pid = next(results)[1].pid
    ours, theirs = set(mapped(os.getpid())) - before, set(mapped(pid)) - before  # a worker here is a copy of this process
    results.close()
    assert ours == theirs == {"/memfd:eyeline (deleted)"}  # what a worker is at; parcels are not even mapped


def test_read_ahead_is_bounded_in_bytes() -> None:
    asked: list[int] = []

    def endless() -> Iterator[tuple[int, Job]]:
        n = 0
        while True:
            asked.append(n)
            yield n, Job(n, ("fine",), bytes=100 if n != 7 else 5000)
            n += 1

    results = in_order(endless(), Work(), settings(2, read_ahead=350))
    for n in range(7):
        next(results)
        # n is given out; three more fit into 350 bytes; one more has been asked for and waits outside
        assert len(asked) <= n + 5
    assert next(results)[0] == 7  # larger than everything that may be read ahead: it is done alone
    assert next(results)[0] == 8
    results.close()


def test_a_part_that_kills_its_worker_is_given_up_and_nothing_else() -> None:
    done = run(jobs(("fine", "fine"), ("fine", "crash", "fine", "exit"), ("abort",), ("fine",)), settings(2))
    assert [d.lost for d in done] == [(), ((1, "decoder_crashed"), (3, "decoder_crashed")), ((0, "decoder_crashed"),), ()]


def test_a_part_that_hangs_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(jobs(("fine", "hang"), ("fine",)), settings(2, decode=1.0))
    assert [d.lost for d in done] == [((1, "decoder_hung"),), ()]
    assert time.monotonic() - began < 60


def test_a_timeout_is_of_a_part_and_not_of_its_job() -> None:
    assert [d.lost for d in run(jobs(("sleep:0.5",) * 7), settings(1, decode=2.5))] == [()]


def test_what_happens_once_costs_no_sample(tmp_path: Path) -> None:
    """Someone killed the worker; a machine stood still."""
    parts = ("fine", f"crash once:{tmp_path / 'a'}", "fine", f"hang once:{tmp_path / 'b'}")
    assert [d.lost for d in run(jobs(parts, ("fine",)), settings(1, decode=2.0))] == [(), ()]
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()


def test_deaths_that_no_part_explains_stop_the_run() -> None:
    with pytest.raises(Refused, match=r"crashed 3 times while decoding the same samples \(SIGKILL\).*memory is too small"):
        run(jobs(("late",)), settings(1))


def test_a_store_that_does_not_answer_stops_the_run() -> None:
    with pytest.raises(StorageFailed, match="could not be read within 1 s"):
        run(jobs(("fine", "slow store:1000")), settings(1, read=1.0))
    assert [d.lost for d in run(jobs(("slow store:1.5",)), settings(1, decode=0.5))] == [()]  # reading is not decoding


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("storage", StorageFailed, r"^the disk is gone$"),
        ("defect", RuntimeError, r"(?s)in a worker:.*failing_jobs\.py.*KeyError: 'a defect'"),
        ("memory", OutOfMemory, r"^a batch does not fit into the memory of a worker: .*workers"),
    ],
)
def test_what_a_job_raises_is_raised_in_its_turn(what: str, kind: type[Exception], message: str) -> None:
    results = in_order(((j.number, j) for j in jobs(("sleep:0.3",), (what,), ("fine",))), Work(), settings(2))
    assert next(results)[0] == 0
    with pytest.raises(kind, match=message):
        next(results)


def test_what_stops_the_plan_is_raised_in_its_turn() -> None:
    def plan() -> Iterator[tuple[int, Job]]:
        yield from enumerate(jobs(("sleep:0.2",), ("fine",)))
        raise StorageFailed("the index is gone")

    results = in_order(plan(), Work(), settings(1))
    assert [next(results)[0], next(results)[0]] == [0, 1]
    with pytest.raises(StorageFailed, match="the index is gone"):
        next(results)


def test_nothing_to_do() -> None:
    assert run([], settings(2)) == []


def test_a_worker_that_is_shot_while_idle_is_replaced() -> None:
    results = in_order(((n, Job(n, ("fine",))) for n in range(6)), Work(), settings(1, read_ahead=1))
    first = next(results)[1]
    os.kill(first.pid, signal.SIGKILL)
    assert [done.number for _, done in results] == [1, 2, 3, 4, 5]


def test_one_that_is_left_alone_ends_its_workers() -> None:
    """An exception between two results, or a generator that is not closed."""
    results = in_order(((n, Job(n, ("fine",))) for n in range(6)), Work(), settings(2))
    next(results)
    assert len(children()) == 2
    del results
    gc.collect()
    assert children() == set()


@pytest.mark.fresh_workers
def test_signals_for_the_run_do_not_reach_its_workers() -> None:
    """From their first moment: they are signalled while they are still importing."""
    results = in_order(((n, Job(n, ("sleep:0.1",))) for n in range(4)), Work(), settings(1, read_ahead=1))
    before = children()

    def soon() -> Iterator[tuple[int, Job]]:
        for pid in children() - before:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        yield 0, Job(0, ("sleep:0.3",))

    again = in_order(soon(), Work(), settings(1))
    assert next(again)[1].lost == ()
    again.close()
    pid = next(results)[1].pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert {done.pid for _, done in results} == {pid}


MAIN = """
import sys
from eyeline.data import workers
from tests.data.test_workers import start
from tests.forked import forked_worker

if sys.argv[1] == "copies":
    workers.new_process = forked_worker
results = start(sys.argv[2], 1)
exec(sys.argv[3])
"""


def start(what: str, out: int) -> Iterator[Any]:
    """Two workers, one of them at this; their numbers are written to a file."""
    results = in_order(((n, Job(n, (what if n else "fine",))) for n in range(100)), Work(), settings(2, decode=1000.0, read=1000.0))
    next(results)
    os.write(out, (" ".join(map(str, children())) + "\n").encode())
    return results


@pytest.mark.parametrize(
    ("start", "what", "how"),
    [("fresh", "hang", "sys.exit()"), pytest.param("copies", "fine", "1 / 0", marks=pytest.mark.slow)],
)
def test_workers_end_with_the_interpreter(start: str, what: str, how: str) -> None:
    """In order or by an exception, whatever they are at."""
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, start, what, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.wait(20)
    assert gone(pids)


@pytest.mark.parametrize("how", ["shot", "ends at once"])
def test_workers_end_with_a_main_process_that_says_nothing(how: str) -> None:
    read, write = os.pipe()

    def main() -> None:
        results = start("hang", write)
        time.sleep(1000 if how == "shot" else 0)
        os._exit(results is None)

    process = Forked(main, (write,))
    os.close(write)
    with open(read) as said:
        pids = [int(pid) for pid in said.readline().split()]
    assert len(pids) == 2
    if how == "shot":
        assert all(alive(pid) for pid in pids)
        process.kill()
    assert process.wait(20) == (-signal.SIGKILL if how == "shot" else 0)
    assert gone(pids)


def test_where_a_worker_is_is_never_read_half_written() -> None:
    """A time that is not there yet would be a worker that has hung since the machine started."""
    place = mmap.mmap(-1, workers._PROGRESS.size)
    start = time.monotonic_ns()
    workers._say(place, 7, 3, "reading")
    writer = os.fork()
    if writer == 0:
        for _ in range(200_000):
            workers._say(place, 7, 3, "reading")
        os._exit(0)
    found: list[tuple[int, ...]] = []
    while os.waitpid(writer, os.WNOHANG) == (0, 0):
        found.append((*workers._PROGRESS.unpack_from(place), time.monotonic_ns()))
    assert len(found) > 1000
    assert {tuple(what) for *what, _, _ in found} == {(7, 3, workers.PHASES.index("reading"))}
    assert all(start <= since <= now for *_, since, now in found)
