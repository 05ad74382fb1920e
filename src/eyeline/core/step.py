"""One optimizer step as a rank has it: its own batches, and what is true over all ranks. The host knows it before the first forward
pass, so that all ranks run the same passes, whatever each of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyeline.core.batch import Batch, Counts
from eyeline.core.cost import Cost
from eyeline.core.encoders import Images, encoders_of, loads

PackCost = tuple[int, int]  # what a pack costs, as planned: language, vision


@dataclass(frozen=True)
class Slot:
    """What all ranks together run as their n-th micro-batch, after rejects."""

    counts: Counts  # of all ranks
    has_images: bool  # on some rank: the tower runs
    image_gradients: bool  # some rank has images in a pack with labels: gradients reach the tower and the projector
    costs: tuple[PackCost, ...]  # of each rank's pack, and of the images that it encodes
    images: Images = ()  # patches of the images in each rank's batch, or in each batch that several ranks share
    encoders: Images | None = None  # the rank that encodes each of these; None: those that show it
    shown_costs: tuple[int, ...] = ()  # of the images in each of these packs


@dataclass(frozen=True, eq=False)
class Step:
    """The batches of one rank, one for each slot, and the state to resume from right after them."""

    batches: tuple[Batch, ...]
    slots: tuple[Slot, ...]
    state: dict[str, Any]
    epoch: float | None  # epochs done after it

    @property
    def counts(self) -> Counts:
        """The sum over all ranks."""
        return sum((slot.counts for slot in self.slots), Counts.zero())

    @property
    def imbalance(self) -> dict[str, float]:
        """How long ranks wait for one another, by part; of vision also as it would be if each rank encoded what it shows."""
        before = imbalance([[(0, vision) for vision in slot.shown_costs] for slot in self.slots])["vision"]
        return imbalance([slot.costs for slot in self.slots]) | {"vision_before": before}


def step_of(
    batches: Sequence[Batch],
    packs: Sequence[int],
    counts: Sequence[Sequence[Counts]],
    costs: Sequence[Sequence[PackCost]],
    state: dict[str, Any],
    epoch: float | None,
    images: Sequence[Sequence[Sequence[int]]] = (),
    deals_by: Cost | None = None,
    sharing: int = 1,
) -> Step:
    """The step of the rank that has `batches`, whose numbers among the packs of the step are `packs`. `counts[r][n]` are of the n-th
    batch of rank r, `costs[n][r]` of its pack, and `images[r][n]` the patches of its images, which are dealt over ranks by what they cost
    where `deals_by` says it. Where ranks share packs, so many each, r is the number of such a group."""
    slots = []
    for n, (of_ranks, cost) in enumerate(zip(zip(*counts, strict=True), costs, strict=True)):
        shown, gradients = any(c.patches for c in of_ranks), any(c.patches and c.supervised for c in of_ranks)
        slot = Slot(sum(of_ranks, Counts.zero()), shown, gradients, tuple(cost), shown_costs=tuple(vision for _, vision in cost))
        if deals_by is not None:
            sizes = tuple(tuple(of_rank[n]) for of_rank in images)
            encoders = encoders_of(sizes, deals_by, sharing)
            vision = loads(sizes, encoders, deals_by, sharing)
            dealt = tuple((cost[rank // sharing][0], load) for rank, load in enumerate(vision))
            slot = replace(slot, costs=dealt, images=sizes, encoders=encoders)
        slots.append(slot)
    known = [
        replace(batch, pack=pack, has_images=slot.has_images, image_gradients=slot.image_gradients)
        for batch, pack, slot in zip(batches, packs, slots, strict=True)
    ]
    return Step(tuple(known), tuple(slots), state, epoch)


def step_alone(batches: Sequence[Batch]) -> Step:
    """The step of the only rank, of batches that no plan gave."""
    return step_of(batches, range(len(batches)), [[batch.counts for batch in batches]], [[(0, 0)]] * len(batches), {}, None)


def imbalance(costs: Sequence[Sequence[PackCost]]) -> dict[str, float]:
    """What the slowest rank of each slot takes, summed, over what it would be if all took the same: 1 is ideal. `costs[n][r]`."""

    def over_mean(part: slice) -> float:
        of = [[sum(cost[part]) for cost in slot] for slot in costs]
        mean = sum(map(sum, of)) / len(of[0]) if of else 0
        return sum(map(max, of)) / mean if mean else 1.0

    return {"language": over_mean(slice(0, 1)), "vision": over_mean(slice(1, 2)), "all": over_mean(slice(0, 2))}
