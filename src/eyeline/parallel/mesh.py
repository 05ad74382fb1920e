"""The mesh of a run: how many ranks share out what. Settings, every problem of them at once, and the groups of ranks that follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from eyeline.core.errors import Refused
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.core.world import World
from eyeline.parallel.images import ImageExchange

if TYPE_CHECKING:  # importing it takes a while, and a single process has no mesh
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Reshard = Literal["always", "never", "node"]


class MeshSizes(Settings):
    """Ranks along each axis; their product is the number of ranks."""

    dp_replicate: Positive = 1  # copies of the model; each is sharded over dp_shard ranks (HSDP)
    dp_shard: Annotated[int, Field(ge=-1)] = -1  # ranks that the parameters are sharded over (FSDP); -1: all that are left
    cp: Positive = 1  # context parallelism
    tp: Positive = 1  # tensor parallelism
    pp: Positive = 1  # pipeline parallelism
    ep: Positive = 1  # expert parallelism
    # when gathered parameters are freed: after each forward pass, only after the backward pass, or kept within a node ("node")
    reshard_after_forward: Reshard = "always"
    balance_images: bool = False  # images are dealt over all ranks before the vision tower, and their visual tokens sent back
    # gradients are summed over ranks after each micro-batch, so that a rank holds its part of them; else after the last one of a step
    sync_each_batch: bool = True
    timeout_minutes: PositiveFloat = 10.0  # a rank that does not answer for so long ends the run

    def sharded_over(self, world: int) -> int:
        """Ranks that parameters are sharded over in a world of a size."""
        return world // self.dp_replicate if self.dp_shard == -1 else self.dp_shard


def problems(sizes: MeshSizes, world: int | None, packs_per_step: int | None = None) -> Iterator[str]:
    """Everything about the mesh that does not fit a number of ranks, with the arithmetic; of no number, what fits none."""
    for axis, name in (("cp", "context"), ("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        if getattr(sizes, axis) > 1:
            yield f"mesh.{axis}={getattr(sizes, axis)}: {name} parallelism is not there yet. Leave it out, and shard over dp_shard"
    if sizes.dp_shard == 0:
        yield "mesh.dp_shard=0: wanted a number of ranks, or -1 for all that are left"
    elif world is None:
        return
    elif world == 1 and sizes.dp_replicate * max(sizes.dp_shard, 1) > 1:
        yield (
            f"mesh: dp_replicate={sizes.dp_replicate}, dp_shard={sizes.dp_shard} are of several ranks, and this is one process. Start them "
            "with --nproc N or torchrun (check has --world-size N), or leave mesh out"
        )
    elif sizes.dp_shard == -1 and world % sizes.dp_replicate:
        yield (
            f"mesh.dp_replicate={sizes.dp_replicate} does not divide {world} ranks. Set it to a divisor of {world}, or start another "
            "number of processes"
        )
    elif sizes.dp_replicate * sizes.sharded_over(world) != world:
        yield (
            f"mesh: dp_replicate × dp_shard = {sizes.dp_replicate} × {sizes.dp_shard} = {sizes.dp_replicate * sizes.dp_shard}, and there "
            f"are {world} ranks. Set dp_shard=-1 for all that are left, or start {sizes.dp_replicate * sizes.dp_shard} processes"
        )
    if world is not None and packs_per_step is not None and packs_per_step < world:
        yield (
            f"batch.packs_per_step={packs_per_step} is less than the {world} ranks, so that {world - packs_per_step} of them would have "
            f"nothing to compute in each step. Raise it to at least {world}, or start fewer processes"
        )


def refuse_problems(sizes: MeshSizes, world: int, packs_per_step: int | None = None) -> None:
    """Raise Refused with every problem."""
    if found := [*problems(sizes, world, packs_per_step)]:
        raise Refused("\n  ".join(["the mesh does not fit:", *found]) if len(found) > 1 else found[0])


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run in their places."""

    sizes: MeshSizes
    shard: "DeviceMesh"  # what parameters are sharded over: (dp_shard,), or (dp_replicate, dp_shard)
    everyone: "ProcessGroup"  # all ranks, on the device
    reshard: bool | int  # as FSDP2 takes it
    images: ImageExchange | None = None  # where ranks share out images


def mesh_of(sizes: MeshSizes, world: World, device: str, packs_per_step: int | None = None) -> Mesh | None:
    """The mesh of the ranks that were started; None for a single process. Raises Refused with every problem."""
    refuse_problems(sizes, world.size, packs_per_step)
    if world.size == 1:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shard = sizes.sharded_over(world.size)
    whole = init_device_mesh(device, (sizes.dp_replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    reshard = {"always": True, "never": False, "node": world.local_size}[sizes.reshard_after_forward]
    if sizes.reshard_after_forward == "node" and (shard % world.local_size or world.local_size in (1, shard)):
        reshard = True  # one rank per node, or one node in all: keeping gathered parameters within a node would change nothing
    everyone = dist.group.WORLD
    assert everyone is not None
    images = ImageExchange(everyone) if sizes.balance_images else None
    return Mesh(sizes, whole if sizes.dp_replicate > 1 else whole["dp_shard"], everyone, reshard, images)
