"""The mesh of a run: how many ranks share out what. Settings, every problem of them at once, and the groups of ranks that follow."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from eyeline.core.errors import Refused
from eyeline.core.plan import LanguageSizes, Plan
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.core.world import World

if TYPE_CHECKING:  # importing it takes a while, and a single process has no mesh
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from eyeline.parallel.images import ImageExchange
    from eyeline.parallel.pipeline import Pipeline

Reshard = Literal["always", "never", "node"]


class MeshSizes(Settings):
    """Ranks along each axis; their product is the number of ranks."""

    dp_replicate: Positive = 1  # copies of the model; each is sharded over dp_shard ranks (HSDP)
    dp_shard: Annotated[int, Field(ge=-1)] = -1  # ranks that the parameters are sharded over (FSDP); -1: all that are left
    cp: Positive = 1  # context parallelism
    tp: Positive = 1  # tensor parallelism
    pp: Positive = 1  # pipeline parallelism
    pp_slices_per_rank: Positive = 1  # 1: the schedule is 1F1B; more: interleaved 1F1B
    ep: Positive = 1  # expert parallelism
    # when gathered parameters are freed: after each forward pass, only after the backward pass, or kept within a node ("node")
    reshard_after_forward: Reshard = "always"
    vocab_parallel: bool = False  # embedding and head are cut over tp as well
    balance_images: bool = False  # images are dealt over all ranks before the vision tower, and their visual tokens sent back
    # gradients are summed over ranks after each micro-batch, so that a rank holds its part of them; else after the last one of a step
    sync_each_batch: bool = True
    # blocks whose parameters are gathered while one computes; not set: torch's own order
    forward_prefetch: Positive | None = None
    backward_prefetch: Positive | None = None
    timeout_minutes: PositiveFloat = 10.0  # a rank that does not answer for so long ends the run

    @property
    def per_pack(self) -> int:
        """Ranks that share a pack's rows: each has some of them."""
        return self.cp * self.tp

    @property
    def same_packs(self) -> int:
        """Ranks that are given the same packs."""
        return self.per_pack * self.pp

    @property
    def experts_apart(self) -> bool:
        """Return whether experts are sharded over other ranks than the branches of their block."""
        return self.ep > 1 or self.tp > 1

    @property
    def slices(self) -> int:
        """Slices that the model is cut into along its depth."""
        return self.pp * self.pp_slices_per_rank

    def bubble(self, micro_batches: int) -> tuple[int, int]:
        """What part of a step ranks wait for one another, if all slices took as long: a ratio. Each rank waits while the first micro-batch
        comes to it and the last one leaves, for as long as pp - 1 passes of a slice take."""
        passes = micro_batches * self.pp_slices_per_rank
        return self.pp - 1, passes + self.pp - 1

    def dp_shard_of(self, world: int) -> int:
        """The size of dp_shard among so many ranks."""
        return world // (self.dp_replicate * self.same_packs) if self.dp_shard == -1 else self.dp_shard

    def sharded_over(self, world: int) -> int:
        """Ranks that share out a parameter which no other axis cuts: all that see other rows than one another."""
        return self.dp_shard_of(world) * self.per_pack


def problems(sizes: MeshSizes, world: int | None, packs_per_step: int | None = None) -> Iterator[str]:
    """Everything about the mesh that does not fit a number of ranks, with the arithmetic; of no number, what fits none."""
    if sizes.pp == 1 and sizes.pp_slices_per_rank > 1:
        yield f"mesh.pp_slices_per_rank={sizes.pp_slices_per_rank} is of pipeline parallelism, and mesh.pp is 1. Set pp, or leave it out"
    if sizes.pp > 1 and sizes.balance_images:
        yield f"mesh.balance_images with mesh.pp={sizes.pp} is not there yet: only ranks with the first slice have the tower. Leave one out"
    if sizes.pp > 1 and sizes.vocab_parallel:
        yield f"mesh.vocab_parallel with mesh.pp={sizes.pp} is not there yet: first and last slice have the vocabulary. Leave it out"
    if sizes.vocab_parallel and sizes.tp == 1:
        yield "mesh.vocab_parallel=true: tensor parallelism shares out the vocabulary, and mesh.tp=1. Set mesh.tp, or leave it out"
    yield from _prefetch_problems(sizes, world)
    if sizes.dp_shard == 0:
        yield "mesh.dp_shard=0: wanted a number of ranks, or -1 for all that are left"
    elif world is not None:
        yield from _problems_of(sizes, world, packs_per_step)


