"""Packing loses nothing, breaks no bound, and goes on exactly where its state says."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget
from eyeline.data.packing import fullest, pack

BUDGET = Budget(100, 40)
sizes = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 40)), max_size=80)


def named(sizes: list[tuple[int, int]]) -> list[tuple[list[int], int, int]]:
    return [([n], *size) for n, size in enumerate(sizes)]


@given(sizes, st.integers(0, 5))
def test_every_item_once_and_within_the_budget(sizes: list[tuple[int, int]], open_bins: int) -> None:
    packs = [items for items, _ in pack(named(sizes), BUDGET, open_bins)]
    assert sorted(n for items in packs for (n,) in items) == list(range(len(sizes)))
    for items in packs:
        assert sum(sizes[n][0] for (n,) in items) <= BUDGET.tokens
        assert sum(sizes[n][1] for (n,) in items) <= BUDGET.patches


@settings(deadline=None)
@given(sizes, st.integers(1, 4))
def test_it_goes_on_from_any_state(sizes: list[tuple[int, int]], open_bins: int) -> None:
    """After each pack: the items that were taken and the stored bins are all there is to know."""
    taken: list[int] = []

    def items():
        for n, item in enumerate(named(sizes)):
            taken.append(n)
            yield item

    whole = [(p, json.dumps(bins), len(taken)) for p, bins in pack(items(), BUDGET, open_bins)]
    for at, (_, bins, position) in enumerate(whole):
        rest = list(pack(named(sizes)[position:], BUDGET, open_bins, json.loads(bins)))
        assert [p for p, _ in rest] == [p for p, _, _ in whole[at + 1 :]]


def test_a_state_is_not_changed_later() -> None:
    states = [bins for _, bins in pack(named([(60, 0), (60, 0), (30, 0), (60, 0), (10, 0)]), BUDGET, open_bins=1)]
    first = json.dumps(states[0])
    assert [len(s) for s in states] == [1, 1, 0]
    assert json.dumps(states[0]) == first


def test_best_fit_by_hand() -> None:
    items = [(["a"], 60, 0), (["b"], 70, 0), (["c"], 30, 0), (["d"], 40, 0)]
    packs = [p for p, _ in pack(items, BUDGET)]
    assert packs == [[["b"], ["c"]], [["a"], ["d"]]]  # c fills b's bin best, exactly; then d fills a's


def test_patches_bind_too() -> None:
    packs = [p for p, _ in pack([(["a"], 1, 30), (["b"], 1, 20), (["c"], 1, 10)], BUDGET)]
    assert packs == [[["a"], ["c"]], [["b"]]]


def test_the_fullest_goes_first() -> None:
    bins = [{"items": [n], "tokens": t, "patches": p} for n, (t, p) in enumerate([(50, 0), (10, 39), (90, 0)])]
    assert [fullest(bins, BUDGET) for _ in range(3)] == [[1], [2], [0]]


def test_an_item_over_the_budget_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="101 tokens do not fit"):
        list(pack([(["a"], 101, 0)], BUDGET))
    with pytest.raises(AssertionError, match="41 patches do not fit"):
        list(pack([(["a"], 1, 41)], BUDGET))


def test_little_is_wasted_on_natural_lengths() -> None:
    """Log-normal lengths, median 180, as chat data has: bins that stay open bring the waste below 3 %."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(180), 1.0, 5000), 16, 4096).astype(int)
    budget = Budget(8192, 0)
    packs = [p for p, _ in pack(named([(int(n), 0) for n in lengths]), budget)]
    assert lengths.sum() / (len(packs) * budget.tokens) > 0.97
