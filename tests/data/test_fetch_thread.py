"""The thread that fetches the next step: the same steps as without, nothing before it is asked for, errors in their own words, an end."""

import threading
import time
from collections.abc import Iterator

import pytest

from eyeline.core.errors import Abandoned, StorageFailed
from eyeline.data.fetch_thread import FetchThread


def counted(log: list[str], most: int = 100) -> Iterator[int]:
    """Numbers, with a note of each and of the thread that makes it; and of its end."""
    try:
        for n in range(most):
            log.append(f"{n} in {threading.current_thread().name}")
            yield n
    finally:
        log.append(f"closed in {threading.current_thread().name}")


def test_items_come_in_order_from_one_thread_that_ends() -> None:
    log: list[str] = []
    with FetchThread() as thread:
        assert list(thread.items(counted(log, 5))) == [0, 1, 2, 3, 4]
    assert log == [*(f"{n} in fetch" for n in range(5)), "closed in fetch"]
    assert not [one for one in threading.enumerate() if one.name == "fetch"]


def test_nothing_is_made_before_start_and_one_item_after() -> None:
    log: list[str] = []
    with FetchThread() as thread:
        thread.left = 1
        items = thread.items(counted(log))
        assert next(items) == 0
        thread.settle()
        assert log == ["0 in fetch"]
        thread.start()
        thread.start()  # it is under way already
        thread.settle()
        assert log == ["0 in fetch", "1 in fetch"]
        assert next(items) == 1
        thread.start()  # of as many steps as a stage takes, all were asked for
        thread.settle()
        assert log == ["0 in fetch", "1 in fetch"]
    assert log[-1] == "closed in fetch"


def test_errors_are_raised_where_the_item_is_taken() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise StorageFailed("rows.json: No space left on device")

    with FetchThread() as thread:
        thread.left = 5
        items = thread.items(failing())
        assert next(items) == 0
        thread.start()
        thread.settle()
        with pytest.raises(StorageFailed, match=r"^rows\.json: No space left on device$"):
            next(items)
    assert not [one for one in threading.enumerate() if one.name == "fetch"]


def test_a_step_of_many_packs_is_left_between_two_of_them() -> None:
    going, made = threading.Event(), list[int]()

    def packs() -> Iterator[int]:
        for n in range(2000):
            made.append(n)
            going.set()
            time.sleep(0.001)
            yield n

    def steps() -> Iterator[list[int]]:
        yield []
        yield list(thread.until_stopped(packs()))

    with FetchThread() as thread:
        thread.left = 1
        items = thread.items(steps())
        assert next(items) == []
        thread.start()
        assert going.wait(10)
    assert len(made) < 2000
    assert not [one for one in threading.enumerate() if one.name == "fetch"]


def test_a_run_that_ends_at_once_does_not_wait_for_the_thread() -> None:
    started, proceed = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        started.set()
        proceed.wait(60)
        yield 1

    thread = FetchThread()

    def ended_at_once() -> None:
        with thread:
            thread.left = 1
            items = thread.items(stuck())
            assert next(items) == 0
            thread.start()
            assert started.wait(10)
            raise Abandoned("a second SIGTERM", 143)

    with pytest.raises(Abandoned):
        ended_at_once()
    [running] = [one for one in threading.enumerate() if one.name == "fetch"]
    assert running.daemon
    proceed.set()
    running.join(10)
    assert not running.is_alive()
