"""Ranks that are processes: copies of this one, which talk over gloo."""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from eyeline.core.world import World
from eyeline.parallel.join import STORE, joined, started
from tests.forked import Forked

T = TypeVar("T")


def as_rank(rank: int, count: int, store: Path) -> None:
    """Make this process a rank, as --nproc does."""
    places = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, STORE: store}
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)


def start(count: int, work: Callable[[], None], store: Path, timeout: float = 60) -> list[Forked]:
    """Ranks that do `work`; after `timeout` seconds each shows its stack and ends."""

    def run(rank: int) -> Callable[[], None]:
        def inside() -> None:
            as_rank(rank, count, store)
            faulthandler.dump_traceback_later(timeout, exit=True)
            work()

        return inside

    return [Forked(run(rank)) for rank in range(count)]


def wait(children: list[Forked], timeout: float = 60) -> list[int]:
    """The exit codes. Once one has failed, the others have a second to say what they have to."""
    deadline = time.monotonic() + timeout + 5
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            deadline = min(deadline, time.monotonic() + 1)
        if time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    os.kill(child.pid, signal.SIGKILL)
        time.sleep(0.002)
    return [child.wait() for child in children]


def on_ranks(count: int, work: Callable[[World], T], timeout: float = 60) -> list[T]:
    """What `work` returns on each rank, in their order. Where one fails its traceback is on standard error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def inside() -> None:
            with joined(started(), "cpu", timeout) as world:
                (folder / f"result-{world.rank}").write_bytes(pickle.dumps(work(world)))
                world.gather(None)  # none leaves before all are done

        codes = wait(start(count, inside, folder / "store", timeout), timeout)
        assert not any(codes), f"ranks ended with {codes}: see above"
        results: list[Any] = [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(count)]
        return results
