"""Batches on their way to a GPU, with streams that are made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from eyeline.core.batch import Batch
from eyeline.generate.generate import one_token_each
from eyeline.parallel import copies


class Streams:
    """What is asked of torch.cuda's streams, in order."""

    def __init__(self) -> None:
        self.made = 0
        self.log: list[str] = []
        self.now = "computing"

    def Stream(self, _device: object) -> SimpleNamespace:
        self.made += 1
        return SimpleNamespace(name="copying")

    def current_stream(self, _device: object) -> SimpleNamespace:
        return SimpleNamespace(name="computing", wait_stream=lambda other: self.log.append(f"computing waits for {other.name}"))

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: found.log.append(f"recorded for {stream.name}"))
    monkeypatch.setattr(Batch, "to", lambda batch, device: found.log.append(f"copied on {found.now}") or batch)
    copies._copy_stream.cache_clear()
    yield found
    copies._copy_stream.cache_clear()


class Device:
    type = "cuda"


def test_one_copy_stream_serves_every_step(streams: Streams) -> None:
    """With a stream a step, torch's allocator keeps the batches of up to 32 of them."""
    device = Device()
    for step in range(40):
        batches = [one_token_each([step], [n]) for n in range(3)]
        arrived = list(copies.on_device(batches, device))
        assert [batch.positions_T3[0, 0].item() for batch in arrived] == [0, 1, 2]
    assert streams.made == 1
    assert list(copies.on_device([one_token_each([1], [1])], Device()))
    assert streams.made == 2, "another device has its own"


def test_copies_are_waited_for_and_recorded_on_compute_stream(streams: Streams) -> None:
    arriving = copies.on_device(iter([one_token_each([n], [n]) for n in range(2)]), Device())
    first = next(arriving)
    copied = [line for line in streams.log if line.startswith("copied")]
    assert copied == ["copied on copying", "copied on copying"], "the second one is on its way while the first is computed with"
    assert streams.log.index("copied on copying") < streams.log.index("recorded for computing")
    waits = streams.log.count("computing waits for copying")
    next(arriving)
    assert streams.log.count("computing waits for copying") == waits + 1
    assert first.counts.slots == 1


def test_nothing_to_copy_is_no_batch(streams: Streams) -> None:
    assert list(copies.on_device([], Device())) == []
