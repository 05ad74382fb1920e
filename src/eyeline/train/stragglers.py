"""Ranks that stay slow. Ranks of a step wait for one another, so a step's time says nothing about a rank; what each does by itself does:
the forward passes of its language model's blocks, apart from their collectives, and the wait for its own data.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from eyeline.core.words import counted, percent
from eyeline.core.world import World

WINDOW = 50  # steps over which a rank must be slow
SLOW = 0.75  # of the median speed: a rank below it is named
DATA_SHARE = 0.25  # of a step's time: a rank that waits for its data for so much longer than the median is named


class OwnTimes(NamedTuple):
    """What a rank did by itself in one step."""

    forward_s: float  # in forward passes of the language model's blocks. Images may be dealt over ranks
    flops: float  # of its batches, in the language model
    data_s: float  # waiting for its own batches, not for other ranks
    step_s: float


class ForwardTimer:
    """Measures the forward passes of blocks: on the device where it is a GPU, on the host where it is the CPU.

    A block is a unit of FSDP, which gathers its parameters before the first of these hooks is called and frees them after the last.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []
        self._begun: list[Any] = []
        for block in blocks:
            block.register_forward_pre_hook(self._start)
            block.register_forward_hook(self._end, prepend=True)

    def _start(self, *_: Any) -> None:
        self._begun.append(self._mark())

    def _end(self, *_: Any) -> None:
        self._spans.append((self._begun.pop(), self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> float:
        """Seconds since the last lap. The device has computed them: the step's loss was read since."""
        spans, self._spans = self._spans, []
        self._begun.clear()  # of a forward pass that raised
        if self._device.type != "cuda":
            return sum(end - start for start, end in spans)
        return sum(start.elapsed_time(end) for start, end in spans) / 1000


class OwnTime:
    """Measures what this rank does by itself. A single process has no other to be compared with, and measures nothing."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device, world: World) -> None:
        self._forward = ForwardTimer(blocks, device) if world.size > 1 else None
        self._world, self._data_s, self._mark = world, 0.0, time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as a wait for data, without the wait for other ranks in it."""
        begin, others = time.perf_counter(), self._world.waits[0]
        yield
        self._data_s += time.perf_counter() - begin - (self._world.waits[0] - others)

    def lap(self, flops: float) -> OwnTimes:
        """The times since the last lap. `flops`: of the step's batches, in the language model."""
        mark, data_s, self._data_s = self._mark, self._data_s, 0.0
        self._mark = time.perf_counter()
        return OwnTimes(self._forward.lap() if self._forward else 0.0, flops, data_s, self._mark - mark)


class Stragglers:
    """The times of all ranks over the last WINDOW steps, and who is slow by them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._window: deque[Sequence[OwnTimes]] = deque(maxlen=WINDOW)
        self._told: set[tuple[int, str]] = set()

    def add(self, step: Sequence[OwnTimes]) -> tuple[int, ...]:
        """The ranks that are slow after one more step; none before the window is full."""
        self._window.append(step)
        return tuple(sorted({rank for rank, _, _ in self._slow()}))

    def news(self) -> Iterator[str]:
        """A line for each that is slow and was not named before."""
        for rank, how, line in self._slow():
            if (rank, how) not in self._told:
                self._told.add((rank, how))
                host = f" ({self._hosts[rank]})" if self._hosts else ""
                yield f"rank {rank}{host} is slow: over the last {counted(WINDOW, 'step')} it {line}"

    def _slow(self) -> Iterator[tuple[int, str, str]]:
        if len(self._window) < WINDOW or len(self._window[0]) == 1:
            return
        sums = [OwnTimes(*map(sum, zip(*of_rank, strict=True))) for of_rank in zip(*self._window, strict=True)]
        speeds = [one.flops / one.forward_s if one.forward_s else 0.0 for one in sums]
        speed, data_s = statistics.median_high(speeds), statistics.median_low(one.data_s for one in sums)
        for rank, one in enumerate(sums):
            if one.flops and speeds[rank] < SLOW * speed:
                yield rank, "compute", f"computes at {percent(speeds[rank] / speed)} of the ranks' median speed"
            if one.data_s - data_s > DATA_SHARE * one.step_s:
                each, usual = one.data_s / WINDOW, data_s / WINDOW
                yield rank, "data", f"waits {each:.3f} s per step for its own data, and the median rank {usual:.3f} s"