def _prefetch_problems(sizes: MeshSizes, world: int | None) -> Iterator[str]:
    """Blocks that would be gathered ahead, where nothing is gathered."""
    whole = sizes.per_pack == 1 and (sizes.dp_shard if world is None else sizes.dp_shard_of(world)) == 1
    for name, count in (("forward_prefetch", sizes.forward_prefetch), ("backward_prefetch", sizes.backward_prefetch)):
        if count is not None and (world == 1 or whole):
            why = "this is one process" if world == 1 else "with dp_shard=1 each rank has them whole"
            yield f"mesh.{name}={count} gathers parameters that ranks share out ahead of their block, and {why}. Leave it out"
    if sizes.backward_prefetch is not None and sizes.reshard_after_forward == "never":
        yield (
            f"mesh.backward_prefetch={sizes.backward_prefetch} with mesh.reshard_after_forward=never: parameters are kept until the "
            "backward pass, which gathers none. Leave one of them out"
        )


def _problems_of(sizes: MeshSizes, world: int, packs_per_step: int | None) -> Iterator[str]:
    """What does not fit so many ranks."""
    named = {axis: getattr(sizes, axis) for axis in ("pp", "dp_replicate", "cp", "tp") if getattr(sizes, axis) > 1}
    fixed = math.prod(named.values())
    product = " × ".join(f"{axis} {size}" for axis, size in named.items())
    if world == 1 and (fixed > 1 or sizes.dp_shard > 1 or sizes.ep > 1):
        axes = named | {axis: getattr(sizes, axis) for axis in ("dp_shard", "ep") if getattr(sizes, axis) > 1}
        yield (
            f"mesh: {', '.join(f'{axis}={size}' for axis, size in axes.items())} {'are' if len(axes) > 1 else 'is'} of several ranks, and "
            "this is one process. Start them with --nproc N or torchrun (check has --world-size N), or leave mesh out"
        )
        return
    if sizes.dp_shard == -1 and world % fixed:
        yield (
            f"mesh: {product}{f' = {fixed}' if len(named) > 1 else ''} does not divide {world} ranks. Choose sizes whose product divides "
            f"{world}, or start another number of processes"
        )
        return
    shards = sizes.dp_shard_of(world)
    if fixed * shards != world:
        yield (
            f"mesh: {' × '.join([*([product] if product else []), f'dp_shard {shards}'])} = {fixed * shards}, and there are {world} ranks. "
            f"Set dp_shard=-1 for all that are left, or start {fixed * shards} processes"
        )
        return
    if sizes.ep > 1 and sizes.sharded_over(world) % sizes.ep:
        yield (
            f"mesh.ep={sizes.ep} does not divide the {sizes.sharded_over(world)} ranks that dp_shard × cp × tp = {shards} × {sizes.cp} × "
            f"{sizes.tp} are. Set it to a divisor of {sizes.sharded_over(world)}"
        )
    packs = world // sizes.same_packs
    if packs_per_step is not None and packs_per_step < packs:
        who = f"{packs} ranks" if sizes.same_packs == 1 else f"{packs} groups of {sizes.same_packs} ranks that share a pack"
        yield (
            f"batch.packs_per_step={packs_per_step} is less than the {who}, so that {packs - packs_per_step} of them would have "
            f"nothing to compute in each step. Raise it to at least {packs * sizes.pp}, or start fewer processes"
        )


