"""Dealing: every pack to one rank, the same number of slots for each, and little waiting."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget
from eyeline.core.step import imbalance
from eyeline.data.plan.plan import Bins, deal, pack_items
from tests.data.mixture import mixture

costs = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40)


def waited(costs: list[tuple[int, int]], slots: tuple[tuple[int, ...], ...]) -> int:
    return sum(max(sum(cost) for cost in slot) for slot in costs_of(costs, slots))


def costs_of(costs: list[tuple[int, int]], slots: tuple[tuple[int, ...], ...]) -> list[list[tuple[int, int]]]:
    """The costs of each rank's pack, for each slot."""
    return [[costs[n] if n < len(costs) else (0, 0) for n in slot] for slot in slots]


@given(costs, st.integers(1, 9))
def test_every_pack_once_and_as_many_slots_for_each_rank(costs: list[tuple[int, int]], ranks: int) -> None:
    dealt = deal(costs, ranks)
    assert len(dealt) == -(-len(costs) // ranks)
    assert all(len(slot) == ranks for slot in dealt)
    assert sorted(n for slot in dealt for n in slot) == list(range(len(dealt) * ranks))
    assert all(n < len(costs) for slot in dealt[:-1] for n in slot)  # empty packs fill up, in the last slot


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(2, 3))
def test_no_other_deal_waits_less(costs: list[tuple[int, int]], ranks: int) -> None:
    best = waited(costs, deal(costs, ranks))
    padded = range(len(costs) + -len(costs) % ranks)
    for order in permutations(padded):
        slots = tuple(tuple(order[n : n + ranks]) for n in range(0, len(order), ranks))
        assert best <= waited(costs, slots)


def test_one_rank_keeps_the_order() -> None:
    costs = [(1, 0), (3, 0), (2, 0)]
    assert deal(costs, 1) == ((0,), (1,), (2,))
    assert imbalance(costs_of(costs, deal(costs, 1))) == {"language": 1, "vision": 1, "all": 1}


def test_imbalance_by_hand() -> None:
    costs = [(4, 0), (1, 1), (2, 2), (1, 0)]
    dealt = deal(costs, 2)
    assert dealt == ((0, 2), (1, 3))
    assert imbalance(costs_of(costs, dealt)) == {"language": (4 + 1) / 4, "vision": (2 + 1) / 1.5, "all": (4 + 2) / 5.5}
    alone = imbalance(costs_of([(1, 0)], deal([(1, 0)], 2)))
    assert alone == {"language": 2, "vision": 1, "all": 2}  # one works, the other waits: twice the mean


def test_64_ranks_wait_little_on_a_realistic_mixture() -> None:
    """Four micro-batches a rank, costs of an 8B model with a 0.4B tower; patches for a quarter more images than on average."""
    tokens, patches = mixture(60_000, 0.7, 0.0)
    bins: Bins = []
    packs = list(pack_items(zip(range(len(tokens)), tokens.tolist(), patches.tolist(), strict=True), bins, Budget(8192, 24_576)))

    def cost(items: list[int]) -> tuple[int, int]:
        t, p = tokens[items].astype(np.int64), patches[items].astype(np.int64)
        return int((48e9 * t + 7.1e5 * t * (t + 1)).sum()), int((2.4e9 * p + 3.3e5 * p * p).sum())

    steps = [[cost(items) for items in packs[n : n + 256]] for n in range(0, len(packs) - 255, 256)]
    assert len(steps) >= 15
    dealt = np.mean([imbalance(costs_of(costs, deal(costs, 64)))["all"] for costs in steps])
    assert dealt <= 1.05
    in_order = [max(sum(cost(items)) for items in packs[n : n + 64]) for n in range(0, len(packs) - 63, 64)]
    mean = np.mean([sum(cost(items)) for items in packs])
    assert dealt - 1 < 0.5 * (np.mean(in_order) / mean - 1)  # what ranks wait without it


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_which_packs_are_dealt_does_not_depend_on_the_ranks(ranks: int) -> None:
    costs = [(n * 7 % 11, n % 3) for n in range(10)]
    assert {n for slot in deal(costs, ranks) for n in slot if n < 10} == set(range(10))
