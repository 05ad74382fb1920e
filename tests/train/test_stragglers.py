"""Ranks that stay slow are named by what they do alone, and others never are."""

import time

import pytest
import torch
from torch import nn

from eyeline.core.world import World
from eyeline.train.stragglers import WINDOW, OwnTime, OwnTimes, Stragglers

HOSTS = ("node0", "node0", "node1", "node1")


def step(rng: torch.Generator, slow: float = 1.0, late: float = 0.0) -> list[OwnTimes]:
    """A step of four ranks, whose work and times differ by a few percent; the third one is slow, or late with its data."""
    work = (1 + 0.1 * torch.randn(4, generator=rng)).tolist()
    noise = (1 + 0.1 * torch.randn(4, generator=rng)).abs().tolist()
    return [
        OwnTimes(flops * by * (slow if rank == 2 else 1), 1e12 * flops, 0.01 * by + (late if rank == 2 else 0), 1.0)
        for rank, (flops, by) in enumerate(zip(work, noise, strict=True))
    ]


def named(steps: int, **odd: float) -> tuple[list[tuple[int, ...]], list[str]]:
    """Who is slow after each step, and what is said."""
    found, rng = Stragglers(HOSTS), torch.Generator().manual_seed(0)
    slow, said = list[tuple[int, ...]](), list[str]()
    for _ in range(steps):
        slow.append(found.add(step(rng, **odd)))
        said += found.news()
    return slow, said


def test_ranks_that_are_alike_are_never_named() -> None:
    slow, said = named(400)
    assert not any(slow)
    assert not said


def test_a_rank_that_computes_slowly_is_named_once_its_window_is_full() -> None:
    slow, said = named(WINDOW + 10, slow=1.5)
    assert slow == [()] * (WINDOW - 1) + [(2,)] * 11
    [line] = said
    assert line.startswith("rank 2 (node1) is slow: over the last 50 steps it computes at 6")


def test_a_rank_that_waits_for_its_data_is_named() -> None:
    _, said = named(WINDOW, late=0.3)
    assert said == [
        "rank 2 (node1) is slow: over the last 50 steps it waits 0.310 s per step for its own data, and the median rank 0.010 s"
    ]


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    found, rng = Stragglers(HOSTS), torch.Generator().manual_seed(0)
    assert not any(found.add(step(rng, slow=1.5 if n % 5 == 0 else 1.0)) for n in range(200))


def test_of_two_ranks_the_slower_one_is_named() -> None:
    found = Stragglers(("a", "b"))
    for _ in range(WINDOW):
        slow = found.add([OwnTimes(1.0, 1e12, 0, 3), OwnTimes(1.5, 1e12, 0, 3)])
    assert slow == (1,)


def test_forward_passes_of_blocks_are_timed_and_waits_for_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += 2
            return x

    blocks = nn.ModuleList([Block(), Block()])
    own = OwnTime(blocks, torch.device("cpu"), World(0, 2, waits=waited))
    for block in blocks:
        now[0] += 10  # a collective
        block(torch.zeros(1))
    with own.waiting():
        now[0] += 5
        waited[0] += 4
    assert own.lap(7.0) == OwnTimes(4.0, 7.0, 1.0, 29.0)
    assert own.lap(0.0) == OwnTimes(0.0, 0.0, 0.0, 0.0)
