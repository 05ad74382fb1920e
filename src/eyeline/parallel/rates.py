"""How fast the ranks of a mesh sum a tensor, along each axis: what `eyeline check --cluster` measures."""

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from eyeline.core.world import World
from eyeline.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIZES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # bytes of a tensor: large enough that the rate does not depend on it
ROUNDS = 5


class AxisRate(NamedTuple):
    """What this rank saw of the all-reduce along one axis."""

    axis: str
    ranks: tuple[int, ...]  # that sum together
    bytes_per_s: float  # bus bandwidth, as nccl-tests define it: 2 (n - 1) / n · bytes / seconds, of the fastest round
    exact: bool  # the sum was right


def all_reduce_rates(mesh: Mesh, world: World, device: torch.device) -> list[AxisRate]:
    """The rates along each axis that has several ranks. Every rank calls this."""
    import torch.distributed as dist

    rates = []
    groups = [(axis, mesh.shard.get_group(axis)) for axis in mesh.shard.mesh_dim_names or ()]
    groups += [] if mesh.pipeline is None else [("pp", mesh.pipeline.group)]
    for axis, group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            rates.append(_rate(axis, ranks, group, world, device))
    return rates


def _rate(axis: str, ranks: tuple[int, ...], group: "ProcessGroup", world: World, device: torch.device) -> AxisRate:
    import torch.distributed as dist

    own = torch.full((SIZES[device.type] // 4,), float(ranks.index(world.rank) + 1), device=device)
    wanted = len(ranks) * (len(ranks) + 1) / 2  # 1 + 2 + ... in float32 exactly
    fastest, exact = math.inf, True
    for n in range(ROUNDS + 1):
        summed = own.clone()
        world.gather(None)  # all start at the same time
        begin = time.perf_counter()
        dist.all_reduce(summed, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if n:  # the first one connects the ranks
            fastest = min(fastest, time.perf_counter() - begin)
        exact = exact and bool((summed == wanted).all())
    return AxisRate(axis, ranks, 2 * (len(ranks) - 1) / len(ranks) * own.nbytes / fastest, exact)
