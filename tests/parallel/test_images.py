"""Which rank encodes which image, and the ways there and back."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from eyeline.core.batch import Batch, Counts
from eyeline.core.cost import Cost
from eyeline.core.encoders import encoders_of, loads
from eyeline.core.image_rule import ImageRule, Square
from eyeline.core.step import Slot, imbalance, step_of
from eyeline.core.world import World
from eyeline.data.fetch.batches import batch_of
from eyeline.parallel.images import rows_of, ways_of
from eyeline.parallel.mesh import MeshSizes, mesh_of
from tests.ranks import on_ranks

SQUARES = Cost(token=0, pair=0, label=0, patch=1, patch_pair=1)
LINEAR = Cost(token=0, pair=0, label=0, patch=1, patch_pair=0)


def test_largest_image_goes_first_to_the_rank_with_least() -> None:
    """9 stays, 8 goes to the idle rank, then 3 to the one with 8 patches, and 2 as well: by hand."""
    assert encoders_of([[9, 8, 3, 2], []], LINEAR) == ((0, 1, 1, 0), ())
    assert encoders_of([[4, 4], [4, 4]], LINEAR) == ((0, 0), (1, 1)), "what is even stays where it is"
    assert encoders_of([[], []], LINEAR) == ((), ())
    assert encoders_of([[9, 8, 3, 2]], LINEAR, 2) == ((0, 1, 1, 0),), "two ranks share the pack"
    assert encoders_of([[9, 1, 1], [3]], LINEAR, 2) == ((0, 1, 3), (2,)), "of idle ranks, one that shows it"


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


@pytest.mark.parametrize("sharing", [1, 2])
def test_images_arrive_at_their_encoders_and_come_back_in_order(sharing: int) -> None:
    """All ways together, without processes: rows are labelled (pack, row)."""
    patches = [[4, 8, 4], [], [12, 4]]
    encoders = ((1, 0, 2), (), (1, 2)) if sharing == 1 else ((3, 0, 5), (), (1, 5))
    ranks = range(3 * sharing)
    ways = [ways_of(patches, encoders, rank, sharing) for rank in ranks]
    shown = [[(rank // sharing, n) for n in range(sum(patches[rank // sharing]))] for rank in ranks]

    def exchange(sent: list[list[tuple[int, int]]], out: list[list[int]]) -> list[list[tuple[int, int]]]:
        cut = [[rows[sum(to[:r]) : sum(to[: r + 1])] for r in ranks] for rows, to in zip(sent, out, strict=True)]
        return [[row for s in ranks for row in cut[s][r]] for r in ranks]

    sent = [[shown[r][n] for n in rows_of(way.sent, way.own).tolist()] for r, way in enumerate(ways)]
    encoded = exchange(sent, [way.patches_out for way in ways])
    assert [len(rows) for rows in encoded] == [sum(way.encoded) for way in ways]
    assert sum(map(len, encoded)) == sum(map(sum, patches)), "each image is encoded once"
    assert all(way.patches_in == [ways[s].patches_out[r] for s in ranks] for r, way in enumerate(ways))
    assert all(way.images_in == [ways[s].images_out[r] for s in ranks] for r, way in enumerate(ways))
    packs = [rank // sharing for rank in ranks]
    back = [[rows[n] for n in rows_of(packs, way.by_pack).tolist()] for rows, way in zip(encoded, ways, strict=True)]
    home = exchange(back, [[way.by_pack[pack] for pack in packs] for way in ways])
    assert all(way.tokens_in == [ways[s].by_pack[packs[r]] for s in ranks] for r, way in enumerate(ways))
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


RULE = ImageRule(1, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Square(2))  # patches of one pixel; four of them are a token
SHOWN = [[4, 8, 4, 12], [], [12, 4]]
ENCODERS = ((1, 0, 2, 0), (), (1, 2))


def batch_of_rank(rank: int) -> Batch:
    """Each patch has its rank, image and number."""
    rows = [(rank, image, n) for image, count in enumerate(SHOWN[rank]) for n in range(count)]
    empty, sizes = batch_of((), None), SHOWN[rank]
    return replace(
        empty,
        patches_PC=torch.tensor(rows, dtype=torch.uint8).reshape(-1, 3) if rows else empty.patches_PC,
        places_P2=torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)[:, 1:],
        draws_P2=torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)[:, :2],
        grids_N2=torch.tensor([(2, n // 2) for n in sizes], dtype=torch.int64).reshape(-1, 2),
        cu_N1=torch.tensor([0, *sizes]).cumsum(0).int(),
        longest_image=max(sizes, default=0),
    )


@pytest.mark.ranks
def test_ranks_encode_what_others_show_and_send_it_home() -> None:
    """Three ranks, one of which shows nothing. A token is its first patch; a gradient is ten times the rank that shows it."""

    def work(world: World) -> Any:
        mesh = mesh_of(MeshSizes(balance_images=True), world, "cpu")
        assert mesh is not None and mesh.images is not None
        mesh.images.rule = RULE
        batch = batch_of_rank(world.rank)
        slot = Slot(Counts.zero(), True, True, (), tuple(map(tuple, SHOWN)), ENCODERS)
        with mesh.images.dealt(batch, slot) as dealt:
            tokens_MD = dealt.patches_PC[::4].float().requires_grad_()
            home_MD = mesh.images.home(tokens_MD)
        (home_MD * 10 * (world.rank + 1)).sum().backward()
        assert torch.equal(dealt.draws_P2[:, 0], dealt.patches_PC[:, 0].int()) and torch.equal(
            dealt.places_P2, dealt.patches_PC[:, 1:].long()
        )
        assert dealt.longest_image == int(dealt.cu_N1.diff().max()) and dealt.grids_N2.prod(1).tolist() == dealt.cu_N1.diff().tolist()
        assert mesh.images.home(tokens_MD) is tokens_MD, "outside, nothing moves"
        return home_MD.tolist(), dealt.patches_PC.tolist(), tokens_MD.grad.tolist()

    for rank, (home, encoded, gradients) in enumerate(on_ranks(3, work)):
        assert home == batch_of_rank(rank).patches_PC[::4].tolist()
        assert {(shows, image) for shows, image, _ in encoded} == {
            (shows, image) for shows, by in enumerate(ENCODERS) for image, encoder in enumerate(by) if encoder == rank
        }
        assert gradients == [[10.0 * (shows + 1)] * 3 for shows, *_ in encoded[::4]]
