"""The time for which a GPU had nothing to do between two updates, since the host was busy with something else: only the device knows it."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark in the work that a device is given; it keeps the time at which the device comes to it."""

    def record(self) -> Any: ...

    def elapsed_time(self, later: Any) -> float: ...


class DeviceIdle:
    """The gap between the last work of one update and the first of the next, by two events. A CPU has none: it is the host."""

    def __init__(self, events: tuple[Event, Event] | None, named: Callable[[], float]) -> None:
        """`named`: seconds so far that have a name of their own, such as data wait. What of a gap has one is not counted here."""
        self._events, self._named = events, named
        self._gap: tuple[float, float] | None = None  # what had a name when it started, and when it ended

    def update_ended(self) -> None:
        """The host has asked for all work of an update."""
        if self._events is not None:
            self._events[0].record()
            self._gap = self._named(), float("inf")

    def update_starts(self) -> None:
        """The host is about to ask for the first work of an update."""
        if self._events is not None and self._gap is not None:
            self._events[1].record()
            self._gap = self._gap[0], self._named()

    def seconds(self) -> float:
        """The gap before an update that the host has waited for since it started; 0 where there was none."""
        if self._events is None or self._gap is None or self._gap[1] == float("inf"):
            return 0.0
        start, end = self._gap
        return max(self._events[0].elapsed_time(self._events[1]) / 1000 - (end - start), 0.0)


def device_idle(device: torch.device, named: Callable[[], float]) -> DeviceIdle:
    """The gaps of a device."""
    timed = device.type == "cuda"
    events: Any = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if timed else None
    return DeviceIdle(events, named)
