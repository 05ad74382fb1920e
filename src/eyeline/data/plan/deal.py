"""Who runs which pack of a step: packs are dealt to (slot, rank), so that ranks wait for one another as little as can be.

With sharded weights all ranks wait at every micro-batch, so what a step costs is the sum over its slots of the slowest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Cost2 = tuple[int, int]  # language, vision


@dataclass(frozen=True)
class Deal:
    """`slots[s][r]` is the pack that rank r runs as its micro-batch s; None: an empty one."""

    slots: tuple[tuple[int | None, ...], ...]
    imbalance: tuple[float, float, float]  # language, vision, both: the slowest rank of each slot, over the mean; 1 is ideal


def deal(costs: Sequence[Cost2], ranks: int) -> Deal:
    """Deal all packs. Every rank has as many slots; the last ones are empty where the ranks do not divide the packs.

    Sorted by cost and cut into slots: no other way gives a smaller sum of the slots' largest, since the n-th largest slot
    maximum cannot be less than the cost of pack (n-1)·ranks + 1. One rank runs the packs in their order.
    """
    if ranks == 1:
        return Deal(tuple((n,) for n in range(len(costs))), (1.0, 1.0, 1.0))
    ranked = sorted(range(len(costs)), key=lambda n: (-sum(costs[n]), n))
    order: list[int | None] = [*ranked, *[None] * (-len(costs) % ranks)]
    slots = tuple(tuple(order[begin : begin + ranks]) for begin in range(0, len(order), ranks))

    def over_mean(part: slice) -> float:
        of = [[0 if n is None else sum(costs[n][part]) for n in slot] for slot in slots]
        mean = sum(map(sum, of)) / ranks
        return sum(map(max, of)) / mean if mean else 1.0

    return Deal(slots, (over_mean(slice(0, 1)), over_mean(slice(1, 2)), over_mean(slice(0, 2))))
