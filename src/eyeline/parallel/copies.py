"""Batches on their way to the device: from pinned memory, on one stream of their own, before they are computed with."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain

import torch
from torch import Tensor

from eyeline.core.batch import Batch

Ready = Callable[[Sequence[Batch]], tuple[Batch, ...]]


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Batch]]:
    """Each batch as it came, and on the device, in order. On a GPU the next one is copied while this one computes: from pinned memory,
    since a copy from any other waits for all that was asked before it, and on a stream of its own."""
    if device.type != "cuda":
        yield from ((batch, batch.to(device)) for batch in batches)
        return
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    ahead: tuple[Batch, Batch] | None = None
    for here in chain(batches, [None]):
        computing.wait_stream(copying)  # what was copied ahead is there before it is computed with
        now, ahead = ahead, None if here is None else (here, _copied(_pinned(here), device, copying, computing))
        if now is not None:
            yield now


def copies_ahead(device: torch.device, count: int = 1) -> Ready | None:
    """What a thread does with the batches of the next step while this one computes: pin them all, and copy the first `count` to the device,
    on the stream of the other copies. None on a CPU. Asked by the thread that computes."""
    if device.type != "cuda":
        return None
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)

    def ready(batches: Sequence[Batch]) -> tuple[Batch, ...]:
        with torch.cuda.device(device):  # the current device is a thread's own
            pinned = [_pinned(batch) for batch in batches]
            first = [replace(batch, ahead=_copied(batch, device, copying, computing)) for batch in pinned[:count]]
        return (*first, *pinned[count:])

    return ready


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that this process copies to a device on. The allocator keeps freed memory for the stream that it was allocated on,
    so that with a stream of its own every step would leave a batch behind, in up to 32 of them."""
    return torch.cuda.Stream(device)


def _pinned(batch: Batch) -> Batch:
    """The same batch in pinned memory, apart from what is on the device already."""
    there = {} if batch.ahead is None else dict(_tensors(batch.ahead))
    return replace(batch, **{name: x.pin_memory() for name, x in _tensors(batch) if name not in there})


def _copied(pinned: Batch, device: torch.device, copying: torch.cuda.Stream, computing: torch.cuda.Stream) -> Batch:
    with torch.cuda.stream(copying):
        moved = pinned.to(device)
    for _, tensor in _tensors(moved):
        tensor.record_stream(computing)  # else its memory is given away when the last kernel was asked, not when it ended
    return moved


def _tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(f.name, x) for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)]
