"""Who runs which pack of a step: packs are dealt to (slot, rank), so that ranks wait for one another as little as can be.

With sharded weights all ranks wait at every micro-batch, so what a step costs is the sum over its slots of the slowest rank.
"""

from collections.abc import Sequence

from eyeline.core.step import PackCost


def deal(costs: Sequence[PackCost], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal all packs: of each slot, the pack that each rank runs. Every rank has as many slots; where the ranks do not divide the
    packs, the last slot has empty packs, whose numbers follow those of the packs.

    Sorted by cost and cut into slots: no other way gives a smaller sum of the slots' largest, since the n-th largest slot
    maximum cannot be less than the cost of pack (n-1)·ranks + 1. One rank runs the packs in their order.
    """
    order = list(range(len(costs) + -len(costs) % ranks))
    if ranks > 1:
        order[: len(costs)] = sorted(range(len(costs)), key=lambda n: (-sum(costs[n]), n))
    return tuple(tuple(order[begin : begin + ranks]) for begin in range(0, len(order), ranks))
