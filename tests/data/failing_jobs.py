"""Jobs for workers that go wrong in every way: what their parts are is what happens."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from eyeline.core.batch import EncodedImage
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.data.fetch import fetch
from eyeline.data.fetch.fetch import Fetch, Fetched
from eyeline.data.images import patches
from eyeline.data.images.decode import Pixels
from eyeline.data.workers import At


@dataclass(frozen=True)
class Job:
    number: int
    parts: tuple[str, ...]
    bytes: int = 1
    lost: tuple[tuple[int, str], ...] = ()  # (part, cause)

    def only(self, part: int) -> Self:
        return replace(self, parts=(self.parts[part],), lost=())

    def without(self, part: int, bad: BadSample) -> Self:
        return replace(self, lost=(*self.lost, (part, bad.cause)))


@dataclass(frozen=True)
class Done:
    number: int
    pid: int
    tensor: torch.Tensor
    array: np.ndarray
    lost: tuple[tuple[int, str], ...]


def busy(seconds: float) -> None:
    """As a decoder is that holds the interpreter: not to be interrupted by anything but SIGKILL."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    time.sleep(seconds)


def once(path: str) -> bool:
    """Whether this is the first time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class Work:
    """A part is `what:argument`."""

    seed: int = 0

    def __call__(self, job: Job, at: At) -> Done:
        for part, what in enumerate(job.parts):
            if part in dict(job.lost):
                continue
            name, _, argument = what.partition(":")
            at(part, "reading" if name == "slow store" else "decoding")
            HAPPENS[name](argument)
        at(-1, "idle")
        if "late" in job.parts:  # no part is at it any more
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng([self.seed, job.number])
        size = 10_000 * (job.number % 3)
        return Done(job.number, os.getpid(), torch.from_numpy(rng.integers(0, 255, size)), rng.random((size, 2)), job.lost)


def fail(error: Exception) -> None:
    raise error


HAPPENS: dict[str, Callable[[str], Any]] = {
    "fine": lambda _: None,
    "sleep": lambda s: time.sleep(float(s)),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "crash once": lambda path: once(path) and os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda _: os.abort(),
    "exit": lambda _: os._exit(3),
    "hang": lambda _: busy(1000),
    "hang once": lambda path: once(path) and busy(1000),
    "slow store": lambda s: time.sleep(float(s)),
    "late": lambda _: None,
    "memory": lambda _: bytearray(8 << 30),
    "storage": lambda _: fail(StorageFailed("the disk is gone")),
    "defect": lambda _: fail(KeyError("a defect")),
}


# Images that go wrong in a decoder


@dataclass(frozen=True)
class Mined:
    """A `Fetch` whose decoder does what follows the pixels of a file: `... MINE crash`. To others such a file is sound."""

    fetch: Fetch

    def job(self, *args: Any) -> Any:
        return self.fetch.job(*args)

    def __call__(self, job: Any, at: At = lambda *_: None) -> Fetched:
        real_decode, real_held = patches.upright, fetch.in_memory

        def happens(image: Any, slow: bool) -> None:
            assert isinstance(image.source, bytes), "read before it is decoded"
            _, mine, what = image.source.rpartition(b" MINE ")
            name, _, argument = what.decode().partition(":") if mine else ("fine", "", "")
            if (name == "slow store") == slow:
                HAPPENS[name](argument)

        def decode(image: EncodedImage) -> Pixels:
            happens(image, slow=False)
            return real_decode(image)

        def held(item: Any) -> Any:
            happens(real_held(item), slow=True)
            return real_held(item)

        patches.upright, fetch.in_memory = decode, held
        try:
            return self.fetch(job, at)
        finally:
            patches.upright, fetch.in_memory = real_decode, real_held
