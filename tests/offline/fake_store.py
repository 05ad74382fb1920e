"""A store in memory that counts requests, loses answers, delays requests, and lets a test decide whose request comes next."""

import errno
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eyeline.core.errors import StorageFailed

PAGE = 1000  # keys of one answer of a listing


class Killed(BaseException):
    """The worker is gone: nothing that would run after it does."""


def no_answer(key: str) -> StorageFailed:
    failed = StorageFailed(f"could not write {key}: no answer.")
    failed.__cause__ = OSError(errno.ETIMEDOUT, "no answer")
    return failed


@dataclass(eq=False)
class FakeStore:
    """`before(name, key)` is called before every request, and may raise; so may `after`, when the request has been carried out."""

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    before: Callable[[str, str], None] = lambda name, key: None
    after: Callable[[str, str], None] = lambda name, key: None

    def create(self, key: str, data: bytes) -> bool:
        self._request("create", key)
        created = key not in self.objects
        self.objects.setdefault(key, data)
        self.after("create", key)
        return created

    def read(self, key: str) -> bytes | None:
        self._request("read", key)
        self.after("read", key)
        return self.objects.get(key)

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        self._request("list", folder)
        found = sorted(key for key in list(self.objects) if key.startswith(f"{folder}/"))
        self.requests["list"] += max(len(found) - 1, 0) // PAGE
        yield from ((key, len(self.objects[key])) for key in found)

    def remove(self, key: str) -> None:
        self._request("remove", key)
        self.objects.pop(key, None)
        self.after("remove", key)

    def move(self, key: str, to: str) -> None:
        self._request("move", key)
        self.objects[to] = self.objects.pop(key)
        self.after("move", key)

    @contextmanager
    def scratch(self, folder: str) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(prefix="eyeline-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def put(self, path: Path, key: str) -> None:
        self._request("put", key)
        self.objects[key] = path.read_bytes()
        self.after("put", key)

    def _request(self, name: str, key: str) -> None:
        self.before(name, key)
        self.requests[name] += 1


class Turns:
    """Threads that take turns at a store: `order` says whose request is next, as long as it lasts."""

    def __init__(self, order: list[int]):
        self.order, self.waiting, self.alive = order, dict[int, threading.Event](), set[int]()
        self.lock = threading.Condition()

    def wait(self, worker: int) -> None:
        """Called by a worker before each of its requests."""
        mine = threading.Event()
        with self.lock:
            self.waiting[worker] = mine
            self._next()
        mine.wait()

    def end(self, worker: int) -> None:
        with self.lock:
            self.alive.discard(worker)
            self._next()

    def _next(self) -> None:
        """Let one go when all that are alive wait."""
        if not self.alive or self.waiting.keys() != self.alive:
            return
        wanted = self.order.pop(0) if self.order else 0
        ready = sorted(self.waiting)
        self.waiting.pop(ready[wanted % len(ready)]).set()
