"""Which rank encodes which image, and the ways there and back."""

import random

import pytest

from eyeline.core.batch import Counts
from eyeline.core.cost import Cost
from eyeline.core.encoders import encoders_of, loads
from eyeline.core.step import imbalance, step_of
from eyeline.data.fetch.batches import batch_of
from eyeline.parallel.images import rows_of, ways_of

SQUARES = Cost(token=0, pair=0, label=0, patch=1, patch_pair=1)
LINEAR = Cost(token=0, pair=0, label=0, patch=1, patch_pair=0)


def test_largest_image_goes_first_to_the_rank_with_least() -> None:
    """9 stays, 8 goes to the idle rank, then 3 to the one with 8 patches, and 2 as well: by hand."""
    assert encoders_of([[9, 8, 3, 2], []], LINEAR) == ((0, 1, 1, 0), ())
    assert encoders_of([[4, 4], [4, 4]], LINEAR) == ((0, 0), (1, 1)), "what is even stays where it is"
    assert encoders_of([[], []], LINEAR) == ((), ())


def test_cost_is_that_of_attention_too() -> None:
    """One image of 10 patches is as much as a hundred single patches, so the other rank takes all the small ones."""
    patches = [[10, 2, 2, 2, 2], [4]]
    encoders = encoders_of(patches, SQUARES)
    assert encoders == ((0, 1, 1, 1, 1), (1,))
    assert loads(patches, encoders, SQUARES) == [110, 4 * 6 + 20]


def test_no_rank_gets_more_patches_than_the_fullest_shows() -> None:
    rng = random.Random(0)
    moved = even = 0
    for _ in range(300):
        patches = [[rng.choice([1, 4, 16, 64]) for _ in range(rng.randrange(6))] for _ in range(rng.randrange(1, 6))]
        encoders = encoders_of(patches, SQUARES)
        held = [
            sum(n for s, shown in enumerate(patches) for n, by in zip(shown, encoders[s], strict=True) if by == r)
            for r in range(len(patches))
        ]
        assert max(held) <= max(map(sum, patches))
        before = loads(patches, tuple((r,) * len(shown) for r, shown in enumerate(patches)), SQUARES)
        after = loads(patches, encoders, SQUARES)
        assert sum(after) == sum(before)
        moved, even = moved + max(before), even + max(after)
    assert even < 0.75 * moved


def test_images_arrive_at_their_encoders_and_come_back_in_order() -> None:
    """All ways together, without processes: rows are labelled (rank, row)."""
    patches = [[4, 8, 4], [], [12, 4]]
    encoders = ((1, 0, 2), (), (1, 2))
    ways = [ways_of(patches, encoders, rank) for rank in range(3)]
    shown = [[(rank, n) for n in range(sum(patches[rank]))] for rank in range(3)]

    def exchange(sent: list[list[tuple[int, int]]], out: list[list[int]]) -> list[list[tuple[int, int]]]:
        cut = [[rows[sum(to[:r]) : sum(to[: r + 1])] for r in range(3)] for rows, to in zip(sent, out, strict=True)]
        return [[row for s in range(3) for row in cut[s][r]] for r in range(3)]

    sent = [[shown[r][n] for n in rows_of(way.order, way.own).tolist()] for r, way in enumerate(ways)]
    encoded = exchange(sent, [way.patches_out for way in ways])
    assert [len(rows) for rows in encoded] == [sum(way.encoded) for way in ways] == [8, 16, 8]
    assert all(way.patches_in == [ways[s].patches_out[r] for s in range(3)] for r, way in enumerate(ways))
    assert all(way.images_in == [ways[s].images_out[r] for s in range(3)] for r, way in enumerate(ways))
    home = exchange(encoded, [way.patches_in for way in ways])
    for rank, way in enumerate(ways):
        place = sorted(range(len(way.order)), key=way.order.__getitem__)
        rows = rows_of(place, [way.own[n] for n in way.order]).tolist()
        assert [home[rank][n] for n in rows] == shown[rank]


@pytest.mark.parametrize("dealt", [False, True])
def test_step_says_imbalance_before_and_after(dealt: bool) -> None:
    """Two ranks, one of which shows all images."""
    nothing, some = Counts.zero(), Counts(8, 8, 4, 4, 2, 1, 2, 8)
    costs, images = [[(4, 8), (4, 0)]], [[[4, 4]], [[]]]
    step = step_of([batch_of((), None)], [0], [[some], [nothing]], costs, {}, None, images, LINEAR if dealt else None)
    vision = 1.0 if dealt else 2.0
    assert step.imbalance == {"language": 1.0, "vision": vision, "all": 1.0 if dealt else 12 / 8, "vision_before": 2.0}
    assert step.slots[0].encoders == (((0, 1), ()) if dealt else None)
    assert imbalance([slot.costs for slot in step.slots])["vision"] == vision
