"""Dealing: every pack to one rank, the same number of slots for each, and little waiting."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget
from eyeline.data.plan.deal import Deal, deal
from eyeline.data.plan.packing import Bins, packed
from tests.data.mixture import mixture

costs = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40)


def waited(costs: list[tuple[int, int]], slots: tuple[tuple[int | None, ...], ...]) -> int:
    return sum(max(0 if n is None else sum(costs[n]) for n in slot) for slot in slots)


@given(costs, st.integers(1, 9))
def test_every_pack_once_and_as_many_slots_for_each_rank(costs: list[tuple[int, int]], ranks: int) -> None:
    dealt = deal(costs, ranks)
    given = [n for slot in dealt.slots for n in slot]
    assert sorted(n for n in given if n is not None) == list(range(len(costs)))
    assert len(dealt.slots) == -(-len(costs) // ranks)
    assert all(len(slot) == ranks for slot in dealt.slots)
    assert given.count(None) == -len(costs) % ranks  # empty packs fill up, in the last slot
    assert all(None not in slot for slot in dealt.slots[:-1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(2, 3))
def test_no_other_deal_waits_less(costs: list[tuple[int, int]], ranks: int) -> None:
    best = waited(costs, deal(costs, ranks).slots)
    padded = [*range(len(costs)), *[None] * (-len(costs) % ranks)]
    for order in permutations(padded):
        slots = tuple(tuple(order[n : n + ranks]) for n in range(0, len(order), ranks))
        assert best <= waited(costs, slots)


def test_one_rank_keeps_the_order() -> None:
    assert deal([(1, 0), (3, 0), (2, 0)], 1) == Deal(((0,), (1,), (2,)), (1.0, 1.0, 1.0))


def test_imbalance_by_hand() -> None:
    dealt = deal([(4, 0), (1, 1), (2, 2), (1, 0)], 2)
    assert dealt.slots == ((0, 2), (1, 3))
    assert dealt.imbalance == ((4 + 1) / 4, (2 + 1) / 1.5, (4 + 2) / 5.5)
    assert deal([(1, 0)], 2).imbalance == (2.0, 1.0, 2.0)  # one works, the other waits: twice the mean


def test_64_ranks_wait_little_on_a_realistic_mixture() -> None:
    """Four micro-batches a rank, costs of an 8B model with a 0.4B tower; patches for a quarter more images than on average."""
    tokens, patches = mixture(60_000, 0.7, 0.0)
    bins: Bins = []
    packs = list(packed(zip(range(len(tokens)), tokens.tolist(), patches.tolist(), strict=True), bins, Budget(8192, 24_576)))

    def cost(items: list[int]) -> tuple[int, int]:
        t, p = tokens[items].astype(np.int64), patches[items].astype(np.int64)
        return int((48e9 * t + 7.1e5 * t * (t + 1)).sum()), int((2.4e9 * p + 3.3e5 * p * p).sum())

    steps = [deal([cost(items) for items in packs[n : n + 256]], 64) for n in range(0, len(packs) - 255, 256)]
    assert len(steps) >= 15
    dealt = np.mean([step.imbalance[2] for step in steps])
    assert dealt <= 1.05
    in_order = [max(sum(cost(items)) for items in packs[n : n + 64]) for n in range(0, len(packs) - 63, 64)]
    mean = np.mean([sum(cost(items)) for items in packs])
    assert dealt - 1 < 0.5 * (np.mean(in_order) / mean - 1)  # what ranks wait without it


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_which_packs_are_dealt_does_not_depend_on_the_ranks(ranks: int) -> None:
    costs = [(n * 7 % 11, n % 3) for n in range(10)]
    assert {n for slot in deal(costs, ranks).slots for n in slot} - {None} == set(range(10))
