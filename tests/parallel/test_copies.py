"""Batches on their way to a GPU, with streams that are made up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eyeline.core.batch import Batch
from eyeline.generate.generate import one_token_each
from eyeline.parallel import copies
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train import step as steps


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
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: found.log.append("pinned") or x)
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
        assert [batch.positions_T3[0, 0].item() for _, batch in arrived] == [0, 1, 2]
        assert [here for here, _ in arrived] == batches
    assert streams.made == 1
    assert list(copies.on_device([one_token_each([1], [1])], Device()))
    assert streams.made == 2, "another device has its own"


def test_copies_are_waited_for_and_recorded_on_compute_stream(streams: Streams) -> None:
    arriving = copies.on_device(iter([one_token_each([n], [n]) for n in range(2)]), Device())
    _, first = next(arriving)
    copied = [line for line in streams.log if line.startswith("copied")]
    assert copied == ["copied on copying", "copied on copying"], "the second one is on its way while the first is computed with"
    assert streams.log.index("copied on copying") < streams.log.index("recorded for computing")
    waits = streams.log.count("computing waits for copying")
    next(arriving)
    assert streams.log.count("computing waits for copying") == waits + 1
    assert first.counts.slots == 1


def test_nothing_to_copy_is_no_batch(streams: Streams) -> None:
    assert list(copies.on_device([], Device())) == []


def test_next_step_is_pinned_whole_and_its_first_batch_copied_ahead(streams: Streams) -> None:
    """Another thread does it, on the one copy stream; what is copied ahead is not copied again, dropout's draws excepted."""
    device = Device()
    ready = copies.copies_ahead(device)
    assert ready is not None
    batches = [one_token_each([n], [n]) for n in range(3)]
    tensors = len(copies._tensors(batches[0]))
    made: list[tuple[Batch, ...]] = []
    thread = threading.Thread(target=lambda: made.append(ready(batches)))
    thread.start()
    thread.join()
    assert streams.log.count("pinned") == 3 * tensors
    assert streams.log.count("copied on copying") == 1
    assert streams.log.count("recorded for computing") == tensors
    [first, *others] = made[0]
    assert first.ahead is not None and all(other.ahead is None for other in others)
    streams.log.clear()
    there = dict(copies.on_device([first.with_draws(0, 0)], device))
    assert streams.made == 1
    assert streams.log.count("pinned") == 2, "the draws, which the step's number is needed for"
    assert len(there) == 1


def test_what_was_copied_ahead_is_used_as_it_is() -> None:
    batch = one_token_each([3], [0])
    ahead = replace(batch, tokens_T=batch.tokens_T + 1)
    moved = replace(batch, ahead=ahead).with_draws(0, 0).to("cpu")
    assert moved.tokens_T is ahead.tokens_T
    assert moved.draws_T2 is not None
    assert moved.ahead is None
    assert batch.to("cpu").tokens_T is batch.tokens_T


def test_nothing_is_copied_ahead_on_a_cpu() -> None:
    assert copies.copies_ahead(torch.device("cpu")) is None


def test_validation_batches_are_pinned_and_copied_ahead(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of validation computes while the next one is copied."""
    computing = steps.on_device
    monkeypatch.setattr(steps, "on_device", lambda batches, _: computing(batches, Device()))

    class Model(torch.nn.Linear):
        def forward(self, batch: Batch) -> SimpleNamespace:
            streams.log.append("computed")
            return SimpleNamespace(out=self.bias.sum() + len(batch.ids))

    loss, labels = steps.validate(Model(1, 1), [one_token_each([n], [n]) for n in range(3)], ONE_DEVICE)
    assert labels == 0 and loss == loss
    order = [line for line in streams.log if line in ("computed", "copied on copying")]
    assert order == ["copied on copying", "copied on copying", "computed", "copied on copying", "computed", "computed"]
