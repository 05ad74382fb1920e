"""The order of visits: everything as often as it should be, a new order each epoch, the same each time it is asked."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyeline.data.plan import order_of, rounds, unshuffled

rows = st.lists(st.tuples(st.sampled_from("abcdef") | st.none(), st.integers(1, 3)), min_size=1, max_size=40)


@given(rows, st.integers(1, 4), st.integers(0, 3))
def test_an_epoch_visits_each_row_as_often_as_its_source_says(rows: list, share: int, epoch: int) -> None:
    numbers = [10 * n for n in range(len(rows))]
    keys, repeats = [key for key, _ in rows], [repeat for _, repeat in rows]
    order = order_of(rounds(numbers, keys, repeats, share), 5, epoch)
    visits = [order.rows(n) for n in range(len(order))]
    assert Counter(row for visit in visits for row in visit) == Counter(dict(zip(numbers, repeats, strict=True)))
    for visit in visits:
        assert 1 <= len(visit) <= share
        pictures = {keys[row // 10] for row in visit}
        assert len(pictures) == 1
        if pictures == {None}:
            assert len(set(visit)) == 1
    for key in set(keys) - {None}:
        count = sum(r for k, r in rows if k == key)
        lengths = [len(v) for v in visits if keys[v[0] // 10] == key]
        assert len(lengths) == -(-count // share)
        assert max(lengths) - min(lengths) <= 1


def test_orders_differ_by_epoch_and_seed_and_are_pure() -> None:
    made = rounds(list(range(60)), [str(n // 6) for n in range(60)], [1] * 60, 3)

    def visits(seed: int, epoch: int) -> list[list[int]]:
        order = order_of(made, seed, epoch)
        return [order.rows(n) for n in range(len(order))]

    assert visits(0, 0) == visits(0, 0)
    several = [visits(0, 0), visits(0, 1), visits(1, 0)]
    for a in range(3):
        for b in range(a):
            assert several[a] != several[b]
            assert {tuple(sorted(v)) for v in several[a]} != {tuple(sorted(v)) for v in several[b]}  # other rows meet, too


def test_visits_of_one_row_come_in_a_new_order_each_epoch() -> None:
    made = rounds(list(range(60)), [None] * 60, [1] * 60, 1)
    orders = [[order_of(made, 0, epoch).rows(n) for n in range(60)] for epoch in range(3)]
    assert all(orders[a] != orders[b] for a in range(3) for b in range(a))


def test_validation_is_as_listed() -> None:
    order = unshuffled(rounds([3, 1, 2, 7], ["a", "b", "a", None], [1] * 4, 2))
    assert [order.rows(n) for n in range(len(order))] == [[3, 2], [1], [7]]


def test_rows_without_a_picture_are_alone() -> None:
    made = rounds([0, 1, 2], [None, None, None], [1, 1, 1], 3)
    assert np.diff(made.bounds_V1).tolist() == [1, 1, 1]