def schedule_problems(sizes: MeshSizes, world: int, packs_per_step: int) -> Iterator[str]:
    """Micro-batches that do not fit the schedule of a pipeline."""
    pipelines = world // sizes.same_packs
    if sizes.pp == 1 or pipelines == 0 or packs_per_step < pipelines:  # the last is a problem of any mesh
        return
    count = -(-packs_per_step // pipelines)
    many = "1 pipeline" if pipelines == 1 else f"{pipelines} pipelines"
    each = f"batch.packs_per_step={packs_per_step} ÷ {many} = {count} micro-batch{'' if count == 1 else 'es'}"
    if count < sizes.pp:
        yield (
            f"{each}, which is less than mesh.pp={sizes.pp}, so that some ranks would always wait. Raise packs_per_step to at least "
            f"{pipelines * sizes.pp}, better {4 * pipelines * sizes.pp}, or lower pp"
        )
    elif sizes.pp_slices_per_rank > 1 and count % (rounds := count // sizes.pp):
        fits = next(n for n in range(count, 0, -1) if n % max(1, n // sizes.pp) == 0)
        more = next(n for n in range(count, 4 * count) if n % max(1, n // sizes.pp) == 0)
        yield (
            f"{each}, which interleaved 1F1B takes in {count} ÷ pp {sizes.pp} = {rounds} rounds of as many each, and {rounds} does not "
            f"divide {count}. Set packs_per_step to {fits * pipelines} or {more * pipelines}, or pp_slices_per_rank to 1"
        )


def model_problems(sizes: MeshSizes, plan: Plan[Any], max_tokens: int | None = None) -> Iterator[str]:
    """What about the mesh does not fit a model, with the arithmetic."""
    language = plan.spec.language
    heads = {
        "heads": language.heads,
        "kv_heads": language.kv_heads,
        "delta.key_heads": language.state_key_heads,
        "delta.value_heads": language.state_value_heads,
    }
    for name, count in heads.items():
        if count is not None and count % sizes.tp:
            yield f"mesh.tp={sizes.tp} does not divide the language model's {name}={count}. Choose tp from the divisors of {count}"
    widths = {
        entry.shape[entry.split.dim]
        for entry in plan.table.values()
        if entry.part == "language" and entry.split is not None and entry.split.unit in ("outputs", "inputs")
    }
    for width in sorted(width for width in widths if width % sizes.tp):
        yield f"mesh.tp={sizes.tp} does not divide the feed-forward width {width}. Choose tp from its divisors"
    if sizes.vocab_parallel and plan.spec.vocab_size % sizes.tp:
        yield (
            f"mesh.vocab_parallel=true: tp={sizes.tp} does not divide the {plan.spec.vocab_size} rows of the vocabulary. Leave it out: "
            "each rank then has embedding and head whole while it computes"
        )
    if sizes.cp > 1:
        yield from _cp_problems(sizes, language)
    if sizes.pp > 1:
        yield from _pp_problems(sizes, plan)
    if sizes.ep > 1 and language.experts is None:
        yield f"mesh.ep={sizes.ep}: this model has no experts. Leave ep out"
    elif sizes.ep > 1 and language.experts is not None and language.experts % sizes.ep:
        yield f"mesh.ep={sizes.ep} does not divide the {language.experts} experts of a layer. Choose ep from its divisors"
    if max_tokens is not None and max_tokens % sizes.per_pack:
        yield (
            f"batch.max_tokens={max_tokens} is not a multiple of cp × tp = {sizes.cp} × {sizes.tp} = {sizes.per_pack}, the ranks that "
            f"share a pack's rows. Set it to {max_tokens - max_tokens % sizes.per_pack} or {max_tokens + -max_tokens % sizes.per_pack}"
        )


def _cp_problems(sizes: MeshSizes, language: LanguageSizes) -> Iterator[str]:
    """Heads are dealt over cp: key and value heads may be fewer, each is then computed with on several ranks."""
    for name, count in (("heads", language.heads), ("delta.value_heads", language.state_value_heads)):
        if count is not None and count % (sizes.cp * sizes.tp):
            yield (
                f"mesh: cp × tp = {sizes.cp} × {sizes.tp} = {sizes.cp * sizes.tp} does not divide the language model's {name}={count}, "
                "which the ranks of a pack share out. Choose smaller ones"
            )
    for name, count in (("kv_heads", language.kv_heads), ("delta.key_heads", language.state_key_heads)):
        here = None if count is None else count // sizes.tp
        if here and here % sizes.cp and sizes.cp % here:
            yield f"mesh.cp={sizes.cp} and the {here} {name} of a rank: one must divide the other. Choose another cp"


def _pp_problems(sizes: MeshSizes, plan: Plan[Any]) -> Iterator[str]:
    """Every slice has a block at least; the first has those that DeepStack adds visual tokens after."""
    layers = plan.spec.language.layers
    deep = 0 if plan.spec.vision is None else plan.spec.vision.deepstack
    product = f"pp × pp_slices_per_rank = {sizes.pp} × {sizes.pp_slices_per_rank} = {sizes.slices}"
    what = f"mesh.pp={sizes.pp}" if sizes.pp_slices_per_rank == 1 else f"mesh: {product}"
    if sizes.slices > layers:
        yield f"{what} is more than the {layers} blocks of the language model, and each slice needs one. Choose at most {layers}"
    elif deep + sizes.slices - 1 > layers:
        yield (
            f"{what}: the first slice needs the {deep} blocks that DeepStack adds visual tokens after, and {layers} - {deep} = "
            f"{layers - deep} blocks are left for {sizes.slices - 1} slices. Choose at most {layers - deep + 1} slices"
        )


def refuse_problems(sizes: MeshSizes, world: int, packs_per_step: int | None = None) -> None:
    """Raise Refused with every problem."""
    if found := [*problems(sizes, world, packs_per_step)]:
        raise Refused("\n  ".join(["the mesh does not fit:", *found]) if len(found) > 1 else found[0])


AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # the last varies fastest: neighbours exchange the most


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run in their places. Parameters are sharded over the ranks that see other rows than one another: those of `shard`;
    within a branch that tensor parallelism cuts, those of `split`."""

    sizes: MeshSizes
    shard: "DeviceMesh"  # what parameters that no branch cuts are sharded over: (dp_shard,), or (dp_replicate, dp_shard)
    everyone: "ProcessGroup"  # all ranks, on the device
    same_slices: "ProcessGroup"  # those that have the same slices of the model; all, where it is not cut along its depth
    reshard: bool | int  # as FSDP2 takes it
    axes: "DeviceMesh | None" = None  # AXES; None where there is no axis but dp_replicate and dp_shard
    split: "DeviceMesh | None" = None  # what parameters that tp cuts are sharded over, each rank's piece
    experts: "DeviceMesh | None" = None  # what experts are sharded over; those of other ranks of `ep` are not here at all
    ep: "DeviceMesh | None" = None
    images: "ImageExchange | None" = None  # where ranks share out images
    pipeline: "Pipeline | None" = None  # the ranks that have the slices of one model

    @property
    def answers(self) -> bool:
        """Return whether this rank writes what all ranks with the same slices hold whole."""
        return self.same_slices.rank() == 0

    @property
    def tp(self) -> "DeviceMesh | None":
        return self.axes["tp"] if self.axes is not None and self.sizes.tp > 1 else None

    @property
    def pack_rank(self) -> tuple[int, int]:
        """This rank along cp and along tp, among those that share a pack."""
        return (0, 0) if self.axes is None else (self.axes["cp"].get_local_rank(), self.axes["tp"].get_local_rank())


def mesh_of(sizes: MeshSizes, world: World, device: str, packs_per_step: int | None = None) -> Mesh | None:
    """The mesh of the ranks that were started; None for a single process. Raises Refused with every problem."""
    refuse_problems(sizes, world.size, packs_per_step)
    if world.size == 1:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from eyeline.parallel.images import ImageExchange

    shard = sizes.sharded_over(world.size)
    reshard = {"always": True, "never": False, "node": world.local_size}[sizes.reshard_after_forward]
    if sizes.reshard_after_forward == "node" and (shard % world.local_size or world.local_size in (1, shard)):
        reshard = True  # one rank per node, or one node in all: keeping gathered parameters within a node would change nothing
    everyone = dist.group.WORLD
    assert everyone is not None
    images = ImageExchange(everyone, sizes.per_pack) if sizes.balance_images else None
    if sizes.per_pack == 1 and sizes.ep == 1 and sizes.pp == 1:
        both = init_device_mesh(device, (sizes.dp_replicate, shard), mesh_dim_names=AXES[:2])
        return Mesh(sizes, both if sizes.dp_replicate > 1 else both["dp_shard"], everyone, everyone, reshard, images=images)
    lengths = (sizes.dp_replicate, sizes.dp_shard_of(world.size), sizes.cp, sizes.tp)
    pipeline, same_slices = None, everyone
    if sizes.pp == 1:
        axes = init_device_mesh(device, lengths, mesh_dim_names=AXES)
    else:
        from eyeline.parallel.pipeline import Pipeline

        whole = init_device_mesh(device, (sizes.pp, *lengths), mesh_dim_names=("pp", *AXES))
        axes, pipeline = whole[AXES], Pipeline(whole["pp"].get_group())
        same_slices = axes._flatten("same_slices").get_group()
    # the three helpers are private in name, in all versions of torch that we know; torchtitan builds its meshes with them, too
    every = axes["dp_shard"] if sizes.per_pack == 1 else axes["dp_shard", "cp", "tp"]._flatten("dp_shard_cp_tp")
    split = axes["dp_shard"] if sizes.cp == 1 else axes["dp_shard", "cp"]._flatten("dp_shard_cp")
    experts = ep = None
    if sizes.ep > 1:
        apart = every._unflatten(0, (shard // sizes.ep, sizes.ep), ("dp_shard_experts", "ep"))
        experts, ep = apart["dp_shard_experts"], apart["ep"]
    if sizes.dp_replicate > 1:
        every, split = (DeviceMesh._concatenate([axes["dp_replicate"], x]) for x in (every, split))
        experts = experts and DeviceMesh._concatenate([axes["dp_replicate"], experts])
    return Mesh(sizes, every, everyone, same_slices, reshard, axes, split, experts, ep, images, pipeline)
