"""Workers on a Ray cluster. The one file that imports ray.

A worker is an actor of one CPU, and of one GPU where its work computes on one and the cluster has some, that keeps what its work needs
between partitions: a model stays loaded. There are as many tasks out as there are actors, so
results never pile up. An actor that is lost, with its node or alone, is replaced by a new one, wherever there is room.
"""

import os
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from eyeline.core.errors import Refused
from eyeline.data.workers import Failed, result_of

CREATION = "creation task"  # in Ray's words for an actor that never was
HERE = "local"  # in place of an address: a cluster of this machine alone

A = TypeVar("A")
R = TypeVar("R")


class Doer:
    """What an actor is."""

    def __init__(self, work: Callable[[Any], Any], folder: str):
        self.work, self.folder = work, folder

    def do(self, one: Any) -> Any:
        return result_of(lambda job, at: self._done(job), one, lambda part, phase: None)  # noqa: ARG005 - a task has no parts

    def _done(self, one: Any) -> Any:
        try:
            os.chdir(self.folder)  # paths may be relative to it
        except OSError as error:
            raise Refused(
                f"{self.folder}, where the command was started, is not on {socket.gethostname()}: {error.strerror}. The nodes of --ray "
                "need the same folders under the same paths"
            ) from error
        return self.work(one)


def results_on_ray(
    work: Callable[[A], R], asked: Iterator[A], count: int, address: str, accelerated: bool = False
) -> Iterator[tuple[A, R | str]]:
    """Each task with its result, or with a text that says how its actor was lost. Expected errors of the work are raised.

    `count` actors, or, if it is 0, one for each CPU of the cluster; for each GPU where the work is `accelerated` and there are some.
    """
    ray = connected(address)
    there = ray.cluster_resources()
    gpus = accelerated and there.get("GPU", 0) >= 1
    actor = ray.remote(num_cpus=1, num_gpus=int(gpus), max_restarts=0)(Doer)
    kept, folder = ray.put(work), os.getcwd()  # the work goes there once, however many actors there are
    count = count or max(int(there.get("GPU" if gpus else "CPU", 1)), 1)
    busy: dict[Any, tuple[Any, A]] = {}  # what will come -> who makes it, of what
    idle: list[Any] = []
    try:
        while True:
            for one in islice(asked, count - len(busy)):
                doer = idle.pop() if idle else actor.remote(kept, folder)
                busy[doer.do.remote(one)] = doer, one
            if not busy:
                return
            [coming], _ = ray.wait(list(busy), num_returns=1)
            doer, one = busy.pop(coming)
            try:
                result = ray.get(coming)
                idle.append(doer)
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines()
                if CREATION in lines[0]:
                    raise Refused(
                        f"--ray: an actor could not be started: {lines[-1].strip()}. Nodes need Eyeline and its packages"
                    ) from error
                result = f"the worker crashed ({lines[0]})"
            if isinstance(result, Failed) and result.kind:
                raise result.raised()
            yield one, result.message if isinstance(result, Failed) else result
    finally:
        for doer in (*(doer for doer, _ in busy.values()), *idle):
            ray.kill(doer)


def connected(address: str) -> Any:
    """Ray, connected to a cluster. Refused where it is not installed, or there is no such cluster."""
    try:
        import ray  # pyright: ignore[reportMissingImports]: optional
    except ImportError as error:
        raise Refused("--ray needs Ray, which is not installed. Try: pip install 'eyeline[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(None if address == HERE else address, include_dashboard=False if address == HERE else None, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise Refused(f"--ray {address}: no such cluster ({error}). Give its address, auto, or {HERE}") from error
    return ray
