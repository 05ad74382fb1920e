"""A thread that fetches the next step of a stage while this one computes.

It runs what a plan asks for, up to the batches of one step: reading, decoding (or receiving from workers), and what the caller wants done
with the batches then, such as copying them to pinned memory. It calls no collective, counts no reject and saves nothing: what ranks must
agree on, and where a run would resume, is the loop's, when it takes the step.

The loop says when the next step may be fetched: `start`. The thread rests before and after, so nothing of a reader is used by both at once;
code that reads data in between waits for it first: `settle`.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from eyeline.core.batch import Batch

T = TypeVar("T")
Ready = Callable[[Sequence[Batch]], tuple[Batch, ...]]
_END = object()


class FetchThread:
    """To be entered for a stage, which it ends with. One iterator at a time."""

    def __init__(self, ready: Ready | None = None) -> None:
        """`ready` is done with the batches of a step, in the thread."""
        self.ready: Ready = ready or tuple
        self.left = 0  # steps that `start` may still be about: none is fetched that a stage does not take
        self._asked: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._next: Future[Any] | None = None  # of the item that was asked for
        self._thread: threading.Thread | None = None
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread, and the iterator in it. It is not waited for where the run ends at once (`Abandoned`)."""
        thread, self._thread, self._stopping = self._thread, None, True
        self._asked.put(None)
        if thread is not None and (kind is None or issubclass(kind, Exception | GeneratorExit)):
            thread.join()

    def items(self, work: Iterator[T]) -> Iterator[T]:
        """The items of an iterator that only the thread touches. Raises here what is raised there."""
        assert self._thread is None, "one iterator at a time"
        self._asked, self._next, self._stopping = SimpleQueue(), None, False
        self._thread = threading.Thread(target=self._serve, args=(work, self._asked), daemon=True, name="fetch")
        self._thread.start()
        with self:
            while True:
                self._ask()
                future, self._next = self._next, None
                assert future is not None
                item = future.result()
                if item is _END:
                    return
                yield item

    def start(self) -> None:
        """Have the next item made, if the stage will take one."""
        if self.left > 0:
            self.left -= 1
            self._ask()

    def settle(self) -> None:
        """Wait until the item that was asked for is there. What was raised instead is raised when it is taken."""
        if self._next is not None:
            self._next.exception()

    def until_stopped(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts of an item, in the thread: no more of them once the stage ends."""
        for part in parts:
            if self._stopping:
                return
            yield part

    def _ask(self) -> None:
        if self._next is None:
            self._next = Future()
            self._asked.put(self._next)

    @staticmethod
    def _serve(work: Iterator[Any], asked: "SimpleQueue[Future[Any] | None]") -> None:
        while (future := asked.get()) is not None:
            try:
                future.set_result(next(work, _END))
            except BaseException as error:  # noqa: BLE001 - raised where the item is taken
                future.set_exception(error)
        if isinstance(work, Generator):
            work.close()  # workers end with the thread that started them
