"""Which rank encodes which image of a micro-batch, where images are dealt over ranks."""

from collections.abc import Sequence

from eyeline.core.cost import Cost

Images = tuple[tuple[int, ...], ...]  # a number for each image of each rank's batch


def encoders_of(patches: Sequence[Sequence[int]], cost: Cost) -> Images:
    """The rank that encodes each image: the largest go first, each to the rank with the least to do, and of those with as little to the
    one that shows it. `patches[r]` are those of the images that rank r shows.

    No rank gets more patches than the fullest one shows, so that dealing images never needs more memory; if that leaves an image without
    a rank, or the slowest rank would not be faster, each rank encodes what it shows.
    """
    at_home = tuple((rank,) * len(shown) for rank, shown in enumerate(patches))
    ranks, room = len(patches), max(map(sum, patches), default=0)
    load, held = [0] * ranks, [0] * ranks
    encoders = [[rank] * len(shown) for rank, shown in enumerate(patches)]
    largest_first = sorted((-n, image, rank) for rank, shown in enumerate(patches) for image, n in enumerate(shown))
    for negative, image, shows in largest_first:
        n = -negative
        fitting = [rank for rank in range(ranks) if held[rank] + n <= room]
        if not fitting:
            return at_home
        rank = min(fitting, key=lambda rank, shows=shows: (load[rank], rank != shows, rank))
        encoders[shows][image] = rank
        load[rank] += cost_of_image(n, cost)
        held[rank] += n
    return tuple(map(tuple, encoders)) if max(load, default=0) < max(loads(patches, at_home, cost), default=0) else at_home


def loads(patches: Sequence[Sequence[int]], encoders: Images, cost: Cost) -> list[int]:
    """What the images that each rank encodes cost."""
    load = [0] * len(patches)
    for shown, by in zip(patches, encoders, strict=True):
        for n, rank in zip(shown, by, strict=True):
            load[rank] += cost_of_image(n, cost)
    return load


def cost_of_image(patches: int, cost: Cost) -> int:
    return cost.patch * patches + cost.patch_pair * patches**2
