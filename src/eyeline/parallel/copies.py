"""Batches on their way to the device."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain

import torch
from torch import Tensor

from eyeline.core.batch import Batch


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Each batch on the device, in order. On a GPU the next one is copied while this one computes: from pinned memory, since a copy
    from any other waits for all that was asked before it, and on a stream of its own."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    ahead: Batch | None = None
    for here in chain(batches, [None]):
        computing.wait_stream(copying)  # what was copied ahead is there before it is computed with
        now, ahead = ahead, None if here is None else _copied(here, device, copying, computing)
        if now is not None:
            yield now


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that this process copies to a device on. The allocator keeps freed memory for the stream that it was allocated on,
    so that with a stream of its own every step would leave a batch behind, in up to 32 of them."""
    return torch.cuda.Stream(device)


def _copied(batch: Batch, device: torch.device, copying: torch.cuda.Stream, computing: torch.cuda.Stream) -> Batch:
    pinned = replace(batch, **{name: tensor.pin_memory() for name, tensor in _tensors(batch)})
    with torch.cuda.stream(copying):
        moved = pinned.to(device)
    for _, tensor in _tensors(moved):
        tensor.record_stream(computing)  # else its memory is given away when the last kernel was asked, not when it ended
    return moved


def _tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(f.name, x) for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)]
