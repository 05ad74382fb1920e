"""The order: everything as often as it should be, different in each epoch, the same each time and from any position."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eyeline.core.randomness import seed_for
from eyeline.data.plan import order
from eyeline.data.plan.order import RAMP, WINDOW_SHARDS, Permutation, Runs, image_groups_of, shards_of

images = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1))
def test_a_permutation_has_each_number_once(size: int, key: int) -> None:
    assert np.sort(Permutation(size, key)(np.arange(size))).tolist() == list(range(size))


def test_a_permutation_of_a_hundred_million_is_asked_for_one_place() -> None:
    """Nothing is laid out; and places asked one by one are those asked together."""
    permutation = Permutation(10**8, 7)
    together = permutation(np.array([0, 99_999_999, 12_345_678]))
    assert [int(permutation(np.array([n]))[0]) for n in (0, 99_999_999, 12_345_678)] == together.tolist()
    assert len(set(together.tolist())) == 3


def test_a_permutation_mixes() -> None:
    """Neighbours land far apart, keys differ, and every number is about equally often in every place."""
    size = 1000
    placed = np.stack([Permutation(size, key)(np.arange(size)) for key in range(200)])
    assert 0.30 < np.abs(np.diff(placed, axis=1)).mean() / size < 0.37  # a third, of independent numbers
    assert abs(np.corrcoef(placed[:, 0], placed[:, 1])[0, 1]) < 0.25
    assert abs(placed.mean(0) / size - 0.5).max() < 0.12  # five deviations of a mean of 200 uniform numbers
    assert (placed[0] == placed[1]).sum() < 10


def test_golden_order() -> None:
    """No release of numpy, and no machine, may change the order of a run that is resumed."""
    assert Permutation(10, 42)(np.arange(10)).tolist() == GOLDEN_TEN
    assert Permutation(1_000_000, 42)(np.arange(3)).tolist() == GOLDEN_MILLION


GOLDEN_TEN = [1, 5, 2, 9, 8, 0, 7, 6, 3, 4]
GOLDEN_MILLION = [271164, 860452, 611936]


def alone(shards: int) -> Runs:
    """Shards that belong to no other."""
    return Runs.of(np.zeros(shards, bool))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 2), st.integers(0, 5))
def test_windows_cover_an_epoch_once(shards: int, epoch: int, seed: int) -> None:
    first, window, seen = 0, 0, []
    while first < shards:
        some = shards_of(alone(shards), seed, epoch, first, window, lambda _: 0)
        assert 1 <= len(some) <= WINDOW_SHARDS
        first, window, seen = first + len(some), window + 1, seen + some
    assert sorted(seen) == list(range(shards))


def test_the_first_windows_of_a_run_are_small() -> None:
    sizes, first = [], 0
    for window in range(len(RAMP) + 2):
        sizes.append(len(shards_of(alone(1000), 0, 0, first, window, lambda _: 0)))
        first += sizes[-1]
    assert sizes == [*RAMP, WINDOW_SHARDS, WINDOW_SHARDS]
    assert len(shards_of(alone(1000), 0, 1, 0, 0, lambda _: 0)) == WINDOW_SHARDS  # by then all is indexed


def test_a_window_holds_no_more_memory_than_it_may() -> None:
    held = order.WINDOW_HELD // 4
    assert len(shards_of(alone(1000), 0, 1, 0, 0, lambda _: held)) == 4
    assert len(shards_of(alone(1000), 0, 1, 0, 0, lambda _: 9 * held)) == 1  # a shard is never cut
    joined = Runs.of(np.tile(np.arange(40) > 0, 10))  # runs of 40, each held once whatever is taken of it
    assert len(shards_of(joined, 0, 1, 0, 0, lambda _: 9 * held)) == WINDOW_SHARDS
    assert len(shards_of(joined, 0, 1, 32, 1, lambda _: 9 * held)) == 8  # the rest of the first run
    assert len(shards_of(joined, 0, 1, 32, 1, lambda _: held)) == WINDOW_SHARDS


@settings(deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.integers(0, 2), st.integers(0, 5), st.data())
def test_runs_stay_together_and_any_position_is_known_alone(lengths: list[int], epoch: int, seed: int, data: st.DataObject) -> None:
    runs = Runs.of(np.concatenate([np.arange(length) > 0 for length in lengths]))
    positions = np.arange(sum(lengths))
    chosen, run = runs.at(positions, seed, epoch)
    assert sorted(chosen.tolist()) == positions.tolist()
    met = list(dict.fromkeys(run.tolist()))
    assert run.tolist() == [r for r in met for _ in range(lengths[r])]  # one after another, each whole
    assert met == Permutation(len(lengths), seed_for(seed, "shards", epoch))(np.arange(len(lengths))).tolist()
    starts = np.cumsum([0, *lengths])
    assert all(starts[r] <= c < starts[r + 1] for c, r in zip(chosen.tolist(), run.tolist(), strict=True))
    some = np.array(data.draw(st.lists(st.sampled_from(positions.tolist()), min_size=1)))
    again = Runs.of(np.concatenate([np.arange(length) > 0 for length in lengths])).at(some, seed, epoch)[0]
    assert again.tolist() == chosen[some].tolist()
    assert runs.at(some, None, epoch)[0].tolist() == some.tolist()


def test_parts_of_a_run_come_in_another_order_in_each_epoch() -> None:
    runs = Runs.of(np.arange(60) > 0)
    orders = [runs.at(np.arange(60), 0, epoch)[0].tolist() for epoch in range(3)]
    assert len({tuple(order) for order in [*orders, list(range(60))]}) == 4
    assert orders[0] == runs.at(np.arange(60), 0, 0)[0].tolist()  # whatever was asked for between


@given(images, st.integers(1, 4), st.integers(0, 3))
def test_image_groups_have_each_row_once_and_share_evenly(images: list[int], share: int, epoch: int) -> None:
    groups = list(image_groups_of(np.array(images, np.uint64), share, 5, epoch, 0))
    assert Counter(row for group in groups for row in group) == Counter(range(len(images)))
    for group in groups:
        assert 1 <= len(group) <= share
        shown = {images[row] for row in group}
        assert len(shown) == 1
        assert shown != {0} or len(group) == 1  # rows without an image are alone
    for image in set(images) - {0}:
        lengths = [len(v) for v in groups if images[v[0]] == image]
        assert len(lengths) == -(-images.count(image) // share)
        assert max(lengths) - min(lengths) <= 1


def test_orders_differ_by_epoch_window_and_seed_and_are_pure() -> None:
    images = np.repeat(np.arange(1, 11, dtype=np.uint64), 6)

    def groups(*address: int) -> list[list[int]]:
        return list(image_groups_of(images, 3, *address))

    assert groups(0, 0, 0) == groups(0, 0, 0)
    several = [groups(0, 0, 0), groups(0, 1, 0), groups(0, 0, 1), groups(1, 0, 0)]
    for a in range(4):
        for b in range(a):
            assert several[a] != several[b]
            assert {tuple(sorted(v)) for v in several[a]} != {tuple(sorted(v)) for v in several[b]}  # other rows meet, too


def test_without_a_seed_all_is_as_listed() -> None:
    assert list(image_groups_of(np.array([9, 4, 9, 0], np.uint64), 2, None)) == [[0, 2], [1], [3]]
    assert shards_of(alone(5), None, 0, 2, 2, lambda _: 0) == [2, 3]
