"""Which rank encodes which image of a micro-batch, where images are dealt over ranks."""

from collections.abc import Sequence

from eyeline.core.cost import Cost

Images = tuple[tuple[int, ...], ...]  # a number for each image of each rank's batch


def encoders_of(patches: Sequence[Sequence[int]], cost: Cost, sharing: int = 1) -> Images:
    """The rank that encodes each image: the largest go first, each to the rank with the least to do, and of those with as little to one
    that shows it. `patches[g]` are those of the images that the ranks from g · `sharing` on show, which share a pack.

    No rank gets more patches than the fullest pack shows, so that dealing images never needs more memory; if that leaves an image without
    a rank, or the slowest rank would not be faster, a rank of each pack encodes what it shows.
    """
    at_home = tuple((group * sharing,) * len(shown) for group, shown in enumerate(patches))
    ranks, room = len(patches) * sharing, max(map(sum, patches), default=0)
    load, held = [0] * ranks, [0] * ranks
    encoders = [list(by) for by in at_home]
    largest_first = sorted((-n, image, group) for group, shown in enumerate(patches) for image, n in enumerate(shown))
    for negative, image, shows in largest_first:
        n = -negative
        fitting = [rank for rank in range(ranks) if held[rank] + n <= room]
        if not fitting:
            return at_home
        rank = min(fitting, key=lambda rank, shows=shows: (load[rank], rank // sharing != shows, rank))
        encoders[shows][image] = rank
        load[rank] += cost_of_image(n, cost)
        held[rank] += n
    return tuple(map(tuple, encoders)) if max(load, default=0) < max(loads(patches, at_home, cost, sharing), default=0) else at_home


def loads(patches: Sequence[Sequence[int]], encoders: Images, cost: Cost, sharing: int = 1) -> list[int]:
    """What the images that each rank encodes cost."""
    load = [0] * len(patches) * sharing
    for shown, by in zip(patches, encoders, strict=True):
        for n, rank in zip(shown, by, strict=True):
            load[rank] += cost_of_image(n, cost)
    return load


def cost_of_image(patches: int, cost: Cost) -> int:
    return cost.patch * patches + cost.patch_pair * patches**2
